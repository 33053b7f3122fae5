"""The files that a run will write: paths followed once, link by link, to folders that are held open from then on.

Anybody who may write to a folder on the way can make a path lead elsewhere, before the run or while it works. So no
path is looked up twice; and a link that another user made is followed to nothing but what is that one's own.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, GradtoolError, SystemRefusedError, from_os_error
from gradtool.store.format.header import changed_meanwhile
from gradtool.store.fs import Folder, open_to_list, open_to_pass

if TYPE_CHECKING:
    from collections.abc import Iterable

# As many as the system itself follows.
_MAX_LINKS = 40


class _Link(NamedTuple):
    """A link that another user made, and who that is."""

    path: str
    owner: int


class Targets:
    """The folders of the targets, each once, and the names in them.

    Of `new_folder`, which need not be there, the nearest folder above it that is there comes first; `missing` are the
    folders to make in that one, one in another; `made`, those that were.

    Raises:
        BadInputError: a folder is not there.
        SystemRefusedError: a folder cannot be opened, or a link of another user leads to what is not that one's.
    """

    def __init__(self, paths: Iterable[Path], new_folder: Path | None = None) -> None:
        self.folders: list[Folder] = []
        self.made: list[Folder] = []
        self._names: dict[Folder, set[str]] = {}
        # By the text of a path, and by device and inode.
        self._followed: dict[str, tuple[Folder, tuple[_Link, ...]]] = {}
        self._opened: dict[tuple[int, int], Folder] = {}
        self._places: dict[Path, tuple[Folder, str]] = {}
        try:
            self.missing = () if new_folder is None else self._find_missing(new_folder)
            for path in paths:
                if self.missing:
                    self._names[self.folders[0]].add(path.name)
                    self._places[path] = self.folders[0], path.name
                else:
                    self._add(path)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[tuple[Folder, set[str]]]:
        """The folders, in the order of the log, and the targets in each."""
        return [(folder, self._names[folder]) for folder in self.folders]

    def names_in(self, folder: Folder) -> set[str]:
        """The targets in a folder."""
        return self._names[folder]

    def place(self, target: Path) -> tuple[Folder, str]:
        """The folder and the name of a target; raises `SystemRefusedError` if it is none, or leads elsewhere by now."""
        if target in self._places:
            return self._places[target]
        folder, name, _ = self._follow(target)
        if folder not in self._names or name not in self._names[folder]:
            raise changed_meanwhile(target)
        return folder, name

    def make_missing(self) -> None:
        """Make the folders that are missing, and move the targets there; those that were `made`, the outermost first.

        Raises:
            OSError: one could not be made.
        """
        if not self.missing or self.made:
            return
        home = inner = self.folders[0]
        for name in self.missing:
            inner = inner.make(name)
            self._opened[inner.identity] = inner
            self.made.append(inner)
        self.folders.append(inner)
        self._names[inner], self._names[home] = self._names[home], set()
        self._places = {path: (inner, name) for path, (_, name) in self._places.items()}

    def close(self) -> None:
        """Let go of all folders."""
        while self._opened:
            self._opened.popitem()[1].close()

    def _find_missing(self, new_folder: Path) -> tuple[str, ...]:
        """The folders that are missing on the way to one; that in which they are to be is then the first."""
        above, missing = os.path.abspath(new_folder), []  # noqa: PTH100 - what is not there has no links
        while not os.path.lexists(above):
            above, name = os.path.split(above)
            missing.append(name)
        if missing:
            folder, _ = self._followed_folder(above)
            self.folders, self._names[folder] = [folder], set()
        return tuple(reversed(missing))

    def _add(self, path: Path) -> None:
        folder, name, links = self._follow(path)
        _refuse_trap(path, links, folder, name)
        if folder not in self._names:
            self.folders.append(folder)
            self._names[folder] = set()
        self._names[folder].add(name)
        self._places[path] = folder, name

    def _follow(self, path: Path, depth: int = 0) -> tuple[Folder, str, tuple[_Link, ...]]:
        """Where a path leads, and the links of other users on the way."""
        parent, name = os.path.split(path)
        folder, links = self._followed_folder(parent or ".")
        status = folder.status(name)
        if status is None or not stat.S_ISLNK(status.st_mode):
            return folder, name, links
        if depth == _MAX_LINKS:
            raise from_os_error(OSError(errno.ELOOP, os.strerror(errno.ELOOP)), path)
        to = os.readlink(name, dir_fd=folder.fd)
        inner, name, further = self._follow(Path(os.path.join(folder.path, to)), depth + 1)  # noqa: PTH118 - to may be whole
        return inner, name, (*links, *_foreign(str(path), status), *further)

    def _followed_folder(self, path: str) -> tuple[Folder, tuple[_Link, ...]]:
        if path not in self._followed:
            try:
                self._followed[path] = self._opened_folder(path)
            except OSError as error:
                if isinstance(error, SystemRefusedError):
                    raise
                if error.errno in (errno.ENOENT, errno.ENOTDIR):
                    raise BadInputError("no such folder", file=path, code="missing-file") from error
                raise from_os_error(error, path) from error
        return self._followed[path]

    def _opened_folder(self, path: str) -> tuple[Folder, tuple[_Link, ...]]:
        """Open a folder by way of every folder above it, so that each link is seen."""
        left = [part for part in os.path.join(os.getcwd(), path).split("/")[::-1] if part]  # noqa: PTH109, PTH118
        real: list[str] = []
        foreign: list[_Link] = []
        links = 0
        fd = open_to_pass("/")
        try:
            while left:
                part = left.pop()
                status = os.stat(part, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISLNK(status.st_mode):
                    links += 1
                    if links > _MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    to = os.readlink(part, dir_fd=fd)
                    foreign += _foreign("/" + "/".join([*real, part]), status)
                    left += [one for one in to.split("/")[::-1] if one]
                    if not to.startswith("/"):
                        continue
                    part, real = "/", []
                inner = open_to_pass(part, fd)
                os.close(fd)
                fd = inner
                real = real[:-1] if part == ".." else real if part in (".", "/") else [*real, part]
            folder = Folder(Path("/", *real), open_to_list(".", within=fd))
        finally:
            os.close(fd)
        known = self._opened.setdefault(folder.identity, folder)
        if known is not folder:
            folder.close()
        return known, tuple(foreign)


def refuse_trap(path: str) -> None:
    """Raise `SystemRefusedError` if a link of another user leads a path to what is not that one's.

    Where it leads to nothing that can be looked at, that is not said here.
    """
    try:
        Targets([Path(path)]).close()
    except GradtoolError as error:
        if error.problems[0].code == "link":
            raise


def _foreign(path: str, status: os.stat_result) -> list[_Link]:
    """A link, if neither the user made it nor root."""
    return [] if status.st_uid in (0, os.geteuid()) else [_Link(path, status.st_uid)]


def _refuse_trap(path: Path, links: Iterable[_Link], folder: Folder, name: str) -> None:
    """Refuse to be led by a link of another user to what that one might not have been able to change."""
    status = folder.status(name)
    owner = folder.owner if status is None else status.st_uid
    for link in links:
        if link.owner != owner:
            whose = "yours" if owner == os.geteuid() else f"user {owner}"
            raise SystemRefusedError(
                f"the link {link.path}, which user {link.owner} made, leads to a file of {whose}, "
                f"{folder.path / name}; name that file itself to change it",
                file=path,
                code="link",
            )
