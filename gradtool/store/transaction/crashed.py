"""One crashed run, rolled forward or back. Every step may be interrupted and repeated."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from typing import TYPE_CHECKING, Any, Self

from gradtool.errors import unfinished
from gradtool.store import fs
from gradtool.store.fs import File, Folder
from gradtool.store.transaction.files import files_of_runs, lock_of, marker_of, name_of, run_of
from gradtool.store.transaction.log import HOST
from gradtool.store.transaction.logfiles import append_step, is_trusted, read_log
from gradtool.store.transaction.replace import is_new, move_back
from gradtool.store.transaction.undolog import Undo, changed_since, undo_logs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradtool.store.transaction.log import Change, Log, Move


class Crashed:
    """A crashed run that we have locked: its log and its folders, open."""

    def __init__(self, folder: Folder, home: Log, fd: int) -> None:
        self._home, self._fd = home, fd
        # By number, and the names that the log there lists.
        self._folders, self._names = {0: folder}, {0: home.names}
        # Folders whose pointer is missing or another run's.
        self._unpointed: list[Folder] = []

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Folder, home: Log) -> Iterator[Self]:
        """Open a run by its log, with those of its folders that have a pointer to it.

        So a forged log reaches no folder where its run did not work.
        """
        log = File(folder, home.path.name, folder.identity[0], home.inode)
        with contextlib.ExitStack() as stack:
            crashed = cls(folder, home, stack.enter_context(log.opened(os.O_RDWR)))
            for number, path in enumerate(home.folders[1:], 1):
                # No other error says that the folder is gone.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    crashed._add(number, stack.enter_context(Folder.at(path)))
                if number not in crashed._folders and home.is_unfinished:
                    what = f"belongs to an unfinished run with files in {path} too, where its log is missing"
                    hint = f"restore that folder, or delete {home.run}* here to keep the data as it is"
                    raise unfinished(what, home.path, hint)
            yield crashed

    def _add(self, number: int, folder: Folder) -> None:
        pointer = read_log(folder, self._home.path.name)
        if pointer is not None and pointer.home == self._home.path and pointer.owner == self._home.owner:
            self._folders[number], self._names[number] = folder, pointer.names
        else:
            self._unpointed.append(folder)

    def recover(self, *, force: bool) -> str:
        """Roll the run forward or back, and remove its files; the outcome."""
        home = self._home
        outcome = self._outcome()
        # The log must be on the disk before anything that follows from it.
        fs.sync(self._fd)
        if home.is_unfinished:
            if not (home.changes and outcome == "finished"):
                self._roll(force=force)
            if len(home.folders) > 1 or home.ends_with_rename:
                self._append(**{"done" if outcome == "finished" else "undone": True})
        self._clear(unmake=outcome != "finished")
        return outcome

    def _outcome(self) -> str:
        """What becomes of the targets. Of a single rename, that depends on whether it was done."""
        home = self._home
        if len(home.moves) != 1 or home.revoked or home.done or home.undone:
            return home.outcome
        (move,) = home.moves
        folder = self._folders.get(move.folder)
        is_done = folder is not None and is_new(folder, move)
        if folder is not None and home.ends_with_rename:
            # In a copy of the folder, inodes differ.
            is_done = is_done or self._status(move, "tmp", move.inode) is None
        if folder is None or not is_done:
            return "undone" if home.changes else "untouched"
        # The run may have crashed before it did this.
        folder.sync()
        return "finished"

    def _roll(self, *, force: bool) -> None:
        home = self._home
        if any(step.name not in self._names[step.folder] for step in home.steps):
            hint = f"delete {home.run}* to keep the data as it is"
            raise unfinished("changes files that it does not list", home.path, hint)
        if home.changes:
            self._put_back(force=force)
        elif home.revoked:
            if not force:
                self._check_moves()
            self._take()
            move_back(self._folders, home.run, home.moves, fsync=True)
        else:
            self._finish_moves(force=force)

    def _append(self, **entry: Any) -> None:
        append_step(self._fd, os.fstat(self._fd).st_size, fsync=True, **entry)

    def _take(self) -> None:
        """Log that this process recovers the run, once that is certain."""
        # A torn line would hide what is appended, and earlier recoveries no longer matter.
        fs.resize(self._fd, self._home.size)
        with contextlib.suppress(OSError):  # The disk may be full.
            self._append(taken={"pid": os.getpid(), "host": HOST})

    def _check_moves(self) -> None:
        """Raise `SystemRefusedError` for a rename that cannot be undone, because its result is gone."""
        for move in self._home.moves:
            folder = self._folders[move.folder]
            old = self._status(move, "old", move.original)
            if self._status(move, "tmp", move.inode) or is_new(folder, move) or old is None:
                continue
            now = folder.status(move.name)
            if now is None or not os.path.samestat(now, old):
                raise changed_since(folder.path / move.name)

    def _finish_moves(self, *, force: bool) -> None:
        """Do the remaining renames."""
        left = []
        for move in self._home.moves:
            folder, temporary = self._folders[move.folder], name_of(self._home.run, move.number, "tmp")
            built = self._status(move, "tmp", move.inode)
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
        for folder in self._folders.values():
            folder.sync()

    def _status(self, move: Move, kind: str, inode: int | None) -> os.stat_result | None:
        """The status of a file that the run made, known by its inode or, in a copy of the folder, by its owner."""
        folder = self._folders[move.folder]
        status = folder.status(name_of(self._home.run, move.number, kind))
        is_it = status is not None and (status.st_ino == inode or is_trusted(status.st_uid, folder))
        return status if is_it else None

    def _put_back(self, *, force: bool) -> None:
        """Give every file its old content."""
        home, folder = self._home, self._folders[0]
        logs = undo_logs(folder, [name for name in files_of_runs(folder) if run_of(name) == home.run], home.owner)
        targets = {}
        # Without undo logs, nothing was written.
        for number, change in enumerate(home.changes if logs else ()):
            file = _target_of(self._folders[change.folder], change)
            if not force and (file is None or file.inode != change.inode):
                raise changed_since(self._folders[change.folder].path / change.name)
            if file is not None:
                targets[number] = (file, change.size)
        undo = Undo(targets, logs, home.key)
        if not force and (foreign := undo.foreign()) is not None:
            raise changed_since(foreign.path)
        self._take()
        undo.put_back(fsync=True, force=force)

    def _clear(self, *, unmake: bool) -> None:
        """Remove the run's files, its log and its lock last."""
        log, first = self._home.path.name, self._folders[0]
        for number, folder in self._folders.items():
            self._clear_folder(folder, self._names[number])
        pointed = list(self._folders.values())[1:]
        for folder in pointed:
            folder.unlink(log)
        # On the disk too, a pointer must be gone before its log is, even one that the run removed itself.
        for folder in (*pointed, *self._unpointed):
            # A pointer that was made but not written.
            if is_own(folder, log) and read_log(folder, log) is None:
                folder.unlink(log)
            folder.sync()
        missing = self._home.missing
        for number in range(len(missing), 0, -1) if unmake else ():
            _unmake(first, missing[:number])
        first.unlink(log)
        first.unlink(lock_of(self._home.run))

    def _clear_folder(self, folder: Folder, names: frozenset[str]) -> None:
        # Listed twice, because a worker may make a temporary until the permit to do so is gone.
        for name in itertools.chain(files_of_runs(folder), _listed_later(folder)):
            if run_of(name) == self._home.run and not name.endswith((".run", ".lock")):
                _remove_ours(folder, name)
        log = folder.status(self._home.path.name)
        for marker in map(marker_of, names):
            status = folder.status(marker)
            if status is not None and log is not None and os.path.samestat(status, log):
                folder.unlink(marker)


def is_own(folder: Folder, name: str) -> bool:
    """Whether a name is a file of this user."""
    status = folder.status(name)
    return status is not None and status.st_uid == os.geteuid() and not stat.S_ISDIR(status.st_mode)


def _target_of(folder: Folder, change: Change) -> File | None:
    """The file that was changed in place, if there is one of that size."""
    status = folder.status(change.name)
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != change.size:
        return None
    return File(folder, change.name, status.st_dev, status.st_ino)


def _listed_later(folder: Folder) -> Iterator[str]:
    """The files of runs as they are when the first is asked for."""
    yield from files_of_runs(folder)


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
