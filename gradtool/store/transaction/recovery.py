"""Recovery of crashed runs, which roll forward from the line that says they were ready; before it, nothing changed.

Every step may be interrupted and repeated.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import BadInputError, GradtoolError, changed_meanwhile, os_errors_about, unfinished
from gradtool.store import fs
from gradtool.store.fs import PREFIX, File, Folder
from gradtool.store.io.redolog import RedoLog, changed_since
from gradtool.store.transaction.locks import InUse, claim, lock
from gradtool.store.transaction.log import FINISHED, HOST, MARKER, UNTOUCHED, append_step, is_trusted, read_log
from gradtool.store.transaction.runs import follow_pointer, runs_in
from gradtool.store.transaction.staging import attributes_of, is_new, is_replaceable
from gradtool.store.transaction.transaction import clear

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from gradtool.store.transaction.log import Log, Move
    from gradtool.store.transaction.runs import Scope


class Recovered(NamedTuple):
    """A run that was recovered: its files are all new ("finished"), or all old ("untouched")."""

    outcome: str
    files: int
    pid: int
    log: Path


def recover_if_crashed(log: Log, *, force: bool = False) -> Recovered | InUse | None:
    """Recover a run if it crashed, with `force` even if other programs changed its files since; None if it has ended.

    Raises:
        SystemRefusedError: another program changed a file, the run is another user's, or reading or writing failed.
    """
    followed = follow_pointer(log)
    if followed is None:
        return None
    path = followed.path
    with os_errors_about(path):
        try:
            with Folder.at(path.parent) as folder:
                return _recover(folder, followed, force=force)
        except OSError as error:
            if isinstance(error, GradtoolError) or error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            raise changed_meanwhile(path) from error


def recover_at(scope: Scope, *, force: bool = False) -> tuple[list[Recovered | InUse | GradtoolError], int]:
    """Recover every crashed run that is in a scope, and remove the orphans there.

    Returns the outcome of each run, or why it could not be recovered; and the number of orphans that were removed.
    """
    outcomes: list[Recovered | InUse | GradtoolError] = []
    removed = 0
    with os_errors_about(scope.folder):
        try:
            folder = Folder.at(scope.folder)
        except (FileNotFoundError, NotADirectoryError) as error:
            from gradtool.store.format.hints import no_such_folder  # only needed for the error

            raise BadInputError.from_problems([no_such_folder(str(scope.folder))]) from error
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


def _recover(folder: Folder, log: Log, *, force: bool) -> Recovered | InUse | None:
    lock_fd = claim(folder, log)
    if lock_fd is None or isinstance(lock_fd, InUse):
        return lock_fd
    with fs.closing(lock_fd), contextlib.ExitStack() as stack:
        # The run may have got further before it ended.
        newest = read_log(folder, log.path.name)
        if newest is None:
            return None
        file = File(folder, newest.path.name, folder.identity[0], newest.inode)
        fd = stack.enter_context(fs.closing(file.open(os.O_RDWR)))
        outcome = _Crashed(folder, newest, fd, stack, force=force).recover()
        return Recovered(outcome, len(newest.steps), newest.pid, newest.path)


class _Crashed:
    """A crashed run that we have locked: its log and its folders, open until the stack is closed.

    Of its folders, those count that have a pointer to it. So a forged log reaches no folder where its run did not work.
    """

    def __init__(self, folder: Folder, log: Log, fd: int, stack: contextlib.ExitStack, *, force: bool) -> None:
        self._log, self._fd, self._force = log, fd, force
        # By number, and the names that the log there lists.
        self._folders, self._names = {0: folder}, {0: log.names}
        # Folders whose pointer is missing or another run's, by number.
        self._unpointed: dict[int, Folder] = {}
        for number, path in enumerate(log.folders[1:], 1):
            # No other error says that the folder is gone.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                opened = stack.enter_context(Folder.at(path))
                pointer = read_log(opened, log.path.name)
                if pointer is not None and pointer.log_path == log.path and pointer.owner == log.owner:
                    self._folders[number], self._names[number] = opened, pointer.names
                else:
                    self._unpointed[number] = opened
            if number not in self._folders and log.is_unfinished:
                message = f"belongs to an unfinished run with files in {path} too, where its log is missing"
                hint = f"restore that folder, or delete {log.run}* here to keep the data as it is"
                raise unfinished(message, log.path, hint)

    def recover(self) -> str:
        """Roll the run forward if it was ready, and remove its files; return the outcome."""
        log = self._log
        outcome = self._outcome()
        # The log must be on the disk before anything that follows from it.
        fs.sync(self._fd)
        if log.is_unfinished:
            self._roll_forward()
            if len(log.folders) > 1 or log.redo is not None:
                self._append(ended=FINISHED)
        self._clear()
        return outcome

    def _outcome(self) -> str:
        """Return what becomes of the targets. Of a single rename, that depends on whether it was done."""
        log = self._log
        if log.ended:
            return log.ended
        if not log.is_atomic:
            return FINISHED if log.steps else UNTOUCHED
        (move,) = log.moves
        # The pointer may have been removed before the log.
        folder = self._folders.get(move.folder) or self._unpointed.get(move.folder)
        if folder is None or not is_new(folder, move):
            return UNTOUCHED
        # The run may have crashed before it did this. Its folder may be new, so the one above it counts, too.
        for changed in dict.fromkeys([*self._folders.values(), folder]):
            changed.sync()
        return FINISHED

    def _roll_forward(self) -> None:
        """Copy and rename what the run did not, once it is certain that no other program has changed a target."""
        log = self._log
        if any(step.name not in self._names[step.folder] for step in log.steps):
            hint = f"delete {log.run}* to keep the data as it is"
            raise unfinished("changes files that it does not list", log.path, hint)
        targets, redo = self._targets(), self._redo_log()
        if redo is not None:
            # Whether it is damaged must be known before the first byte is written; `force` ignores only foreign bytes.
            redo.check({} if self._force else targets)
        moves = [move for move in log.moves if self._is_left(move)]
        # A torn line would hide what is appended, and earlier recoveries no longer matter.
        fs.resize(self._fd, log.size)
        with contextlib.suppress(OSError):  # The disk may be full.
            self._append(taken={"pid": os.getpid(), "host": HOST})
        if redo is not None:
            redo.finish(targets, force=self._force)
        for move in moves:
            self._narrow(move)
            self._folders[move.folder].rename(f"{log.run}-{move.number}.tmp", move.name)
        # Renames of the run itself may not be on the disk either.
        for folder in self._folders.values():
            folder.sync()

    def _append(self, **step: Any) -> None:
        append_step(self._fd, os.fstat(self._fd).st_size, fsync=True, **step)

    def _targets(self) -> dict[int, tuple[File, int]]:
        """Return the files that are changed in place, by number, with their sizes."""
        targets = {}
        for number, change in enumerate(self._log.changes):
            folder = self._folders[change.folder]
            status = folder.status(change.name)
            if status is not None and (not stat.S_ISREG(status.st_mode) or status.st_size != change.size):
                status = None
            if not self._force and (status is None or status.st_ino != change.inode):
                raise changed_since(folder.path / change.name)
            if status is not None:
                targets[number] = (File(folder, change.name, status.st_dev, status.st_ino), change.size)
        return targets

    def _redo_log(self) -> RedoLog | None:
        """Return the redo log, known by its inode or, with `force`, in a copy of the folder, by its owner."""
        log, folder = self._log, self._folders[0]
        if log.redo is None:
            return None
        name = f"{log.run}-{log.redo.number}.redo"
        status = folder.status(name)
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_uid != log.owner:
            hint = f"restore it, or delete {log.run}* to keep the data as it is"
            raise unfinished(f"belongs to an unfinished run whose redo log {name} is missing", log.path, hint)
        if status.st_ino != log.redo.inode and not self._force:
            raise changed_since(folder.path / name)
        return RedoLog(File(folder, name, status.st_dev, status.st_ino), log.redo.size)

    def _is_left(self, move: Move) -> bool:
        """Check whether a rename is still to be done; raise `SystemRefusedError` if it cannot be."""
        folder, temporary = self._folders[move.folder], f"{self._log.run}-{move.number}.tmp"
        built = folder.status(temporary)
        if built is not None and built.st_ino != move.inode and not is_trusted(built.st_uid, folder):
            built = None
        if is_new(folder, move) or (built is None and self._force):
            return False  # It was renamed.
        if built is None or (built.st_ino != move.inode and not self._force):
            # The inodes differ in a copy of the folder.
            raise changed_since(folder.path / (move.name if built is None else temporary))
        now = folder.status(move.name)
        if now is not None and not self._force and not is_replaceable(now, move):
            raise changed_since(folder.path / move.name)
        return stat.S_ISREG(built.st_mode)

    def _narrow(self, move: Move) -> None:
        """Take the permissions from a temporary that its target has lost since the run was ready."""
        folder, name = self._folders[move.folder], f"{self._log.run}-{move.number}.tmp"
        target, built = folder.status(move.name), folder.status(name)
        if target is None or built is None or attributes_of(target) == move.attributes:
            return
        lost = stat.S_IMODE(built.st_mode & ~target.st_mode)
        if target.st_gid != built.st_gid:
            lost |= stat.S_IRWXG
        if lost:
            with fs.closing(File(folder, name, built.st_dev, built.st_ino).open(os.O_RDONLY)) as fd:
                fs.change_mode(fd, stat.S_IMODE(built.st_mode) & ~lost)
                fs.sync(fd)

    def _clear(self) -> None:
        name = self._log.path.name
        for folder in self._unpointed.values():
            # A pointer that was made but not written; on the disk too, it must be gone before the log is.
            if _is_own_file(folder, name) and read_log(folder, name) is None:
                folder.unlink(name)
            folder.sync()
        targets = {folder: self._names[number] for number, folder in self._folders.items()}
        clear(self._log.run, targets, self._log.missing, fsync=True)


def _is_own_file(folder: Folder, name: str) -> bool:
    status = folder.status(name)
    return status is not None and status.st_uid == os.geteuid() and not stat.S_ISDIR(status.st_mode)


def _remove_own(folder: Folder, name: str) -> bool:
    with contextlib.suppress(OSError):
        if _is_own_file(folder, name):
            folder.unlink(name)
            return True
    return False


def _remove_orphan(folder: Folder, run: str, names: Collection[str]) -> int:
    """Remove the user's files of a run that has no log and no process that is about to write one; count them."""
    with contextlib.ExitStack() as stack:
        for name in (f"{run}.lock", f"{run}.run"):
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
        if read_log(folder, f"{run}.run") is not None:
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
