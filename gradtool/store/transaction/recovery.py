"""Crashed runs found and recovered, and orphans removed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, GradtoolError, changed_meanwhile, from_os_error
from gradtool.store import fs
from gradtool.store.fs import Folder
from gradtool.store.transaction.crashed import Crashed, is_own
from gradtool.store.transaction.files import MARKER, PREFIX, files_of_runs, lock_of, log_of, remove, run_of
from gradtool.store.transaction.guard import home_of, is_about
from gradtool.store.transaction.locks import InUse, claim, lock
from gradtool.store.transaction.logfiles import logs_in, read_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gradtool.store.transaction.guard import Scope
    from gradtool.store.transaction.log import Log


class Recovered(NamedTuple):
    """What became of a crashed run: its files are all new ("finished"), all old ("undone"), or were never touched."""

    outcome: str
    files: int
    pid: int
    log: Path


def recover_if_crashed(log: Log, *, force: bool = False) -> Recovered | InUse | None:
    """Recover a run if it crashed, with `force` even if other programs changed its files since; None if it has ended.

    Raises:
        SystemRefusedError: another program changed a file, the run is another user's, or reading or writing failed.
    """
    known = home_of(log)
    if known is None:
        return None
    try:
        with Folder.at(known.path.parent) as folder:
            return _recover(folder, known, force=force)
    except GradtoolError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise changed_meanwhile(known.path) from error
        raise from_os_error(error, known.path) from error


def _recover(folder: Folder, known: Log, *, force: bool) -> Recovered | InUse | None:
    lock_fd = claim(folder, known)
    if lock_fd is None or isinstance(lock_fd, InUse):
        return lock_fd
    with fs.closing(lock_fd):
        # Read again: the run may have got further before it ended.
        home = read_log(folder, known.path.name)
        if home is None:
            return None
        with Crashed.opened(folder, home) as crashed:
            outcome = crashed.recover(force=force)
        return Recovered(outcome, len(home.steps), home.pid, home.path)


def recover_at(scope: Scope, *, force: bool = False) -> tuple[list[Recovered | InUse | GradtoolError], int]:
    """Recover every crashed run that is in a scope, and remove the orphans there.

    Returns what became of each run, or why it could not be recovered; and the number of orphans that were removed.
    """
    found: list[Recovered | InUse | GradtoolError] = []
    try:
        folder = Folder.at(scope.folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        from gradtool.store.format.hints import no_such_folder  # only needed for the error

        raise BadInputError.from_problems([no_such_folder(str(scope.folder))]) from error
    except OSError as error:
        raise from_os_error(error, scope.folder) from error
    with folder:
        for log in logs_in(folder):
            if is_about(log, folder, scope.name):
                try:
                    found += filter(None, [recover_if_crashed(log, force=force)])
                except GradtoolError as error:
                    found.append(error)
        try:
            return found, _remove_orphans(folder)
        except GradtoolError as error:
            return [*found, error], 0


def _remove_orphans(folder: Folder) -> int:
    """Remove the user's files of runs whose log is gone or was never written; the number removed."""
    removed, found = 0, defaultdict(list)
    for name in files_of_runs(folder):
        found[run_of(name) or ""].append(name)
    for run, names in found.items():
        with _orphaned(folder, run) as is_orphaned:
            removed += sum(is_own(folder, name) and remove(folder, name) for name in names if is_orphaned)
    for name in folder.names():
        if name.startswith(PREFIX) and name.endswith(MARKER) and is_own(folder, name):
            log = read_log(folder, name)
            if log is None or folder.status(log.path.name) is None:
                removed += remove(folder, name)
    return removed


@contextlib.contextmanager
def _orphaned(folder: Folder, run: str) -> Iterator[bool]:
    """Whether a run has no log and no process that is about to write one; inside the block, none can."""
    with contextlib.ExitStack() as stack:
        free = True
        for name in (lock_of(run), log_of(run)):
            try:
                # For writing: some file systems refuse to lock a file that is open for reading only.
                fd = stack.enter_context(fs.closing(folder.open(name, os.O_RDWR)))
            except FileNotFoundError:
                continue
            except OSError:
                free = False
                break
            # Without locks, a process may be about to write the log.
            free = free and stat.S_ISREG(os.fstat(fd).st_mode) and lock(fd) is True
        try:
            has_log = read_log(folder, log_of(run)) is not None
        except GradtoolError:
            has_log = True
        yield free and not has_log
