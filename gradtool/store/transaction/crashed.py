"""One crashed run, rolled forward or back. Every step may be interrupted and repeated."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, Any, Self

from gradtool.errors import GradtoolError, SystemRefusedError
from gradtool.store import fs
from gradtool.store.fs import File, Folder
from gradtool.store.transaction.files import files_of_runs, lock_of, marker_of, name_of, run_of
from gradtool.store.transaction.log import HOST
from gradtool.store.transaction.logfiles import append_step, is_trusted, read_log
from gradtool.store.transaction.replace import is_new, move_back
from gradtool.store.transaction.undolog import Undo, changed_since, undo_logs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradtool.store.transaction.log import Log, Move


class Crashed:
    """A crashed run that we have locked: its log and its folders, open."""

    def __init__(self, home: Log, folders: list[Folder | None], unpointed: list[Folder], fd: int) -> None:
        self.home = home
        # None for one that is gone or has no pointer to the log; the latter are `unpointed`.
        self._folders, self._unpointed = folders, unpointed
        # Without these; of an unfinished run, none is missing.
        self._open_folders = [folder for folder in folders if folder is not None]
        self._fd = fd

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Folder, home: Log) -> Iterator[Self]:
        """Open the home's other folders, if they have a pointer to the log.

        So a forged log reaches no folder where its run did not work.
        """
        with contextlib.ExitStack() as stack:
            folders: list[Folder | None] = [folder]
            unpointed = []
            for path in home.folders[1:]:
                other = None
                # Any other error does not mean that the folder is gone.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    other = stack.enter_context(Folder.at(path))
                agrees = other is not None and _has_pointer(other, home)
                folders.append(other if agrees else None)
                unpointed += [other] if other is not None and not agrees else []
                if not agrees and home.is_unfinished:
                    raise _unfinished(
                        home,
                        f"belongs to an unfinished run with files in {path} too, where its log is missing; restore "
                        f"that folder, or delete {home.run}* here to keep the data as it is",
                    )
            log = File(folder, home.path.name, folder.identity[0], home.inode)
            yield cls(home, folders, unpointed, stack.enter_context(log.opened(os.O_RDWR)))

    def recover(self, *, force: bool) -> str:
        """Roll the run forward or back, and remove its files; the outcome."""
        home = self.home
        outcome = self._outcome_of_one(home.moves[0]) if len(home.moves) == 1 and not home.revoked else home.outcome
        # The log must be on the disk before anything that follows from it.
        fs.sync(self._fd)
        if home.is_unfinished:
            self._roll(force=force)
            if len(home.folders) > 1:
                self._append(**{"done" if outcome == "finished" else "undone": True})
        self._clear(unmake=outcome != "finished")
        return outcome

    def _outcome_of_one(self, move: Move) -> str:
        """A single rename was done or not; there is nothing to roll."""
        folder = self._folders[move.folder]
        if folder is None or not is_new(folder, move):
            return "untouched"
        # The run may have crashed before it did this.
        folder.sync()
        return "finished"

    def _roll(self, *, force: bool) -> None:
        home = self.home
        targets = [(step.folder, step.name) for step in home.steps]
        names = {number: self._names(number) for number in {number for number, _ in targets}}
        if any(name not in names[number] for number, name in targets):
            raise _unfinished(
                home, f"changes files that it does not list; delete {home.run}* to keep the data as it is"
            )
        if home.changes:
            self._put_back(force=force)
        elif home.revoked:
            if not force:
                self._refuse_foreign_moves()
            self._take()
            move_back(self._open_folders, home.run, home.moves, fsync=True)
        else:
            self._finish_moves(force=force)

    def _names(self, number: int) -> frozenset[str]:
        folder = self._open_folders[number]
        log = self.home if number == 0 else read_log(folder, self.home.path.name)
        return frozenset() if log is None else log.names

    def _append(self, **entry: Any) -> None:
        append_step(self._fd, os.fstat(self._fd).st_size, fsync=True, **entry)

    def _take(self) -> None:
        """Log that this process recovers the run, once that is certain."""
        # A torn line would hide what is appended; earlier recoveries no longer matter.
        fs.resize(self._fd, self.home.size)
        with contextlib.suppress(OSError):
            # The disk may be full.
            self._append(taken={"pid": os.getpid(), "host": HOST})

    def _refuse_foreign_moves(self) -> None:
        """Refuse to undo a rename whose result is gone."""
        for move in self.home.moves:
            folder = self._open_folders[move.folder]
            temporary, backup = self._files(move)
            old = _trusted_status(folder, backup, move.original)
            if _trusted_status(folder, temporary, move.inode) or is_new(folder, move) or old is None:
                continue
            now = folder.status(move.name)
            if now is None or not os.path.samestat(now, old):
                raise changed_since(folder.path / move.name)

    def _files(self, move: Move) -> tuple[str, str]:
        """The temporary of a move, and the second name of what it replaces."""
        return name_of(self.home.run, move.number, "tmp"), name_of(self.home.run, move.number, "old")

    def _finish_moves(self, *, force: bool) -> None:
        """Do the remaining renames."""
        left = []
        for move in self.home.moves:
            folder = self._open_folders[move.folder]
            temporary, _ = self._files(move)
            built = _trusted_status(folder, temporary, move.inode)
            if is_new(folder, move) or (built is None and force):
                continue  # It was renamed.
            if built is None or (built.st_ino != move.inode and not force):
                # The inodes differ in a copy of the folder.
                raise changed_since(folder.path / (move.name if built is None else temporary))
            if not stat.S_ISREG(built.st_mode):
                continue
            left.append((folder, temporary, move.name))
            now = folder.status(move.name)
            if now is not None and not force and (now.st_size, now.st_mtime_ns) != (move.size, move.mtime_ns):
                raise changed_since(folder.path / move.name)
        self._take()
        for folder, temporary, name in left:
            folder.rename(temporary, name)
        # The run's own renames may not be on the disk either.
        for folder in self._open_folders:
            folder.sync()

    def _put_back(self, *, force: bool) -> None:
        """Give every file its old content."""
        home, folder = self.home, self._open_folders[0]
        logs = undo_logs(folder, [name for name in files_of_runs(folder) if run_of(name) == home.run], home.owner)
        targets = {}
        # Without undo logs, nothing was written.
        for number, change in enumerate(home.changes if logs else ()):
            file = self._open_folders[change.folder].file(change.name)
            status = None if file is None else file.folder.status(change.name)
            if file is None or status is None or not stat.S_ISREG(status.st_mode) or status.st_size != change.size:
                file = None
            if not force and (file is None or file.inode != change.inode):
                raise changed_since(self._open_folders[change.folder].path / change.name)
            if file is not None:
                targets[number] = (file, change.size)
        undo = Undo(targets, logs, home.key)
        if not force and (foreign := undo.foreign()) is not None:
            raise changed_since(foreign.path)
        self._take()
        undo.put_back(fsync=True, force=force)

    def _clear(self, *, unmake: bool) -> None:
        """Remove the run's files, its log and its lock last."""
        home, first = self.home, self._open_folders[0]
        for folder in self._open_folders:
            for name in files_of_runs(folder):
                if run_of(name) == home.run and not name.endswith((".run", ".lock")):
                    _remove_ours(folder, name)
            _remove_markers(folder, home)
        pointed = self._open_folders[1:]
        for folder in pointed:
            folder.unlink(home.path.name)
        # On the disk too, a pointer must be gone before its log is, even one that the run removed itself.
        for folder in (*pointed, *self._unpointed):
            # A pointer that was made but not written.
            if is_own(folder, home.path.name) and read_log(folder, home.path.name) is None:
                folder.unlink(home.path.name)
            folder.sync()
        for number in range(len(home.missing), 0, -1) if unmake else ():
            _unmake(first, home.missing[:number])
        first.unlink(home.path.name)
        first.unlink(lock_of(home.run))


