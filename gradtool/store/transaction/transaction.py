"""The transaction of a live run: its log, its lock, and the names of the files that it makes."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from typing import TYPE_CHECKING, Any, Self

from gradtool.errors import GradtoolError, SystemRefusedError, call, changed_meanwhile, ensure, os_errors_about, say
from gradtool.store import fs
from gradtool.store.system import boot_id
from gradtool.store.transaction.files import PREFIX, clear, lock_of, log_of, marker_of, name_of
from gradtool.store.transaction.locks import create_locked, is_file_at
from gradtool.store.transaction.log import FINISHED, FORMAT, HOST, UNTOUCHED, line_of
from gradtool.store.transaction.logfiles import InDoubtError, append_step

if TYPE_CHECKING:
    from gradtool.store.fs import Folder
    from gradtool.store.transaction.log import Change, Move
    from gradtool.store.transaction.targets import Targets

_TRIES = 10
# What may be appended to a log whose last step is that of the key, unless the run is withdrawn.
_NEXT = {"run": "holds_locks", "holds_locks": "ready", "ready": "ended"}
_NOTE = say("{}, or the next run, makes the files all old or all new", call("recover"))
_LOCKED = "cannot lock a new file here: another process always locks it first"
# The longest numbers that a log has for a target.
_LONGEST = [10**5, 10**9, *[-(1 << 63)] * 4, 1 << 32]


class Transaction:
    """What a run registers before it writes its targets, which need not exist."""

    def __init__(self, targets: Targets, *, fsync: bool) -> None:
        self.fsync = fsync
        self.id = ""
        # The files may have changed while we waited for other runs.
        self.may_be_stale = False
        self.targets = targets
        self._pid = os.getpid()
        self._lock = self._log = -1
        self._size, self.step = 0, "run"
        self._numbers = itertools.count()
        # Only recovery may go on.
        self.needs_recovery = False
        # Whether something could not be removed at the end.
        self.leaves_files = False
        self._has_markers = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()
        if error is not None and self.leaves_files:
            error.add_note(_NOTE)
        if isinstance(error, GradtoolError) and self.needs_recovery:
            problem, hint = error.problems[0], self.hint_to_recover
            if problem.hint != hint:
                what, file, tensor = problem.message, problem.file, problem.tensor
                raise SystemRefusedError(what, file=file, tensor=tensor, code="unfinished", hint=hint) from error

    @property
    def home(self) -> Folder:
        """The folder with the log."""
        return next(iter(self.targets.names))

    @property
    def hint_to_recover(self) -> str:
        """Say how to complete this run, once it has ended."""
        return say("run {}", call("recover", str(self.home.path)))

    def register(self) -> None:
        """Write the log to the home, and a pointer to it to every other folder."""
        self._check_log_size()
        for folder in self.targets.folders:
            # Otherwise, this run could not see others, nor remove what it has made.
            with os_errors_about(folder.path):
                folder.require_listing()
        with os_errors_about(self.home.path):
            self._lock_home()
            self._write_log()
            self.targets.make_missing()
        for folder in self.targets.made if self.fsync else ():
            with os_errors_about(folder.path):
                folder.sync()
        for folder in self.targets.folders[1:]:
            with os_errors_about(folder.path):
                self._point_home(folder)

    def withdraw(self) -> None:
        """Undo `register`, so that others can go first."""
        if self._size:
            # Removing all pointers may take a while; others need not wait for that.
            with contextlib.suppress(OSError):
                append_step(self._log, self._size, fsync=False, ended=UNTOUCHED)
        self._end()

    def new_name(self, kind: str) -> tuple[int, str]:
        """A number and a name for a file that the run is about to make."""
        number = next(self._numbers)
        return number, name_of(self.id, number, kind)

    def append(self, *, fsync: bool | None = None, **entry: Any) -> None:
        """Append a step to the log and sync it; if that fails, it is not in the log."""
        (step,) = entry
        ensure(_NEXT.get(self.step) == step, f"{step!r} would be logged after {self.step!r}")
        fsync = self.fsync if fsync is None else fsync
        try:
            self._size += append_step(self._log, self._size, fsync=fsync, **entry)
        except InDoubtError:
            # Recovery is right whether the step is in the log or not, but nothing else may be done.
            self.leave_to_recovery()
            raise
        self.step = step

    def check_ready(self, steps: list[Change | Move]) -> None:
        """Raise an error where recovery would refuse to do the steps, or another run may take this one for dead."""
        named, listed = [(step.folder, step.name) for step in steps], enumerate(self.targets.names.values())
        ensure(len(set(named)) == len(named), "a file would be written twice")
        ensure({*named} <= {(folder, name) for folder, names in listed for name in names}, "the log lacks a file")
        if not is_file_at(self._lock, self.home, lock_of(self.id)):
            raise changed_meanwhile(self.home.path / lock_of(self.id))

    def add_markers(self) -> None:
        """Make a marker for each target in folders that not every user may list."""
        for folder, names in self.targets.names.items():
            classes = [(folder.mode >> shift) & (stat.S_IROTH | stat.S_IXOTH) for shift in (0, 3, 6)]
            if stat.S_IXOTH not in classes:
                continue
            for marker in map(marker_of, sorted(names)):
                with contextlib.suppress(OSError):  # A file system without links has no such permissions either.
                    folder.link(log_of(self.id), marker)
                    self._has_markers = True

    def sync(self) -> None:
        """Sync the log, its pointers, and the names of all files made so far."""
        if self.fsync:
            fs.sync(self._log)
            self.sync_folders()

    def sync_folders(self) -> None:
        """Sync the names in all folders."""
        for folder in self.targets.folders if self.fsync else ():
            folder.sync()

    def end(self, *, always: bool) -> None:
        """Log that all files are new and only the clean-up is left; unless `always`, not if that is just the log."""
        if always or len(self.targets.folders) > 1 or self._has_markers:
            self.append(ended=FINISHED)

    def leave_to_recovery(self) -> None:
        """Do nothing more; a later run will recover this one."""
        self.needs_recovery = True

    def close(self) -> None:
        """Remove the log, its pointers first, and close the lock and all folders."""
        with contextlib.closing(self.targets):
            # A forked process has nothing to end.
            if os.getpid() == self._pid:
                self._end()

    def _check_log_size(self) -> None:
        """Raise `BadInputError` now for a log that would become too large later."""
        file = self.home.path
        moves = []
        for folder, names in self.targets.planned.items():
            file = folder.path / min(names, default="")
            line_of(file, run=self._facts(folder))
            moves += [[name, *_LONGEST] for name in names]
        line_of(file, ready=[moves, [], None])

    def _lock_home(self) -> None:
        for _ in range(_TRIES):
            self.id = PREFIX + os.urandom(6).hex()
            fd = create_locked(self.home, lock_of(self.id))
            if fd is not None:
                self._lock = fd
                return
        raise SystemRefusedError(_LOCKED, file=self.home.path)

    def _write_log(self) -> None:
        fd = self._log = self.home.create(log_of(self.id))
        self._size, self.step = fs.write_all(fd, [line_of(run=self._facts(self.home))], 0), "run"
        # Other users must be able to read it; but not while it is empty, or they could lock it.
        fs.change_mode(fd, 0o644)
        # In a power cut, no pointer may outlive what it points to.
        if self.fsync and (len(self.targets.folders) > 1 or self.targets.missing):
            fs.sync(fd)
            self.home.sync()

    def _point_home(self, folder: Folder) -> None:
        name = log_of(self.id)
        for _ in range(_TRIES):
            fd = create_locked(folder, name)
            if fd is not None:
                break
            folder.unlink(name)
        else:
            raise SystemRefusedError(_LOCKED, file=folder.path)
        with fs.closing(fd):
            fs.write_all(fd, [line_of(run=self._facts(folder))], 0)
            if self.fsync:
                fs.sync(fd)
            fs.change_mode(fd, 0o644)

    def _facts(self, folder: Folder) -> dict[str, Any]:
        missing = self.targets.missing
        names = sorted(self.targets.names[folder])
        facts: dict[str, Any] = {"id": self.id or PREFIX + "0" * 12, "format": FORMAT, "pid": os.getpid(), "host": HOST}
        facts |= {"boot": boot_id(), "files": names}
        if folder is not self.home:
            return facts | {"home": os.path.relpath(self.home.path / log_of(self.id), folder.path)}
        others = [one.path for one in self.targets.folders[1:]]
        if missing:
            facts["missing"] = list(missing)
            others += [] if self.targets.made else [self.home.path.joinpath(*missing)]
        return facts | {"folders": [os.path.relpath(other, folder.path) for other in others]}

    def _end(self) -> None:
        """Remove whatever the run has made, unless recovery needs it, and unlock."""
        if self._lock < 0:
            return
        try:
            self.leaves_files = self.needs_recovery or not any(self._clears() for _ in range(2))
        finally:
            opened = [fd for fd in (self._log, self._lock) if fd >= 0]
            self._lock = self._log = -1
            self._size = 0
            for fd in opened:
                os.close(fd)

    def _clears(self) -> bool:
        """Remove whatever the run has made; whether that succeeded."""
        with contextlib.suppress(OSError):
            clear(self.id, self.targets.names, self.targets.missing, fsync=self.fsync)
            return True
        return False
