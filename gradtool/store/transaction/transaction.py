"""The transaction of a live run: its log, its lock, and the names of the files that it makes."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from typing import TYPE_CHECKING, Any, Self

from gradtool.errors import SystemRefusedError, os_errors_about
from gradtool.store import fs
from gradtool.store.system import boot_id
from gradtool.store.transaction.files import PREFIX, lock_of, log_of, marker_of, name_of, remove, succeeds
from gradtool.store.transaction.locks import create_locked
from gradtool.store.transaction.log import FINISHED, FORMAT, HOST, UNTOUCHED, line_of
from gradtool.store.transaction.logfiles import InDoubtError, append_step
from gradtool.wording import call, say

if TYPE_CHECKING:
    from gradtool.store.fs import Folder
    from gradtool.store.transaction.targets import Targets

_TRIES = 10
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
        # The folders that have our log or a pointer to it, and the log's markers.
        self._logged: list[Folder] = []
        self._marked: list[tuple[Folder, str]] = []
        self._lock = self._log = -1
        self._size = 0
        self._numbers = itertools.count()
        # Recovery needs the log to find the files that are left.
        self.leaves_files = False
        # Only recovery may go on.
        self.needs_recovery = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        fsync = self.fsync if fsync is None else fsync
        try:
            self._size += append_step(self._log, self._size, fsync=fsync, **entry)
        except InDoubtError:
            # Recovery is right whether the step is in the log or not, but nothing else may be done.
            self.leave_to_recovery()
            raise

    def add_markers(self) -> None:
        """Make a marker for each target in folders that not every user may list."""
        for folder, names in self.targets.names.items():
            classes = [(folder.mode >> shift) & (stat.S_IROTH | stat.S_IXOTH) for shift in (0, 3, 6)]
            if stat.S_IXOTH not in classes:
                continue
            for marker in map(marker_of, sorted(names)):
                with contextlib.suppress(OSError):  # A file system without links has no such permissions either.
                    folder.link(log_of(self.id), marker)
                    self._marked.append((folder, marker))

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
        if always or len(self.targets.folders) > 1 or self._marked:
            self.append(ended=FINISHED)

    def leave_to_recovery(self) -> None:
        """Do nothing more; a later run will recover this one."""
        self.leaves_files = self.needs_recovery = True

    def close(self) -> None:
        """Remove the log, its pointers first, and close the lock and all folders."""
        with contextlib.closing(self.targets):
            # A forked process has nothing to end.
            if os.getpid() == self._pid:
                self._end()
                self._unmake()

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
        self._logged.append(self.home)
        self._size = fs.write_all(fd, [line_of(run=self._facts(self.home))], 0)
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
            self._logged.append(folder)
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
        """Remove the log's markers, its pointers, the log, and last the lock."""
        if self._lock < 0:
            return
        try:
            if not self.leaves_files:
                self._clear()
        finally:
            opened = [fd for fd in (self._log, self._lock) if fd >= 0]
            self._lock = self._log = -1
            self._logged, self._marked, self._size = [], [], 0
            for fd in opened:
                os.close(fd)

    def _clear(self) -> None:
        home, log = self.home, log_of(self.id)
        others = [folder for folder in self._logged if folder is not home]
        gone = [remove(folder, marker) for folder, marker in self._marked] + [remove(folder, log) for folder in others]
        # In a power cut, no pointer may outlive the log.
        gone += [succeeds(folder.sync) for folder in others if self.fsync]
        if all(gone) and (home not in self._logged or remove(home, log)):
            remove(home, lock_of(self.id))

    def _unmake(self) -> None:
        """Remove the folders that were made for the targets, if they are empty."""
        for outer, inner in reversed(list(itertools.pairwise([self.home, *self.targets.made]))):
            with contextlib.suppress(OSError):
                outer.unmake(inner.path.name)
