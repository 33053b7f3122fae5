"""The files that a run will write: every path is followed once, link by link, to folders that stay open.

Any user who may write to a folder on the way can make a path lead elsewhere, before the run or during it. So no path is
looked up twice, and a link that another user made is followed only to files of that user.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import (
    BadInputError,
    GradtoolError,
    UsageError,
    call,
    changed_meanwhile,
    from_os_error,
    os_errors_about,
    say,
)
from gradtool.store import system
from gradtool.store.fs import Folder, open_folder
from gradtool.store.links import MAX_LINKS, Link, Walk, check_links, foreign_links, loop
from gradtool.store.transaction.files import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class _Way(NamedTuple):
    """Where a path leads: to an open folder, by links of other users."""

    opened: Folder
    links: Sequence[Link]

    def folder(self, path: Path, name: str) -> Folder:
        """Return the folder, to write to a name in it; `SystemRefusedError` if the links may not lead there."""
        opened = self.opened
        if self.links:
            with os_errors_about(path):
                status = opened.status(name)
            kind = "folder" if status is None or stat.S_ISDIR(status.st_mode) else "file"
            real = opened.path if status is None else opened.path / name
            check_links(path, self.links, real, opened.owner if status is None else status.st_uid, kind)
        return opened


class Targets:
    """The folders of the targets, open, and the `names` of the targets in each.

    If `new_folder` does not exist, the nearest existing folder above it comes first; `missing` are the folders to make
    in it, each in the one before, and `made` those that were made. All `paths` are then in it; `others` may be. A link
    of another user that leads to a file of yet another is a `SystemRefusedError`, and a name of a run's own files a
    `UsageError`.
    """

    def __init__(self, paths: Iterable[Path], new_folder: Path | None = None, others: Iterable[Path] = ()) -> None:
        # In the order of the log.
        self.names: dict[Folder, set[str]] = {}
        self.made: list[Folder] = []
        # The names and paths of the targets in a folder that is missing.
        self._new: dict[Path, str] = {}
        # By path as text, and by device and inode.
        self._followed: dict[str, _Way] = {}
        self._opened: dict[tuple[int, int], Folder] = {}
        self._located: dict[Path, tuple[Folder, str]] = {}
        try:
            self.missing = () if new_folder is None else self._find_missing(new_folder)
            for path in paths:
                self._add(path, is_new=bool(self.missing))
            for path in others:
                in_new = new_folder is not None and path.parent.absolute() == new_folder.absolute()
                self._add(path, is_new=bool(self.missing) and in_new)
        except BaseException:
            self.close()
            raise

    @property
    def folders(self) -> list[Folder]:
        """The folders of the targets, home first."""
        return list(self.names)

    @property
    def planned(self) -> dict[Folder, set[str]]:
        """The names of the targets in each folder; those in a folder that is missing are counted with the home's."""
        if self.made or not self.missing:
            return self.names
        return self.names | {self.folders[0]: self.names[self.folders[0]] | set(self._new.values())}

    def locate(self, target: Path) -> tuple[Folder, str]:
        """The folder and the name of a target; raises `SystemRefusedError` if its path leads elsewhere now."""
        if target in self._located:
            return self._located[target]
        way, name = self._follow(target)
        folder = way.folder(target, name)
        if name not in self.names.get(folder, ()):
            raise changed_meanwhile(target)
        return folder, name

    def make_missing(self) -> None:
        """Make the missing folders, outermost first, and move the targets there."""
        if not self.missing or self.made:
            return
        inner = self.folders[0]
        for name in self.missing:
            with os_errors_about(inner.path / name):
                inner = inner.make(name)
            self._opened[inner.identity] = inner
            self.made.append(inner)
        self.names[inner] = set(self._new.values())
        self._located |= {path: (inner, name) for path, name in self._new.items()}

    def close(self) -> None:
        """Close all folders."""
        while self._opened:
            self._opened.popitem()[1].close()

    def _find_missing(self, new_folder: Path) -> tuple[str, ...]:
        """The missing folders on the way to a new one; the folder that they will be made in becomes the first."""
        missing: list[str] = []
        above = new_folder
        while not os.path.lexists(above):
            missing.append(above.name)
            above = above.parent
        # Behind a folder that is missing, `..` leads nowhere.
        if missing:
            existing = new_folder if os.pardir in missing else above
            self.names[self._followed_folder(os.fspath(existing)).folder(new_folder, missing[-1])] = set()
        return tuple(reversed(missing))

    def _add(self, path: Path, *, is_new: bool) -> None:
        if is_new:
            _check_name(path, path.name)
            self._new[path] = path.name
            self._located[path] = self.folders[0], path.name
            return
        way, name = self._follow(path)
        _check_name(path, name)
        folder = way.folder(path, name)
        self.names.setdefault(folder, set()).add(name)
        self._located[path] = folder, name

    def _follow(self, path: Path) -> tuple[_Way, str]:
        """Where a path leads: the way to its folder, and its name there."""
        links: list[Link] = []
        for _ in range(MAX_LINKS + 1):
            parent, name = os.path.split(path)
            folder, further = self._followed_folder(parent or os.curdir)
            links += further
            with os_errors_about(path):
                status = folder.status(name)
                if status is None or not stat.S_ISLNK(status.st_mode):
                    return _Way(folder, links), name
                status, to = system.read_link(name, folder.fd)
            links += foreign_links(str(path), status)
            path = folder.path / to
        raise from_os_error(loop(), path)

    def _followed_folder(self, path: str) -> _Way:
        if path not in self._followed:
            # Where the current folder is gone, other folders are not.
            absolute = path if path.startswith(os.sep) else os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118
            with os_errors_about(path):
                try:
                    self._followed[path] = self._opened_folder(absolute)
                except (FileNotFoundError, NotADirectoryError) as error:
                    from gradtool.store.format.hints import no_such_folder  # only needed for the error

                    raise BadInputError.from_problems([no_such_folder(path)]) from error
        return self._followed[path]

    def _opened_folder(self, path: str) -> _Way:
        """Open a folder by way of every folder above it."""
        with Walk(os.sep) as walk:
            walk.enter(path)
            folder = Folder(Path(walk.path), open_folder(os.curdir, within=walk.fd))
        known = self._opened.setdefault(folder.identity, folder)
        if known is not folder:
            folder.close()
        return _Way(known, walk.links)


def check_links_of(path: str) -> None:
    """Raise `SystemRefusedError` if another user's link leads a path to a file that is not theirs; ignore all else."""
    try:
        Targets([Path(path)]).close()
    except GradtoolError as error:
        if error.problems[0].code == "link":
            raise


def _check_name(path: Path, name: str) -> None:
    """Raise `UsageError` for a target that recovery would take for what a run has left, and remove."""
    if name.startswith(PREFIX):
        what = say("names that begin with {} are those of temporary files, which {} removes", PREFIX, call("recover"))
        raise UsageError(what, file=path, hint="use another name")
