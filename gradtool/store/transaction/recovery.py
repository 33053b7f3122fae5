"""What a crashed run left unfinished, rolled forward or back. All of it may be done twice, or half and again."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gradtool.errors import BadInputError, GradtoolError, SystemRefusedError, from_os_error
from gradtool.store import fs
from gradtool.store.format.header import changed_meanwhile
from gradtool.store.fs import File, Folder
from gradtool.store.transaction.guard import home_of, is_about
from gradtool.store.transaction.locks import InUse, claim, lock, lock_of
from gradtool.store.transaction.log import (
    HOST,
    MARKER,
    PREFIX,
    files_of_runs,
    is_trusted,
    logs_in,
    marker_of,
    name_of,
    read_log,
    run_of,
)
from gradtool.store.transaction.replace import is_new, move_back
from gradtool.store.transaction.run import append_step, remove
from gradtool.store.transaction.undolog import Undo, changed_since, undo_logs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gradtool.store.transaction.guard import Place
    from gradtool.store.transaction.log import Log, Move


class Recovered(NamedTuple):
    """What became of a crashed run: its files are all new ("finished"), all old ("undone"), or were never touched."""

    outcome: str
    files: int
    pid: int
    log: Path


def settle(log: Log, *, force: bool = False) -> Recovered | InUse | None:
    """Recover a run if it crashed; None if it has ended by itself.

    With `force`, files that were changed since are rolled forward or back, too.

    Raises:
        SystemRefusedError: a file was changed since, the run is another user's, or reading or writing failed; it can be
            tried again.
    """
    known = home_of(log)
    if known is None:
        return None
    with _as_gradtool_errors(known.path), Folder.at(known.path.parent) as folder:
        lock_fd = claim(folder, known)
        if lock_fd is None or isinstance(lock_fd, InUse):
            return lock_fd
        try:
            # It may have got further between our look at it and its end.
            home = read_log(folder, known.path.name)
            if home is None:
                return None
            with _Crashed.opened(folder, home) as crashed:
                return crashed.recover(force=force)
        finally:
            os.close(lock_fd)


class _Crashed:
    """A crashed run that is ours to recover: its folders, held open, and its log."""

    def __init__(self, home: Log, folders: list[Folder | None], unpointed: list[Folder], fd: int) -> None:
        self.home = home
        # None for one that is gone, or holds no pointer to the log; those are `unpointed`.
        self._folders, self._unpointed = folders, unpointed
        # Of a run that is unfinished, that is all of them.
        self._all_folders = [folder for folder in folders if folder is not None]
        self._fd = fd

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Folder, home: Log) -> Iterator[Self]:
        """Open all folders of a run; of others than its home, those where a pointer agrees.

        So no log reaches into a folder where the run was not at work.
        """
        with contextlib.ExitStack() as stack:
            folders: list[Folder | None] = [folder]
            unpointed = []
            for path in home.folders[1:]:
                other = None
                # What cannot be looked at just now is not gone.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    other = stack.enter_context(Folder.at(path))
                pointer = None if other is None else read_log(other, home.path.name)
                agrees = pointer is not None and pointer.home == home.path and pointer.owner == home.owner
                folders.append(other if agrees else None)
                unpointed += [other] if other is not None and not agrees else []
                if not agrees and home.is_unfinished:
                    raise SystemRefusedError(
                        f"belongs to an unfinished run that has files in {path}, too, where its log is missing; bring "
                        f"that folder back, or delete {home.run}* here to keep the data as they are",
                        file=home.path,
                        code="unfinished",
                    )
            fd = File(folder, home.path.name, folder.identity[0], home.inode).open(os.O_RDWR)
            stack.callback(os.close, fd)
            yield cls(home, folders, unpointed, fd)

    def recover(self, *, force: bool) -> Recovered:
        """Roll the run forward or back, and remove what it left."""
        home = self.home
        outcome = self._outcome_of_one(home.moves[0]) if len(home.moves) == 1 and not home.revoked else home.outcome
        # The log must be on the disk before anything that follows from it is.
        fs.sync(self._fd)
        if home.is_unfinished:
            self._roll(force=force)
            if len(home.folders) > 1:
                self._append(**{"done" if outcome == "finished" else "undone": True})
        self._clear(unmake=outcome != "finished")
        return Recovered(outcome, len(home.moves or home.changes), home.pid, home.path)

    def _outcome_of_one(self, move: Move) -> str:
        """A single rename was done or it was not: nothing is left to do, and what is true is told."""
        folder = self._folders[move.folder]
        if folder is None or not is_new(folder, move):
            return "untouched"
        # The run may have crashed before it did so.
        folder.sync()
        return "finished"

    def _names(self, number: int) -> frozenset[str]:
        folder = self._all_folders[number]
        log = self.home if number == 0 else read_log(folder, self.home.path.name)
        return frozenset() if log is None else log.names

    def _roll(self, *, force: bool) -> None:
        home = self.home
        targets = [(one.folder, one.name) for one in home.steps]
        names = {number: self._names(number) for number in {number for number, _ in targets}}
        if any(name not in names[number] for number, name in targets):
            raise SystemRefusedError(
                f"is about files that it does not name; delete {home.run}* to keep the data as they are",
                file=home.path,
                code="unfinished",
            )
        if home.changes:
            self._put_back(force=force)
        elif home.revoked:
            if not force:
                self._refuse_foreign_moves()
            self._take()
            move_back(self._all_folders, home.run, home.moves, fsync=True)
        else:
            self._go_on(force=force)

    def _append(self, **entry: Any) -> None:
        append_step(self._fd, os.fstat(self._fd).st_size, fsync=True, **entry)

    def _take(self) -> None:
        """Say in the log who works on it now, once it is sure that we do."""
        # A torn line would hide what we add; and who tried before us is of no account any more.
        fs.resize(self._fd, self.home.size)
        with contextlib.suppress(OSError):
            # A disk may be too full for that.
            self._append(taken={"pid": os.getpid(), "host": HOST})

    def _refuse_foreign_moves(self) -> None:
        """Where a rename that was done is to be rolled back, its result must still be there."""
        for move in self.home.moves:
            folder = self._all_folders[move.folder]
            temporary, backup = self._files(move)
            old = _heeded(folder, backup, move.original)
            if _heeded(folder, temporary, move.inode) or is_new(folder, move) or old is None:
                continue
            now = folder.status(move.name)
            if now is None or not os.path.samestat(now, old):
                raise changed_since(folder.path / move.name)

    def _files(self, move: Move) -> tuple[str, str]:
        """The temporary of a move, and the second name of what it replaces."""
        return name_of(self.home.run, move.number, "tmp"), name_of(self.home.run, move.number, "old")

    def _go_on(self, *, force: bool) -> None:
        """Do the renames that are still to be done."""
        left = []
        for move in self.home.moves:
            folder = self._all_folders[move.folder]
            temporary, _ = self._files(move)
            built = _heeded(folder, temporary, move.inode)
            if is_new(folder, move) or (built is None and force):
                continue  # Renamed before.
            if built is None or (built.st_ino != move.inode and not force):
                # As in a copy of the folder, where the files are others.
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
        # Those that the run did itself may not be on the disk either.
        for folder in self._all_folders:
            folder.sync()

    def _put_back(self, *, force: bool) -> None:
        """Give every file its old content."""
        home, folder = self.home, self._all_folders[0]
        logs = undo_logs(folder, [name for name in files_of_runs(folder) if run_of(name) == home.run], home.owner)
        targets = {}
        # Without undo logs, it had not come to write anything.
        for number, change in enumerate(home.changes if logs else ()):
            file = self._all_folders[change.folder].file(change.name)
            status = None if file is None else file.folder.status(change.name)
            if file is None or status is None or not stat.S_ISREG(status.st_mode) or status.st_size != change.size:
                file = None
            if not force and (file is None or file.inode != change.inode):
                raise changed_since(self._all_folders[change.folder].path / change.name)
            if file is not None:
                targets[number] = (file, change.size)
        undo = Undo(targets, logs, home.key)
        if not force and (foreign := undo.foreign()) is not None:
            raise changed_since(foreign.path)
        self._take()
        undo.put_back(fsync=True, force=force)

    def _clear(self, *, unmake: bool) -> None:
        """Remove what the run left, its log and its lock at the very last."""
        home, first = self.home, self._all_folders[0]
        for folder in self._all_folders:
            for name in files_of_runs(folder):
                if run_of(name) == home.run and not name.endswith((".run", ".lock")):
                    _remove_ours(folder, name)
            _remove_markers(folder, home.run)
        pointed = [folder for folder in self._all_folders if folder is not first]
        for folder in pointed:
            folder.unlink(home.path.name)
        # A pointer must be gone from the disk before its log is, even one that the run removed itself.
        for folder in (*pointed, *self._unpointed):
            # A pointer that was made, and not written yet.
            if _is_own(folder, home.path.name) and read_log(folder, home.path.name) is None:
                folder.unlink(home.path.name)
            folder.sync()
        for number in range(len(home.missing), 0, -1) if unmake else ():
            _unmake(first, home.missing[:number])
        first.unlink(home.path.name)
        first.unlink(lock_of(home.run))


def _heeded(folder: Folder, name: str, inode: int | None) -> os.stat_result | None:
    """A file of a run, by name or, in a copy of its folder, as like it; not what others put where all may."""
    status = folder.status(name)
    is_it = status is not None and (status.st_ino == inode or is_trusted(status.st_uid, folder))
    return status if is_it else None


def _remove_ours(folder: Folder, name: str) -> None:
    """Remove a file of a run; what another user has put beside it may not be ours to remove, nor is a folder."""
    status = folder.status(name)
    if status is None or stat.S_ISDIR(status.st_mode):
        return
    try:
        folder.unlink(name)
    except PermissionError:
        if status.st_uid == os.geteuid():
            raise


def _remove_markers(folder: Folder, run: str) -> None:
    """Remove the second names of a log."""
    with contextlib.suppress(GradtoolError):
        log = read_log(folder, f"{run}.run")
        for name in () if log is None else log.names:
            marker = marker_of(name)
            there, ours = folder.status(marker), folder.status(f"{run}.run")
            if there is not None and ours is not None and os.path.samestat(there, ours):
                folder.unlink(marker)


def _unmake(home: Folder, names: tuple[str, ...]) -> None:
    """Remove a folder that the run made, if it is still empty."""
    with contextlib.ExitStack() as stack:
        above = home
        for name in names[:-1]:
            with contextlib.suppress(OSError):
                above = stack.enter_context(Folder(above.path / name, fs.open_to_list(name, within=above.fd)))
                continue
            return
        above.unmake(names[-1])


@contextlib.contextmanager
def _as_gradtool_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except GradtoolError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise changed_meanwhile(path) from error
        raise from_os_error(error, path) from error


def recover_at(place: Place, *, force: bool = False) -> tuple[list[Recovered | InUse | GradtoolError], int]:
    """Recover every crashed run that is about a place, and remove the orphans that lie there.

    What became of each run, or why it could not be recovered; and how many orphans were removed.

    Raises:
        SystemRefusedError: the folder cannot be looked at.
        BadInputError: there is no such folder.
    """
    found: list[Recovered | InUse | GradtoolError] = []
    try:
        folder = Folder.at(place.folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise BadInputError("no such folder", file=place.folder, code="missing-file") from error
        raise from_os_error(error, place.folder) from error
    with folder:
        for log in logs_in(folder):
            if is_about(log, folder, place.name):
                try:
                    found += filter(None, [settle(log, force=force)])
                except GradtoolError as error:
                    found.append(error)
        try:
            swept = _sweep(folder)
        except GradtoolError as error:
            found.append(error)
            swept = 0
        return found, swept


def _sweep(folder: Folder) -> int:
    """Remove the user's files of runs that have no log, or none that was ever written; how many those were."""
    swept, found = 0, defaultdict(list)
    for name in files_of_runs(folder):
        found[run_of(name)].append(name)
    for run, names in found.items():
        with _orphaned(folder, run or "") as is_orphaned:
            swept += sum(_is_own(folder, name) and remove(folder, name) for name in names if is_orphaned)
    for name in folder.names():
        if name.startswith(PREFIX) and name.endswith(MARKER) and _is_own(folder, name):
            log = read_log(folder, name)
            if log is None or folder.status(log.path.name) is None:
                swept += remove(folder, name)
    return swept


def _is_own(folder: Folder, name: str) -> bool:
    status = folder.status(name)
    return status is not None and status.st_uid == os.geteuid() and not stat.S_ISDIR(status.st_mode)


@contextlib.contextmanager
def _orphaned(folder: Folder, run: str) -> Iterator[bool]:
    """Whether neither a log speaks for a run, nor a process is about to write one; it cannot while this is held."""
    with contextlib.ExitStack() as stack:
        free = True
        for name in (lock_of(run), f"{run}.run"):
            try:
                # Not only to read: there are file systems that lock no file which is.
                fd = folder.open(name, os.O_RDWR)
            except FileNotFoundError:
                continue
            except OSError:
                free = False
                break
            stack.callback(os.close, fd)
            # Where there are no locks, a process may be about to write it.
            free = free and stat.S_ISREG(os.fstat(fd).st_mode) and lock(fd) is True
        yield free and not _has_log(folder, run)


def _has_log(folder: Folder, run: str) -> bool:
    try:
        return read_log(folder, f"{run}.run") is not None
    except GradtoolError:
        return True