def is_own(folder: Folder, name: str) -> bool:
    """Whether a name is a file of this user."""
    status = folder.status(name)
    return status is not None and status.st_uid == os.geteuid() and not stat.S_ISDIR(status.st_mode)


def _has_pointer(folder: Folder, home: Log) -> bool:
    pointer = read_log(folder, home.path.name)
    return pointer is not None and pointer.home == home.path and pointer.owner == home.owner


def _unfinished(home: Log, message: str) -> SystemRefusedError:
    return SystemRefusedError(message, file=home.path, code="unfinished")


def _trusted_status(folder: Folder, name: str, inode: int | None) -> os.stat_result | None:
    """The status of a run's file, known by its inode or, in a copy of the folder, by its owner; None for any other."""
    status = folder.status(name)
    is_it = status is not None and (status.st_ino == inode or is_trusted(status.st_uid, folder))
    return status if is_it else None


def _remove_ours(folder: Folder, name: str) -> None:
    """Remove a file of a run; a folder, or another user's file that we may not remove, stays."""
    status = folder.status(name)
    if status is None or stat.S_ISDIR(status.st_mode):
        return
    try:
        folder.unlink(name)
    except PermissionError:
        if status.st_uid == os.geteuid():
            raise


def _remove_markers(folder: Folder, home: Log) -> None:
    with contextlib.suppress(GradtoolError):
        log = read_log(folder, home.path.name)
        for marker in map(marker_of, () if log is None else log.names):
            there, ours = folder.status(marker), folder.status(home.path.name)
            if there is not None and ours is not None and os.path.samestat(there, ours):
                folder.unlink(marker)


def _unmake(home: Folder, names: tuple[str, ...]) -> None:
    """Remove a folder that the run made, if it is empty."""
    with contextlib.ExitStack() as stack:
        above = home
        for name in names[:-1]:
            try:
                above = stack.enter_context(Folder(above.path / name, fs.open_folder(name, within=above.fd)))
            except OSError:
                return
        above.unmake(names[-1])
