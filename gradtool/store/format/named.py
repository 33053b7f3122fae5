"""How a path was named that cannot be opened, or that names a file twice. Imported only for such an error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import NO_SUCH_FILE, NO_SUCH_FOLDER, BadInputError
from gradtool.store.format import missing, sniff
from gradtool.store.format.index import INDEX_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.store.format.paths import PathList


class NamedPath(NamedTuple):
    """A path as it was given: as an argument, or as an entry of a list, numbered from 1."""

    path: str
    listed: PathList | None = None
    entry: int = 0

    @property
    def words(self) -> str:
        """How it names files, in words."""
        is_folder = os.path.isdir(self.path)  # noqa: PTH112 - Path's own raises without permission
        kind = "folder" if is_folder else "index" if self.path.endswith(INDEX_SUFFIX) else "path"
        return f"the {kind} {self.path}{self._place}"

    @property
    def _place(self) -> str:
        return "" if self.listed is None else f" (entry {self.entry:,} of {self.listed.where})"

    def explained(self, error: BadInputError) -> BadInputError | None:
        """The same error with its reason and remedy, if the path leads nowhere or its list is no list."""
        if self.listed is not None:
            no_list = sniff.foreign_list(self.listed.where, self.listed.head)
            if no_list is not None:
                return no_list
        (problem,) = error.problems
        if problem.message not in (NO_SUCH_FILE, NO_SUCH_FOLDER) or problem.file is None:
            return None
        is_own = problem.file in (self.path, str(Path(self.path)))
        file = self.path if is_own else problem.file
        find = missing.no_such_file if problem.message == NO_SUCH_FILE else missing.no_such_folder
        return BadInputError(find(file) + (self._place if is_own else ""), file=file, code=problem.code)


def named_at(paths: Sequence[str | os.PathLike[str]], listed: PathList | None, number: int) -> NamedPath:
    """The path of a call with a number, from 0; the last paths are those of the list, if there is one."""
    path = os.fspath(paths[number])
    entry = 0 if listed is None else number - len(paths) + len(listed.paths) + 1
    return NamedPath(path, listed, entry) if entry > 0 else NamedPath(path)


def named_twice(file: Path, way: NamedPath, other: Path, other_way: NamedPath) -> BadInputError:
    """The error for a file that two paths of a call lead to, one of them perhaps by another name."""
    same = "" if file == other else f"is the same file as {other} and "
    ways = f"both times by {way.words}" if way.words == other_way.words else f"by {other_way.words} and by {way.words}"
    return BadInputError(f"{same}is named twice: {ways}; name each file once", file=file, code="duplicate-file")
