"""The files that a run will write: every path is followed once, link by link, to folders that stay open.

Any user who may write to a folder on the way can make a path lead elsewhere, before the run or during it. So no path is
looked up twice, and a link that another user made is followed only to files of that user.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

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
from gradtool.store.fs import PREFIX, Folder, open_folder
from gradtool.store.links import MAX_LINKS, Link, Walk, check_links, foreign_links, loop

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Targets:
    """The folders of the targets, open, and the `names` of the targets in each.

    `located` has the folder and the name of each target by its path. If `new_folder` does not exist, the nearest
    existing folder above it comes first; `missing` are the folders to make in it, each in the last, and `made` those
    that were made. All `paths` are then in it; the `states` may be. A link of another user that leads to a file of yet
    another is a `SystemRefusedError`, and a name like those of temporary files a `UsageError`.
    """

    def __init__(self, paths: Iterable[Path], new_folder: Path | None = None, states: Iterable[Path] = ()) -> None:
        # In the order of the log.
        self.names: dict[Folder, set[str]] = {}
        self.made: list[Folder] = []
        # The names and paths of the targets in a folder that is missing.
        self._new: dict[Path, str] = {}
        # By path as text: the folder, and the links of other users on the way to it.
        self._followed: dict[str, tuple[Folder, Sequence[Link]]] = {}
        # By device and inode.
        self._opened: dict[tuple[int, int], Folder] = {}
        self.located: dict[Path, tuple[Folder, str]] = {}
        try:
            self.missing = () if new_folder is None else self._find_missing(new_folder)
            for path in paths:
                self._add(path, is_new=bool(self.missing))
            for path in states:
                is_inside = new_folder is not None and path.parent.absolute() == new_folder.absolute()
                self._add(path, is_new=bool(self.missing) and is_inside)
        except BaseException:
            self.close()
            raise

    def locate(self, target: Path) -> tuple[Folder, str]:
        """Return the folder and the name of a target; raise `SystemRefusedError` if its path leads elsewhere now."""
        if target in self.located:
            return self.located[target]
        folder, name = self._follow(target)
        if name not in self.names.get(folder, ()):
            raise changed_meanwhile(target)
        return folder, name

    def make_missing(self) -> None:
        """Make the missing folders, outermost first, and move the targets there."""
        if not self.missing or self.made:
            return
        inner = next(iter(self.names))
        for name in self.missing:
            with os_errors_about(inner.path / name):
                inner = inner.make(name)
            self._opened[inner.identity] = inner
            self.made.append(inner)
        self.names[inner] = set(self._new.values())
        self.located |= {path: (inner, name) for path, name in self._new.items()}

    def forget_made(self) -> None:
        """Undo `make_missing` after the folders were removed."""
        if not self.made:
            return
        self.names.pop(self.made[-1], None)
        outer = next(iter(self.names))
        self.located |= {path: (outer, name) for path, name in self._new.items()}
        while self.made:
            folder = self.made.pop()
            del self._opened[folder.identity]
            folder.close()

    def close(self) -> None:
        """Close all folders."""
        while self._opened:
            self._opened.popitem()[1].close()

    def _find_missing(self, new_folder: Path) -> tuple[str, ...]:
        """List the missing folders on the way to a new folder; the folder above them becomes the log folder."""
        missing: list[str] = []
        above = new_folder
        while not os.path.lexists(above):
            missing.append(above.name)
            above = above.parent
        if missing:
            # Behind a folder that is missing, `..` leads nowhere.
            folder, links = self._open_folder(os.fspath(new_folder if os.pardir in missing else above))
            if links:
                _check_way(new_folder, links, folder, missing[-1])
            self.names[folder] = set()
        return tuple(reversed(missing))

    def _add(self, path: Path, *, is_new: bool) -> None:
        folder, name = (next(iter(self.names)), path.name) if is_new else self._follow(path)
        if name.startswith(PREFIX):
            # Recovery would take it for what a run has left, and remove it.
            message = "names that begin with {} are those of temporary files, which {} removes"
            raise UsageError(say(message, PREFIX, call("recover")), file=path, hint="use another name")
        if is_new:
            self._new[path] = name
        else:
            self.names.setdefault(folder, set()).add(name)
        self.located[path] = folder, name

    def _follow(self, path: Path) -> tuple[Folder, str]:
        """Follow a path link by link; return the folder where it ends, and its name there."""
        links: list[Link] = []
        place = path
        for _ in range(MAX_LINKS + 1):
            parent, name = os.path.split(place)
            folder, links_on_way = self._open_folder(parent or os.curdir)
            links += links_on_way
            with os_errors_about(place):
                status = folder.status(name)
                if status is None or not stat.S_ISLNK(status.st_mode):
                    break
                status, target = system.read_link(name, folder.fd)
            links += foreign_links(str(place), status)
            place = folder.path / target
        else:
            raise from_os_error(loop(), place)
        if links:
            _check_way(path, links, folder, name)
        return folder, name

    def _open_folder(self, path: str) -> tuple[Folder, Sequence[Link]]:
        """Open a folder by way of every folder above it, once; return it with the links of other users on the way."""
        if path in self._followed:
            return self._followed[path]
        # Where the current folder is gone, other folders are not.
        absolute = path if path.startswith(os.sep) else os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118
        with os_errors_about(path):
            try:
                with contextlib.closing(Walk(os.sep)) as walk:
                    walk.enter(absolute)
                    folder = Folder(Path(walk.path), open_folder(os.curdir, walk.fd))
            except (FileNotFoundError, NotADirectoryError) as error:
                from gradtool.store.format.hints import no_such_folder  # only needed for the error

                raise BadInputError.from_problems([no_such_folder(path)]) from error
        opened = self._opened.setdefault(folder.identity, folder)
        if opened is not folder:
            folder.close()
        self._followed[path] = opened, walk.links
        return self._followed[path]


def check_links_of(path: str) -> None:
    """Raise `SystemRefusedError` if another user's link leads a path to a file that is not theirs; ignore all else."""
    try:
        Targets([Path(path)]).close()
    except GradtoolError as error:
        if error.problems[0].code == "link":
            raise


def _check_way(path: Path, links: Sequence[Link], folder: Folder, name: str) -> None:
    """Raise `SystemRefusedError` if the links of a path may not lead to a name in a folder."""
    with os_errors_about(path):
        status = folder.status(name)
    kind = "folder" if status is None or stat.S_ISDIR(status.st_mode) else "file"
    real = folder.path if status is None else folder.path / name
    check_links(path, links, real, folder.owner if status is None else status.st_uid, kind)
