"""Links of other users, which are followed only to files of the user who made the link.

Any user who may write to a folder can leave a link there that leads to a private file of whoever works in it. So the
rule holds for all that is written and, when files are read, for all that a folder or an index names. What users name
themselves is read wherever it leads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import SystemRefusedError
from gradtool.store import system
from gradtool.store.fs import TO_SEARCH

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# As many as the system follows.
MAX_LINKS = 40
# O_NONBLOCK, or a FIFO would wait for a writer.
_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class Link(NamedTuple):
    """A link that another user made."""

    path: str
    owner: int


def check_links(path: Path, links: Iterable[Link], file: str | Path, owner: int, kind: str = "file") -> None:
    """Raise `SystemRefusedError` for links of other users to a file, or another kind of thing, that is not theirs."""
    for link in links:
        if link.owner != owner:
            whose = "yours" if owner == os.geteuid() else f"user {owner}"
            message = f"the link {link.path}, which user {link.owner} made, leads to a {kind} of {whose}, {file}"
            raise SystemRefusedError(message, file=path, code="link", hint=f"name that {kind} itself to use it")


def loop() -> OSError:
    """Return the error for links that lead to each other."""
    return OSError(errno.ELOOP, os.strerror(errno.ELOOP))


class Walk:
    """A walk from folder to folder, each opened within the last, so that every link on the way is seen.

    `links` are those that other users made. How a walk gets to its start does not count.
    """

    def __init__(self, start: str) -> None:
        self.fd = os.open(start, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | system.TO_SEARCH)
        # Without links.
        self.path = os.path.realpath(start)
        self.links: list[Link] = []
        self._links_left = MAX_LINKS

    def close(self) -> None:
        """Close the folder."""
        os.close(self.fd)

    def enter(self, path: str) -> None:
        """Go on to a folder, wherever the links on the way lead."""
        left = _parts(path)
        while left:
            part = left.pop()
            status = os.stat(part, dir_fd=self.fd, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                left += _parts(self.target_of(part))
                continue
            inner = os.open(part, TO_SEARCH, dir_fd=self.fd)
            os.close(self.fd)
            self.fd, self.path = inner, self.path_of(part)

    def target_of(self, name: str) -> str:
        """Return where a link in the folder leads, and note the link unless this user or root made it."""
        if not self._links_left:
            raise loop()
        self._links_left -= 1
        status, target = system.read_link(name, self.fd)
        self.links += foreign_links(self.path_of(name), status)
        return target

    def path_of(self, name: str) -> str:
        """Return the path of a name in the folder."""
        return os.path.normpath(os.path.join(self.path, name))  # noqa: PTH118 - a Path keeps `..`


def foreign_links(path: str, status: os.stat_result) -> list[Link]:
    """List a link, unless this user or root made it."""
    return [] if status.st_uid in (0, os.geteuid()) else [Link(path, status.st_uid)]


def open_to_read(path: Path, *, is_named: bool) -> int:
    """Open a file that the user named, or that a folder or an index did.

    Raises:
        SystemRefusedError: the user did not name it, and another user's link leads to a file that is not theirs.
    """
    try:
        return os.open(path, _TO_READ if is_named else _TO_READ | os.O_NOFOLLOW)
    except OSError as error:
        if is_named or error.errno != errno.ELOOP:
            raise
    with contextlib.closing(Walk(os.fspath(path.parent))) as walk:
        name = path.name
        while True:
            folder, name = os.path.split(walk.target_of(name))
            walk.enter(folder)
            name = name or os.curdir
            # Opening a device may have effects.
            owner = os.stat(name, dir_fd=walk.fd, follow_symlinks=False).st_uid
            check_links(path, walk.links, walk.path_of(name), owner)
            try:
                fd = os.open(name, _TO_READ | os.O_NOFOLLOW, dir_fd=walk.fd)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                continue
            try:
                check_links(path, walk.links, walk.path_of(name), os.fstat(fd).st_uid)
            except SystemRefusedError:
                os.close(fd)
                raise
            return fd


def _parts(path: str) -> list[str]:
    """Split a path into its parts, the last part first."""
    parts = [part for part in reversed(path.split("/")) if part]
    return [*parts, "/"] if path.startswith("/") else parts
