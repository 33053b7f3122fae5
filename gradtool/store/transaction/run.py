"""One writing run while it lives: its transaction log, its lock, and the names of the files that it makes."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from gradtool.errors import GradtoolError, SystemRefusedError, told
from gradtool.store import fs
from gradtool.store.transaction.locks import create_locked, lock_of
from gradtool.store.transaction.log import FORMAT, HOST, PREFIX, boot, line_of, marker_of, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gradtool.store.fs import File, Folder
    from gradtool.store.transaction.targets import Targets

_TRIES = 10
_LOCKED = "cannot lock a new file here: another process locks it first"
# What a number in a log takes at most, and all of those about one target.
_LONGEST = -(1 << 63)
_NUMBERS = 6


class Run:
    """A run that will write the given targets, which need not be there yet."""

    def __init__(self, targets: Targets, *, fsync: bool) -> None:
        self.fsync = fsync
        self.id = ""
        self.key = os.urandom(16).hex()
        # Whether what the files hold may have been changed while we waited.
        self.met_others = False
        self._targets = targets
        self._pid = os.getpid()
        # The folders that our log, or a pointer to it, lies in, and the second names that it has.
        self._logged: list[Folder] = []
        self._marked: list[tuple[Folder, str]] = []
        self._lock = self._log = -1
        self._size = 0
        self._numbers = itertools.count()
        # Files are left that only the log tells of, so the log must stay.
        self.is_left = False
        # Only a later run may roll this one forward or back.
        self.needs_recovery = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def home(self) -> Folder:
        """The folder that the log is in."""
        return self._targets.folders[0]

    @property
    def folders(self) -> list[Folder]:
        """Every folder that has a target, home first."""
        return self._targets.folders

    @property
    def names(self) -> list[tuple[Folder, set[str]]]:
        """The targets in each folder."""
        return self._targets.names

    def place(self, target: Path) -> tuple[Folder, str]:
        """The folder and the name of a target; raises `SystemRefusedError` if it is none, or leads elsewhere by now."""
        return self._targets.place(target)

    def number_of(self, folder: Folder) -> int:
        """The number of a folder in the log."""
        return self.folders.index(folder)

    def register(self) -> None:
        """Leave the log in the home, and a pointer to it in every other folder.

        Raises:
            SystemRefusedError: one could not be written.
            BadInputError: they would be too large to be read back.
        """
        self._refuse_too_many()
        where = self.home
        try:
            self._lock_home()
            self._write_log()
            self._targets.make_missing()
            for where in self._targets.made if self.fsync else ():
                where.sync()
            for where in self.folders[1:]:
                self._point_home(where)
        except OSError as error:
            raise told(error, where.path) from error

    def be_ready(self) -> None:
        """Say in the log that no other run is in the way.

        Raises:
            SystemRefusedError: that could not be written.
        """
        try:
            self.append(ready=True, fsync=False)
        except OSError as error:
            raise told(error, self.home.path) from error

    def withdraw(self) -> None:
        """Undo `register`, so that others can go first."""
        if self._size:
            # To remove all pointers may take a while, and they need not wait for that.
            with contextlib.suppress(OSError):
                append_step(self._log, self._size, fsync=False, undone=True)
        self._end()

    def new_name(self, kind: str) -> tuple[int, str]:
        """A number and a name for a file that the run is about to make."""
        number = next(self._numbers)
        return number, name_of(self.id, number, kind)

    def append(self, *, fsync: bool | None = None, **entry: Any) -> None:
        """Add a step to the log, and have it on the disk; where that fails it is not there."""
        fsync = self.fsync if fsync is None else fsync
        try:
            self._size += append_step(self._log, self._size, fsync=fsync, **entry)
        except InDoubtError:
            # Whether the step stands there or not, both are safe, as long as nothing else is done.
            self.leave_to_recovery()
            raise

    def mark(self) -> None:
        """Give the log a second name for each target in the folders that not everybody may list."""
        for folder, names in self.names:
            classes = [(folder.mode >> shift) & (stat.S_IROTH | stat.S_IXOTH) for shift in (0, 3, 6)]
            if stat.S_IXOTH not in classes:
                continue
            for marker in map(marker_of, sorted(names)):
                with contextlib.suppress(OSError):  # Of a file system that has no links, there are no classes either.
                    folder.link(f"{self.id}.run", marker)
                    self._marked.append((folder, marker))

    def sync(self) -> None:
        """Bring the log, its pointers and the names of all files made so far to the disk."""
        if self.fsync:
            fs.sync(self._log)
            self.sync_folders()

    def sync_folders(self) -> None:
        """Bring the names in all folders to the disk."""
        for folder in self.folders if self.fsync else ():
            folder.sync()

    def end(self, **entry: Any) -> None:
        """Say that only clearing away is left, where that takes more than to remove the log."""
        if len(self.folders) > 1 or self._marked:
            self.append(**entry)

    def leave_to_recovery(self) -> None:
        """Do nothing more: a later run will roll this one forward or back."""
        self.is_left = self.needs_recovery = True

    def close(self) -> None:
        """Remove the log, its pointers first, and let go of the lock and of all folders."""
        # A process that was forked meanwhile has nothing to end.
        with contextlib.closing(self._targets):
            if os.getpid() == self._pid:
                self._end()
                self._unmake()

    def _refuse_too_many(self) -> None:
        """Raise `BadInputError` now for a log that would get too large later."""
        where = self.home
        try:
            for where, _ in self.names:
                line_of(run=self._facts(where))
            line_of(moves=[[name, *[_LONGEST] * _NUMBERS] for _, names in self.names for name in names])
        except GradtoolError as error:
            problem = error.problems[0]
            name = min(self._targets.names_in(where), default="")
            raise type(error)(problem.message, file=where.path / name, code=problem.code) from None

    def _lock_home(self) -> None:
        for _ in range(_TRIES):
            self.id = PREFIX + os.urandom(6).hex()
            fd = create_locked(self.home, lock_of(self.id))
            if fd is not None:
                self._lock = fd
                return
        raise SystemRefusedError(_LOCKED, file=self.home.path)

    def _write_log(self) -> None:
        fd = self._log = self.home.create(f"{self.id}.run")
        self._logged.append(self.home)
        self._size = fs.write_all(fd, [line_of(run=self._facts(self.home))], 0)
        # Other users must be able to read who works on the files; but while it is empty, they could lock it.
        fs.change_mode(fd, 0o644)
        # No pointer may outlive a power cut without what it points to.
        if self.fsync and (len(self.folders) > 1 or self._targets.missing):
            fs.sync(fd)
            self.home.sync()

    def _point_home(self, folder: Folder) -> None:
        name = f"{self.id}.run"
        for _ in range(_TRIES):
            fd = create_locked(folder, name)
            if fd is not None:
                break
            folder.unlink(name)
        else:
            raise SystemRefusedError(_LOCKED, file=folder.path)
        try:
            self._logged.append(folder)
            fs.write_all(fd, [line_of(run=self._facts(folder))], 0)
            if self.fsync:
                fs.sync(fd)
            fs.change_mode(fd, 0o644)
        finally:
            os.close(fd)

    def _facts(self, folder: Folder) -> dict[str, Any]:
        facts: dict[str, Any] = {"id": self.id or PREFIX + "0" * 12, "format": FORMAT, "pid": os.getpid(), "host": HOST}
        facts |= {"boot": boot(), "key": self.key, "files": self._names_to_log(folder)}
        if folder is not self.home:
            return facts | {"home": os.path.relpath(self.home.path / f"{self.id}.run", folder.path)}
        others = [one.path for one in self.folders[1:]]
        missing = self._targets.missing
        if missing:
            facts["missing"] = list(missing)
        if missing and not others:
            others.append(self.home.path.joinpath(*missing))
        return facts | {"folders": [os.path.relpath(other, folder.path) for other in others]}

    def _names_to_log(self, folder: Folder) -> list[str]:
        # Those in a folder that is yet to be made are no files of its parent.
        is_parent = bool(self._targets.missing) and folder is self.home
        return [] if is_parent else sorted(self._targets.names_in(folder))

    def _end(self) -> None:
        """Remove the second names of the log, its pointers, the log, and the lock at last."""
        if self._lock < 0:
            return
        with contextlib.ExitStack() as stack:
            for fd in (self._lock, self._log):
                if fd >= 0:
                    stack.callback(os.close, fd)
            logged, marked = self._logged, self._marked
            self._lock = self._log = -1
            self._logged, self._marked, self._size = [], [], 0
            if not self.is_left:
                self._clear(logged, marked)

    def _clear(self, logged: Sequence[Folder], marked: Sequence[tuple[Folder, str]]) -> None:
        home, log = self.home, f"{self.id}.run"
        others = [folder for folder in logged if folder is not home]
        gone = [remove(folder, marker) for folder, marker in marked] + [remove(folder, log) for folder in others]
        # No pointer may outlive the log, in a power cut either.
        gone += [_is_done(folder.sync) for folder in others if self.fsync]
        if all(gone) and (home not in logged or remove(home, log)):
            remove(home, lock_of(self.id))

    def _unmake(self) -> None:
        """Remove the folders that were made for the targets, if nothing came to be in them."""
        for outer, inner in reversed(list(itertools.pairwise([self.home, *self._targets.made]))):
            with contextlib.suppress(OSError):
                outer.unmake(inner.path.name)


class InDoubtError(OSError):
    """A step could neither be added to a log nor taken back."""


def append_step(fd: int, begin: int, *, fsync: bool, **entry: Any) -> int:
    """Add a step to a log that ends at byte `begin`, and have it on the disk, or take it back; the bytes it takes.

    Raises:
        OSError: it could not be added, and is not there.
        InDoubtError: it may be there or not.
    """
    line = line_of(**entry)
    try:
        count = fs.write_all(fd, [line], begin)
        if fsync:
            fs.sync(fd)
    except OSError as error:
        try:
            fs.resize(fd, begin)
            if fsync:
                fs.sync(fd)
        except OSError:
            raise InDoubtError(error.errno, error.strerror) from error
        raise
    return count


def remove(folder: Folder, name: str) -> bool:
    """Remove a file that is not needed any more, and say whether that is done; it is tried twice."""
    return _is_done(partial(folder.unlink, name))


def _is_done(call: Callable[[], None]) -> bool:
    for _ in range(2):
        with contextlib.suppress(OSError):
            call()
            return True
    return False


def remove_all(files: Sequence[File]) -> bool:
    """Remove files side by side, and say whether that is done.

    To give back what a large one holds takes the system as long as a pass over it.
    """
    threads, left = [], list(files)
    with contextlib.suppress(RuntimeError):  # No more threads are to be had.
        while len(left) > 1:
            threads.append(threading.Thread(target=remove, args=(left[-1].folder, left[-1].name)))
            threads[-1].start()
            left.pop()
    for file in left:
        remove(file.folder, file.name)
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    return not any(file.is_there for file in files)
