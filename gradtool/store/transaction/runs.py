"""The runs that have left files in a folder: those that may be changing files there, and those that crashed.

Writers and `recover` ask `runs_in`, readers and `check` ask `runs_seen_in`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from gradtool.errors import GradtoolError, SystemRefusedError, call, from_os_error, os_errors_about, say, unfinished
from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.fs import PREFIX, Folder
from gradtool.store.transaction.locks import has_process
from gradtool.store.transaction.log import MAX_BYTES, files_by_run, is_trusted, marker_name, read_log
from gradtool.store.transaction.targets import check_links_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from gradtool.store.transaction.log import Log

# Of all logs in a folder.
MAX_BYTES_IN_FOLDER = 64_000_000


class Run(NamedTuple):
    """A run that has `files` in a folder, its log there, and the targets there that its user may change.

    An orphan has no log: it was never written, or is gone.
    """

    folder: Folder
    id: str
    log: Log | None
    targets: frozenset[str]
    files: Collection[str]


def runs_in(folder: Folder, names: Collection[str] | None = None, except_run: str | None = None) -> list[Run]:
    """Return the runs that write to files of those names in a folder, or to any files, and the orphans there.

    The run with the ID `except_run`, which asks, is left out.

    Raises:
        SystemRefusedError: the folder cannot be listed or read; its logs are too large; or a log is malformed.
    """
    files = files_by_run(folder)
    files.pop(except_run or "", None)
    if not files:
        return []
    with os_errors_about(folder.path):
        logs = _logs_in(folder, files)
        orphans = [run for run in files if run not in logs and read_log(folder, f"{run}.run") is None]
        runs = _runs_of(folder, logs, files, names)
    return runs + [Run(folder, run, None, frozenset(), files[run]) for run in orphans]


def runs_seen_in(folder: Folder, names: Collection[str] | None = None, except_run: str | None = None) -> list[Run]:
    """Return the runs that a reader can see: where it cannot list the folder, those that have a marker for a name.

    A run makes its markers when it is ready. So for a writer, that is not enough.
    """
    try:
        return runs_in(folder, names, except_run)
    except SystemRefusedError as error:
        if error.errno != errno.EACCES:
            raise
    with os_errors_about(folder.path):
        marked = [log for name in names or () if (log := read_log(folder, marker_name(name))) is not None]
        # A user may have deleted the log itself.
        logs = {log.run: log for log in marked if log.run != except_run and folder.status(log.path.name) is not None}
        return _runs_of(folder, logs, {}, names)


def _runs_of(
    folder: Folder, logs: Mapping[str, Log], files: Mapping[str, Collection[str]], names: Collection[str] | None
) -> list[Run]:
    """Return the runs of those logs that are about files of those names."""
    runs = []
    for run, log in logs.items():
        listed = log.names if names is None else log.names.intersection(names)
        targets = frozenset(name for name in listed if _owner_can_write(log, folder, name))
        if targets or (names is None and is_trusted(log.owner, folder)):
            runs.append(Run(folder, run, log, targets, files.get(run, ())))
    return runs


def _logs_in(folder: Folder, runs: Iterable[str]) -> dict[str, Log]:
    """Read the logs and pointers in a folder; `SystemRefusedError` if they are too large."""
    logs: dict[str, Log] = {}
    # By owner, so that the files of one user cannot hide those of another.
    left: dict[int, int] = {}
    for run in runs:
        name = f"{run}.run"
        status = folder.status(name)
        if status is None or status.st_size > MAX_BYTES:
            continue
        trusted = is_trusted(status.st_uid, folder)
        owner = -1 if trusted else status.st_uid
        left[owner] = left.get(owner, MAX_BYTES_IN_FOLDER) - status.st_size
        if left[owner] >= 0:
            log = read_log(folder, name)
            logs |= {} if log is None else {run: log}
        elif trusted:
            message = f"its transaction logs ({PREFIX}*.run) exceed the limit of {MAX_BYTES_IN_FOLDER:,} bytes"
            hint = "recover the crashed runs, or delete their logs"
            raise SystemRefusedError(message, file=folder.path, code="limit", hint=hint)
    return logs


def _owner_can_write(log: Log, folder: Folder, name: str) -> bool:
    """Check whether the owner of a log may change a file that it names; if not, the log is forged and ignored.

    In a sticky folder, only a file's owner, root and the folder's owner may replace it.
    """
    if is_trusted(log.owner, folder):
        return True
    status = folder.status(name)
    return status is None or status.st_uid == log.owner or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def follow_pointer(log: Log) -> Log | None:
    """Return the log that a pointer leads to, which says how far the run got, or a log itself; None if it has ended."""
    if log.path == log.log_path:
        return log
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), Folder.at(log.log_path.parent) as folder:
        pointed = read_log(folder, log.log_path.name)
        # A pointer to a pointer is forged, and another user's log is another run's.
        if pointed is not None and pointed.path == pointed.log_path and pointed.owner == log.owner:
            return pointed
    if not log.path.exists():
        return None
    message = f"belongs to an unfinished run whose log {log.log_path} is missing"
    hint = f"restore that log, or delete this file and {log.run}-* beside it to keep the data as it is"
    raise unfinished(message, log.path, hint)


class Scope(NamedTuple):
    """The files that a path stands for: a file of a folder or, without a name, all files in it."""

    folder: Path
    name: str | None

    @property
    def names(self) -> list[str] | None:
        """The names to ask `runs_in` for."""
        return None if self.name is None else [self.name]


def scopes_of(path: str) -> list[Scope]:
    """Return the scopes of a path, which need not exist: its own, and those that links in a folder lead to.

    An index is about all shards beside it. Links of other users count only if they lead to files of theirs; if such a
    link leads the path itself elsewhere, that is a `SystemRefusedError`.
    """
    check_links_of(path)
    real = Path(os.path.realpath(path))
    # Path's own methods raise for impossible names and without permission.
    if not (os.path.isdir(real) or path.endswith((os.sep, INDEX_SUFFIX))):  # noqa: PTH112
        return [Scope(real.parent, real.name)]
    folder = Path(path).parent if path.endswith(INDEX_SUFFIX) else real
    scopes = [Scope(Path(os.path.realpath(folder)), None)]
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        links = sorted(entry.path for entry in entries if entry.is_symlink())
        for link in links:
            target = Path(os.path.realpath(link))
            if link.endswith((".safetensors", INDEX_SUFFIX)) and os.path.lexists(target):
                with contextlib.suppress(SystemRefusedError):
                    check_links_of(link)
                    scopes.append(Scope(target.parent, target.name))
    return scopes


def all_scopes_of(paths: Iterable[str]) -> list[Scope]:
    """Return the scopes of several paths, each once, without those that lead nowhere or are refused."""
    scopes: dict[Scope, None] = {}
    for path in paths:
        # A link of another user is no way to a folder; and without the current folder, a relative path leads nowhere.
        with contextlib.suppress(OSError):
            scopes |= dict.fromkeys(scopes_of(path))
    return list(scopes)


def require_finished_in(folder: Folder, files: Mapping[str, Path], except_run: str | None = None) -> None:
    """Raise `SystemRefusedError` if a run may have changed half of the files, which are given by name."""
    for run in runs_seen_in(folder, files.keys(), except_run):
        if run.targets:
            _require_finished(run, files[min(run.targets)])


def require_finished_at(scope: Scope) -> None:
    """Raise `SystemRefusedError` if a run may be why a path could not be opened."""
    if os.path.isdir(scope.folder):  # noqa: PTH112 - Path's own raises without permission
        with os_errors_about(scope.folder), Folder.at(scope.folder) as folder:
            for run in runs_seen_in(folder, scope.names):
                _require_finished(run, scope.folder / (scope.name or ""))


def _require_finished(run: Run, file: Path) -> None:
    log = None if run.log is None else follow_pointer(run.log)
    if log is not None and log.is_unfinished:
        message = f"may be half changed by a run ({log.process}) that is still writing, or crashed"
        hint = say(
            "wait for it, run {}, or use {} to read the file as it is",
            call("recover", str(file)),
            call("norm", allow_unfinished=True),
        )
        raise unfinished(message, file, hint)


class Leftover(NamedTuple):
    """The files that a run has left: its log, or the first file of an orphan; in `folder`, which `recover` is given.

    "unfinished": files may be half changed, by a process that exists ("writing") or a crashed run. "crashed": the files
    are whole. "orphan": there is no log. `files` and `nbytes` are those beside the log.
    """

    kind: Literal["writing", "unfinished", "crashed", "orphan"]
    path: Path
    folder: Path
    process: str
    files: int
    nbytes: int


def leftovers_at(paths: Iterable[str]) -> tuple[list[Leftover], list[GradtoolError]]:
    """Return what runs have left where the paths lead, each run once, and why a folder could not be read.

    Nothing is locked. So a new process with the ID of a crashed process passes for it.
    """
    leftovers: dict[Path, Leftover] = {}
    errors: dict[str, GradtoolError] = {}
    for scope in all_scopes_of(paths):
        try:
            with Folder.at(scope.folder) as folder:
                for run in runs_seen_in(folder, scope.names):
                    if (leftover := _leftover(run)) is not None:
                        leftovers[leftover.path] = leftover
        except GradtoolError as error:
            errors[str(error)] = error
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                refused = from_os_error(error, scope.folder)
                errors[str(refused)] = refused
    return list(leftovers.values()), list(errors.values())


def _leftover(run: Run) -> Leftover | None:
    """Return what a run has left; None if it has ended, or works on files that are whole."""
    folder = run.folder
    statuses = {name: status for name in run.files if (status := folder.status(name)) is not None}
    if run.log is None:
        # A run makes its lock first, so a run with nothing else may be about to write its log.
        sizes = [status.st_size for status in statuses.values() if is_trusted(status.st_uid, folder)]
        if not sizes or list(run.files) == [f"{run.id}.lock"]:
            return None
        return Leftover("orphan", folder.path / min(run.files), folder.path, "", len(sizes), sum(sizes))
    log = follow_pointer(run.log)
    if log is None or (has_process(log) and not log.is_unfinished):
        return None
    kind: Literal["writing", "unfinished", "crashed"] = "crashed"
    if log.is_unfinished:
        kind = "writing" if has_process(log) else "unfinished"
    sizes = [status.st_size for name, status in statuses.items() if not name.endswith((".run", ".lock"))]
    return Leftover(kind, log.path, folder.path, log.process, len(sizes), sum(sizes))
