"""Crashed runs, rolled forward from the line that says they were ready; before it, they changed nothing.

Every step may be interrupted and repeated.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import BadInputError, GradtoolError, changed_meanwhile, from_os_error, os_errors_about, unfinished
from gradtool.store import fs
from gradtool.store.fs import File, Folder
from gradtool.store.io.redolog import RedoLog, changed_since
from gradtool.store.transaction.files import MARKER, PREFIX, clear, lock_of, log_of, name_of
from gradtool.store.transaction.locks import InUse, claim, lock
from gradtool.store.transaction.log import FINISHED, HOST, UNTOUCHED
from gradtool.store.transaction.logfiles import append_step, is_trusted, read_log
from gradtool.store.transaction.runs import home_of, runs_in
from gradtool.store.transaction.staging import is_new, is_replaceable

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from gradtool.store.transaction.log import Change, Log, Move
    from gradtool.store.transaction.runs import Scope


class Recovered(NamedTuple):
    """What became of a crashed run: its files are all new ("finished"), or all old ("untouched")."""

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


def recover_at(scope: Scope, *, force: bool = False) -> tuple[list[Recovered | InUse | GradtoolError], int]:
    """Recover every crashed run that is in a scope, and remove the orphans there.

    Returns what became of each run, or why it could not be recovered; and the number of orphans that were removed.
    """
    outcomes: list[Recovered | InUse | GradtoolError] = []
    removed = 0
    try:
        folder = Folder.at(scope.folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        from gradtool.store.format.hints import no_such_folder  # only needed for the error

        raise BadInputError.from_problems([no_such_folder(str(scope.folder))]) from error
    except OSError as error:
        raise from_os_error(error, scope.folder) from error
    with folder:
        for run in runs_in(folder, scope.names):
            try:
                if run.log is None:
                    removed += _remove_orphan(folder, run.id, run.files)
                elif (outcome := recover_if_crashed(run.log, force=force)) is not None:
                    outcomes.append(outcome)
            except GradtoolError as error:
                outcomes.append(error)
        with os_errors_about(folder.path):
            return outcomes, removed + _remove_old_markers(folder)


def _recover(folder: Folder, known: Log, *, force: bool) -> Recovered | InUse | None:
    lock_fd = claim(folder, known)
    if lock_fd is None or isinstance(lock_fd, InUse):
        return lock_fd
    with fs.closing(lock_fd), contextlib.ExitStack() as stack:
        # Read again: the run may have got further before it ended.
        home = read_log(folder, known.path.name)
        if home is None:
            return None
        log = File(folder, home.path.name, folder.identity[0], home.inode)
        crashed = _Crashed(folder, home, stack.enter_context(log.opened(os.O_RDWR)), stack)
        return Recovered(crashed.recover(force=force), len(home.steps), home.pid, home.path)


class _Crashed:
    """A crashed run that we have locked: its log and its folders, open until the stack is closed.

    Of its folders, those count that have a pointer to it. So a forged log reaches no folder where its run did not work.
    """

    def __init__(self, folder: Folder, home: Log, fd: int, stack: contextlib.ExitStack) -> None:
        self._home, self._fd = home, fd
        # By number, and the names that the log there lists.
        self._folders, self._names = {0: folder}, {0: home.names}
        # Folders whose pointer is missing or another run's, by number.
        self._unpointed: dict[int, Folder] = {}
        for number, path in enumerate(home.folders[1:], 1):
            # No other error says that the folder is gone.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._add(number, stack.enter_context(Folder.at(path)))
            if number not in self._folders and home.is_unfinished:
                what = f"belongs to an unfinished run with files in {path} too, where its log is missing"
                hint = f"restore that folder, or delete {home.run}* here to keep the data as it is"
                raise unfinished(what, home.path, hint)

    def _add(self, number: int, folder: Folder) -> None:
        pointer = read_log(folder, self._home.path.name)
        if pointer is not None and pointer.home == self._home.path and pointer.owner == self._home.owner:
            self._folders[number], self._names[number] = folder, pointer.names
        else:
            self._unpointed[number] = folder

    def recover(self, *, force: bool) -> str:
        """Roll the run forward if it was ready, and remove its files; return the outcome."""
        home = self._home
        outcome = self._outcome()
        # The log must be on the disk before anything that follows from it.
        fs.sync(self._fd)
        if home.is_unfinished:
            self._roll_forward(force=force)
            if len(home.folders) > 1 or home.redo is not None:
                self._append(ended=FINISHED)
        self._clear()
        return outcome

    def _outcome(self) -> str:
        """Return what becomes of the targets. Of a single rename, that depends on whether it was done."""
        home = self._home
        if not home.is_atomic or home.ended:
            return home.outcome
        (move,) = home.moves
        # The pointer may have been removed before the log.
        folder = self._folders.get(move.folder) or self._unpointed.get(move.folder)
        if folder is None or not is_new(folder, move):
            return UNTOUCHED
        # The run may have crashed before it did this. Its folder may be new, so the one above it counts, too.
        for changed in dict.fromkeys([*self._folders.values(), folder]):
            changed.sync()
        return FINISHED

    def _roll_forward(self, *, force: bool) -> None:
        """Copy and rename what the run did not, once it is certain that no other program has changed a target."""
        home = self._home
        if any(step.name not in self._names[step.folder] for step in home.steps):
            hint = f"delete {home.run}* to keep the data as it is"
            raise unfinished("changes files that it does not list", home.path, hint)
        targets, redo = self._targets(force=force), self._redo_log(force=force)
        if redo is not None:
            # Whether it is damaged must be known before the first byte is written; `force` ignores only foreign bytes.
            redo.check({} if force else targets)
        moves = [move for move in home.moves if self._is_left(move, force=force)]
        self._take()
        if redo is not None:
            redo.finish(targets, force=force)
        for move in moves:
            self._folders[move.folder].rename(name_of(home.run, move.number, "tmp"), move.name)
        # The run's own renames may not be on the disk either.
        for folder in self._folders.values():
            folder.sync()

    def _append(self, **entry: Any) -> None:
        append_step(self._fd, os.fstat(self._fd).st_size, fsync=True, **entry)

    def _take(self) -> None:
        """Log that this process recovers the run, once that is certain."""
        # A torn line would hide what is appended, and earlier recoveries no longer matter.
        fs.resize(self._fd, self._home.size)
        with contextlib.suppress(OSError):  # The disk may be full.
            self._append(taken={"pid": os.getpid(), "host": HOST})

    def _targets(self, *, force: bool) -> dict[int, tuple[File, int]]:
        """Return the files that are changed in place, by number, with their sizes."""
        targets = {}
        for number, change in enumerate(self._home.changes):
            folder = self._folders[change.folder]
            file = _target_of(folder, change)
            if not force and (file is None or file.inode != change.inode):
                raise changed_since(folder.path / change.name)
            if file is not None:
                targets[number] = (file, change.size)
        return targets

    def _redo_log(self, *, force: bool) -> RedoLog | None:
        """Return the redo log, known by its inode or, with `force`, in a copy of the folder, by its owner."""
        home, folder = self._home, self._folders[0]
        if home.redo is None:
            return None
        name = name_of(home.run, home.redo.number, "redo")
        status = folder.status(name)
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_uid != home.owner:
            hint = f"restore it, or delete {home.run}* to keep the data as it is"
            raise unfinished(f"belongs to an unfinished run whose redo log {name} is missing", home.path, hint)
        if status.st_ino != home.redo.inode and not force:
            raise changed_since(folder.path / name)
        return RedoLog(File(folder, name, status.st_dev, status.st_ino), home.redo.size)

    def _is_left(self, move: Move, *, force: bool) -> bool:
        """Check whether a rename is still to be done; raise `SystemRefusedError` if it cannot be."""
        folder, temporary = self._folders[move.folder], name_of(self._home.run, move.number, "tmp")
        built = folder.status(temporary)
        if built is not None and built.st_ino != move.inode and not is_trusted(built.st_uid, folder):
            built = None
        if is_new(folder, move) or (built is None and force):
            return False  # It was renamed.
        if built is None or (built.st_ino != move.inode and not force):
            # The inodes differ in a copy of the folder.
            raise changed_since(folder.path / (move.name if built is None else temporary))
        now = folder.status(move.name)
        if now is not None and not force and not is_replaceable(now, move):
            raise changed_since(folder.path / move.name)
        return stat.S_ISREG(built.st_mode)

    def _clear(self) -> None:
        """Remove whatever the run has made."""
        log = self._home.path.name
        for folder in self._unpointed.values():
            # A pointer that was made but not written; on the disk too, it must be gone before the log is.
            if _is_own(folder, log) and read_log(folder, log) is None:
                folder.unlink(log)
            folder.sync()
        targets = {folder: self._names[number] for number, folder in self._folders.items()}
        clear(self._home.run, targets, self._home.missing, fsync=True)


def _is_own(folder: Folder, name: str) -> bool:
    """Check whether a name is a file of this user."""
    status = folder.status(name)
    return status is not None and status.st_uid == os.geteuid() and not stat.S_ISDIR(status.st_mode)


def _remove_own(folder: Folder, name: str) -> bool:
    """Remove a file of this user; whether that succeeded."""
    with contextlib.suppress(OSError):
        if _is_own(folder, name):
            folder.unlink(name)
            return True
    return False


def _target_of(folder: Folder, change: Change) -> File | None:
    """Return the file that is changed in place, if there is one of that size."""
    status = folder.status(change.name)
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != change.size:
        return None
    return File(folder, change.name, status.st_dev, status.st_ino)


def _remove_orphan(folder: Folder, run: str, names: Collection[str]) -> int:
    """Remove the user's files of a run that has no log and no process that is about to write one; count them."""
    with contextlib.ExitStack() as stack:
        for name in (lock_of(run), log_of(run)):
            try:
                # For writing: some file systems refuse to lock a file that is open for reading only.
                fd = stack.enter_context(fs.closing(folder.open(name, os.O_RDWR)))
            except FileNotFoundError:
                continue
            except OSError:
                return 0
            # Without locks, a process may be about to write the log.
            if not stat.S_ISREG(os.fstat(fd).st_mode) or lock(fd) is not True:
                return 0
        if read_log(folder, log_of(run)) is not None:
            return 0
        return sum(_remove_own(folder, name) for name in names)


def _remove_old_markers(folder: Folder) -> int:
    """Remove the user's markers that lead to no log; count them."""
    removed = 0
    for name in folder.names():
        if name.startswith(PREFIX) and name.endswith(MARKER):
            log = read_log(folder, name)
            if log is None or folder.status(log.path.name) is None:
                removed += _remove_own(folder, name)
    return removed
