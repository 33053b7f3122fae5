"""The transaction of a live run: its log, its lock, and the names of the files that it makes."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from gradtool.errors import GradtoolError, SystemRefusedError, call, changed_meanwhile, ensure, os_errors_about, say
from gradtool.store import fs
from gradtool.store.fs import PREFIX, Folder, open_folder
from gradtool.store.system import boot_id
from gradtool.store.transaction.locks import create_locked, is_file_at
from gradtool.store.transaction.log import (
    FINISHED,
    FORMAT,
    HOST,
    UNTOUCHED,
    InDoubtError,
    append_step,
    encode_step,
    files_by_run,
    marker_name,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from gradtool.store.transaction.log import Change, Move
    from gradtool.store.transaction.targets import Targets

_TRIES_TO_LOCK = 10
# What may be appended to a log whose last step is that of the key, unless the run is withdrawn.
_NEXT = {"run": "holds_locks", "holds_locks": "ready", "ready": "ended"}
_NOTE = say("{}, or the next run, makes the files all old or all new", call("recover"))
_LOCKED = "cannot lock a new file here: another process always locks it first"
# The longest numbers that a log has for a target.
_LONGEST = [10**5, 10**9, *[-(1 << 63)] * 4, 1 << 32]


class Transaction:
    """A run, which registers its targets before it writes them; they need not exist. Its log is in `log_folder`."""

    def __init__(self, targets: Targets, *, fsync: bool) -> None:
        self.targets, self.fsync = targets, fsync
        self.log_folder = next(iter(targets.names))
        self.id = ""
        # The files may have changed while we waited for other runs.
        self.may_be_stale = False
        self._pid = os.getpid()
        self._lock = self._log = -1
        self._size, self.step = 0, "run"
        self._numbers = itertools.count()
        # Only recovery may go on: a later run will recover this run.
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
            problem = replace(error.problems[0], code="unfinished", hint=self.hint_to_recover)
            if problem.hint != error.problems[0].hint:
                raise SystemRefusedError.from_problems([problem]) from error

    @property
    def hint_to_recover(self) -> str:
        """A hint that says how to complete this run, once it has ended."""
        return say("run {}", call("recover", str(self.log_folder.path)))

    def register(self) -> None:
        """Write the log, and a pointer to it in every other folder; raise `BadInputError` if it would be too large."""
        # Better now than when the run is ready.
        located = self.targets.located
        path = next(reversed(located), self.log_folder.path)
        encode_step(path, ready=[[[name, *_LONGEST] for _, name in located.values()], [], None])
        for folder in self.targets.names:
            # Otherwise, this run could not see others, nor remove what it has made.
            with os_errors_about(folder.path):
                folder.names()
        with os_errors_about(self.log_folder.path):
            self._create_log()
            self.targets.make_missing()
        for folder in self.targets.made if self.fsync else ():
            with os_errors_about(folder.path):
                folder.sync()
        for folder in [*self.targets.names][1:]:
            with os_errors_about(folder.path):
                self._create_pointer(folder)

    def withdraw(self) -> None:
        """Undo `register`, so that another run can go first."""
        if self._size:
            # Removing all pointers may take a while; no other run need wait for that.
            with contextlib.suppress(OSError):
                append_step(self._log, self._size, fsync=False, ended=UNTOUCHED)
        self._end()
        self.targets.forget_made()

    def new_name(self, kind: str) -> tuple[int, str]:
        """Return a number and a name for a file that the run is about to make."""
        number = next(self._numbers)
        return number, f"{self.id}-{number}.{kind}"

    def append(self, *, fsync: bool | None = None, **entry: Any) -> None:
        """Append a step to the log and sync it; if that fails, it is not in the log."""
        (step,) = entry
        ensure(_NEXT.get(self.step) == step, f"{step!r} would be logged after {self.step!r}")
        fsync = self.fsync if fsync is None else fsync
        try:
            self._size += append_step(self._log, self._size, fsync=fsync, **entry)
        except InDoubtError:
            # Recovery is right whether the step is in the log or not, but nothing else may be done.
            self.needs_recovery = True
            raise
        self.step = step

    def check_ready(self, steps: list[Change | Move]) -> None:
        """Raise an error where recovery would refuse to do the steps, or another run may take this run for dead."""
        files = [(step.folder, step.name) for step in steps]
        targets = {(number, name) for number, names in enumerate(self.targets.names.values()) for name in names}
        ensure(len(set(files)) == len(files), "a file would be written twice")
        ensure({*files} <= targets, "the log lacks a file")
        lock = f"{self.id}.lock"
        if not is_file_at(self._lock, self.log_folder, lock):
            raise changed_meanwhile(self.log_folder.path / lock)

    def publish(self) -> None:
        """Make a marker for each target in folders that not every user may list, and sync all that was made so far."""
        for folder, names in self.targets.names.items():
            classes = [(folder.mode >> shift) & (stat.S_IROTH | stat.S_IXOTH) for shift in (0, 3, 6)]
            if stat.S_IXOTH not in classes:
                continue
            for marker in map(marker_name, sorted(names)):
                with contextlib.suppress(OSError):  # A file system without links has no such permissions either.
                    folder.link(f"{self.id}.run", marker)
                    self._has_markers = True
        if self.fsync:
            fs.sync(self._log)
            self.sync_folders()

    def sync_folders(self) -> None:
        """Sync the names in all folders."""
        for folder in self.targets.names if self.fsync else ():
            folder.sync()

    def end(self, *, always: bool) -> None:
        """Log that all files are new and only the clean-up is left; unless `always`, not if that is just the log."""
        if always or len(self.targets.names) > 1 or self._has_markers:
            self.append(ended=FINISHED)

    def close(self) -> None:
        """Remove the log, its pointers first, and close the lock and all folders."""
        with contextlib.closing(self.targets):
            # A forked process has nothing to end.
            if os.getpid() == self._pid:
                self._end()

    def _create_log(self) -> None:
        for _ in range(_TRIES_TO_LOCK):
            self.id = PREFIX + os.urandom(6).hex()
            lock = create_locked(self.log_folder, f"{self.id}.lock")
            if lock is not None:
                self._lock = lock
                break
        else:
            raise SystemRefusedError(_LOCKED, file=self.log_folder.path)
        fd, _ = self.log_folder.create(f"{self.id}.run")
        self._log = fd
        first = encode_step(self.log_folder.path, run=self._run_entry(self.log_folder))
        self._size, self.step = fs.write_all(fd, [first], 0), "run"
        # Other users must be able to read it; but not while it is empty, or they could lock it.
        fs.change_mode(fd, 0o644)
        # In a power cut, no pointer may outlive what it points to.
        if self.fsync and (len(self.targets.names) > 1 or self.targets.missing):
            fs.sync(fd)
            self.log_folder.sync()

    def _create_pointer(self, folder: Folder) -> None:
        name = f"{self.id}.run"
        for _ in range(_TRIES_TO_LOCK):
            fd = create_locked(folder, name)
            if fd is not None:
                break
            folder.unlink(name)
        else:
            raise SystemRefusedError(_LOCKED, file=folder.path)
        with fs.closing(fd):
            fs.write_all(fd, [encode_step(folder.path, run=self._run_entry(folder))], 0)
            if self.fsync:
                fs.sync(fd)
            fs.change_mode(fd, 0o644)

    def _run_entry(self, folder: Folder) -> dict[str, Any]:
        """Return the first step of the log, or of the pointer in a folder."""
        entry: dict[str, Any] = {"id": self.id, "format": FORMAT, "pid": os.getpid(), "host": HOST}
        entry |= {"boot": boot_id(), "files": sorted(self.targets.names[folder])}
        if folder is not self.log_folder:
            return entry | {"home": os.path.relpath(self.log_folder.path / f"{self.id}.run", folder.path)}
        paths = [folder.path for folder in [*self.targets.names][1:]]
        if missing := self.targets.missing:
            entry["missing"] = list(missing)
            paths += [] if self.targets.made else [self.log_folder.path.joinpath(*missing)]
        return entry | {"folders": [os.path.relpath(path, self.log_folder.path) for path in paths]}

    def _end(self) -> None:
        """Remove whatever the run has made, unless recovery needs it, and unlock."""
        if self._lock < 0:
            return
        try:
            self.leaves_files = True
            for _ in range(0 if self.needs_recovery else 2):
                with contextlib.suppress(OSError):
                    clear(self.id, self.targets.names, self.targets.missing, fsync=self.fsync)
                    self.leaves_files = False
                    break
        finally:
            opened = [fd for fd in (self._log, self._lock) if fd >= 0]
            self._lock = self._log = -1
            self._size = 0
            for fd in opened:
                os.close(fd)


def clear(run: str, targets: Mapping[Folder, Collection[str]], missing: Sequence[str], *, fsync: bool) -> None:
    """Remove whatever a run has made in its folders, of which the first is its log folder: its log and its lock last.

    Each folder comes with the names of the targets there. `missing` are the folders that the run made in its log
    folder; they are removed if they are empty. May be interrupted and repeated.
    """
    log, (log_folder, *other_folders) = f"{run}.run", targets
    for folder, names in targets.items():
        _remove_files(folder, run)
        status = folder.status(log)
        for marker in map(marker_name, sorted(names)):
            marked = folder.status(marker)
            if status is not None and marked is not None and os.path.samestat(status, marked):
                folder.unlink(marker)
    for folder in other_folders:
        folder.unlink(log)
        # In a power cut, no pointer may outlive the log.
        if fsync:
            folder.sync()
    for count in range(len(missing), 0, -1):
        _remove_folder(log_folder, missing[:count])
    log_folder.unlink(log)
    log_folder.unlink(f"{run}.lock")


def _remove_files(folder: Folder, run: str) -> None:
    """Remove the temporaries and the redo log of a run; folders and files that only others may remove stay."""
    for name in files_by_run(folder).get(run, ()):
        status = None if name.endswith((".run", ".lock")) else folder.status(name)
        if status is None or stat.S_ISDIR(status.st_mode):
            continue
        try:
            folder.unlink(name)
        except PermissionError:
            if status.st_uid == os.geteuid():
                raise


def _remove_folder(log_folder: Folder, names: Sequence[str]) -> None:
    with contextlib.ExitStack() as stack:
        above = log_folder
        for name in names[:-1]:
            try:
                above = stack.enter_context(Folder(above.path / name, open_folder(name, above.fd)))
            except OSError:
                return
        above.remove_folder(names[-1])
