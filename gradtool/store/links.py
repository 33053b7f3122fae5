"""Links that other users made: a link of another user is followed only to a file of that user.

Anybody who may write to a folder can leave a link there that leads to a private file of whoever works in it. So the
rule holds for all that is written and, when files are read, for all that a folder or an index names. What users name
themselves is read wherever it leads.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import SystemRefusedError, changed_meanwhile
from gradtool.store import system

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


def foreign_links(path: str, status: os.stat_result) -> list[Link]:
    """List a link, unless this user or root made it."""
    return [] if status.st_uid in (0, os.geteuid()) else [Link(path, status.st_uid)]


def refuse_foreign(path: Path, links: Iterable[Link], file: str | Path, owner: int, kind: str = "file") -> None:
    """Raise `SystemRefusedError` for links of other users to a file, or another kind of thing, that is not theirs."""
    for link in links:
        if link.owner != owner:
            whose = "yours" if owner == os.geteuid() else f"user {owner}"
            what = f"the link {link.path}, which user {link.owner} made, leads to a {kind} of {whose}"
            raise SystemRefusedError(f"{what}, {file}; name that {kind} itself to use it", file=path, code="link")


def loop() -> OSError:
    """Return the error for links that lead to each other."""
    return OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def open_to_read(path: Path, *, is_named: bool) -> int:
    """Open a file that the user named, or that a folder or an index did.

    Raises:
        SystemRefusedError: the user did not name it, and another user's link leads to a file that is not theirs.
    """
    if is_named:
        return os.open(path, _TO_READ)
    links: list[Link] = []
    file = str(path)
    for _ in range(MAX_LINKS + 1):
        if links:
            # Opening a device may have effects.
            refuse_foreign(path, links, os.path.abspath(file), os.lstat(file).st_uid)  # noqa: PTH100
        try:
            fd = os.open(file, _TO_READ | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        else:
            try:
                refuse_foreign(path, links, os.path.abspath(file), os.fstat(fd).st_uid)  # noqa: PTH100
            except SystemRefusedError:
                os.close(fd)
                raise
            return fd
        status, target = system.read_link(file)
        if not stat.S_ISLNK(status.st_mode):
            raise changed_meanwhile(path)
        links += foreign_links(file, status)
        file = os.path.join(os.path.dirname(file), target)  # noqa: PTH118, PTH120
    raise loop()
