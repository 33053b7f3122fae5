"""What runs have left beside the data, looked at and left alone: nothing is locked, rolled or removed.

`recovery` does that. Without locks, a process that has the ID of a crashed one passes for it.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

from gradtool.errors import GradtoolError, SystemRefusedError, from_os_error
from gradtool.store.fs import Folder
from gradtool.store.transaction.files import files_of_runs, lock_of, log_of, run_of
from gradtool.store.transaction.guard import Scope, home_of, is_about, logs_about
from gradtool.store.transaction.locks import has_process
from gradtool.store.transaction.logfiles import is_trusted, read_log

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from gradtool.store.transaction.log import Log


class Remains(NamedTuple):
    """What one run has left: its log, or of an orphan the first of its files; in `folder`, which `recover` is given.

    "unfinished": files may be half changed, by a process that exists ("writing") or a crashed run. "crashed": the files
    are whole. "orphan": there is no log. `files` and `nbytes` are those beside the log.
    """

    kind: Literal["writing", "unfinished", "crashed", "orphan"]
    path: Path
    folder: Path
    who: str
    files: int
    nbytes: int


def remains_at(paths: Iterable[str]) -> tuple[list[Remains], list[GradtoolError]]:
    """What runs have left where the paths lead, and why something could not be looked at; each run is told once."""
    scopes: dict[Scope, None] = {}
    for path in paths:
        # A link of another user is no way to a folder; and without the current folder, a relative path leads nowhere.
        with suppress(OSError):
            scopes |= dict.fromkeys(Scope.of(path))
    found: dict[Path, Remains] = {}
    errors: dict[str, GradtoolError] = {}
    for scope in scopes:
        try:
            with Folder.at(scope.folder) as folder:
                found |= {one.path: one for one in _remains_in(folder, scope)}
        except GradtoolError as error:
            errors[str(error)] = error
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                refused = from_os_error(error, scope.folder)
                errors[str(refused)] = refused
    return list(found.values()), list(errors.values())


def _remains_in(folder: Folder, scope: Scope) -> Iterator[Remains]:
    runs: dict[str, list[str]] = defaultdict(list)
    try:
        names = files_of_runs(folder)
    except SystemRefusedError as error:
        if error.errno != errno.EACCES:
            raise
        names = []  # It cannot be listed.
    for name in names:
        runs[run_of(name) or ""].append(name)
    for log in logs_about(folder, [] if scope.name is None else [scope.name]):
        if is_about(log, folder, scope.name) and (one := _of_run(folder, log, runs.get(log.run, []))) is not None:
            yield one
    for run, own in runs.items():
        # A run makes its lock first, so one with nothing else may be about to write its log.
        if own != [lock_of(run)] and read_log(folder, log_of(run)) is None and (kept := _trusted(folder, own)):
            yield Remains("orphan", folder.path / own[0], folder.path, "", *_size(folder, kept))


def _of_run(folder: Folder, log: Log, names: list[str]) -> Remains | None:
    """What a run has left; None if it has ended, or works on files that are whole."""
    home = home_of(log)
    if home is None:
        return None
    exists = has_process(home)
    if exists and not home.is_unfinished:
        return None
    kind: Literal["writing", "unfinished", "crashed"] = "crashed"
    if home.is_unfinished:
        kind = "writing" if exists else "unfinished"
    beside = [name for name in names if name not in (log_of(log.run), lock_of(log.run))]
    return Remains(kind, home.path, folder.path, home.who, *_size(folder, beside))


def _trusted(folder: Folder, names: list[str]) -> list[str]:
    """Those that count in a folder where every user may add files."""
    return [name for name in names if (status := folder.status(name)) is not None and is_trusted(status.st_uid, folder)]


def _size(folder: Folder, names: list[str]) -> tuple[int, int]:
    """How many files there are, and their bytes; a second name of a target takes none."""
    sizes = [(name, status.st_size) for name in names if (status := folder.status(name)) is not None]
    return len(sizes), sum(size for name, size in sizes if os.path.splitext(name)[1] != ".old")  # noqa: PTH122
