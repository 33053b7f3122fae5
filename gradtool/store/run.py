"""One writing run while it lives: the record that says so, and the names of the files that it makes."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtool.errors import from_os_error
from gradtool.store import system
from gradtool.store.header import changed_meanwhile
from gradtool.store.locks import lock
from gradtool.store.records import HOST, PREFIX, boot, file_of, line_of, records_in
from gradtool.store.signals import signals_deferred
from gradtool.store.undo import Heartbeat

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradtool.store.records import Record


class Run:
    """A run that will write the given targets: real paths, which need not be there yet.

    It registers in each folder in turn (see `locking.acquire`), the first being its home.
    """

    def __init__(self, targets: Iterable[Path], *, fsync: bool) -> None:
        self.id = PREFIX + os.urandom(6).hex()
        self.fsync = fsync
        # Whether what the files hold may have been changed while we waited.
        self.met_others = False
        self._names: dict[Path, set[str]] = {}
        for target in targets:
            self._names.setdefault(target.parent, set()).add(target.name)
        self.folders = sorted(self._names)
        self._place = {folder: number for number, folder in enumerate(self.folders)}
        self._records: list[Path] = []
        self._fd = -1
        self._size = 0
        self._numbers = itertools.count()
        # There is, or may be, something that only a record tells of; it stays if we do not come to clear that away.
        self.is_left = False
        # We cannot bring it to an end ourselves, and nothing more may be done.
        self.needs_recovery = False

    def names_in(self, folder: Path) -> set[str]:
        """The targets in a folder."""
        return self._names.get(folder, set())

    def require(self, target: Path) -> Path:
        """The real path of a target; raises `SystemRefusedError` where it is another than when we registered."""
        real = Path(os.path.realpath(target))
        if real.name not in self.names_in(real.parent):
            raise changed_meanwhile(target)
        return real

    def rival_in(self, folder: Path) -> Record | None:
        """The record of another run that is to write one of the targets too."""
        for record in records_in(folder):
            if record.run != self.id and record.names & self._names[folder]:
                return record
        return None

    def register(self, folder: Path) -> None:
        """Leave the record, or a pointer to it, in a folder; while that is held."""
        path = folder / f"{self.id}.run"
        facts: dict[str, Any] = {"pid": os.getpid(), "host": HOST, "files": sorted(self._names[folder])}
        facts["boot"] = boot()
        if self._records:
            facts["home"] = os.path.relpath(self._records[0], folder)
        else:
            facts["folders"] = [os.path.relpath(other, folder) for other in self.folders[1:]]
        fd = -1
        try:
            fd = system.create(path)
            self._records.append(path)
            # Whoever may come across the files is to know who works on them.
            system.change_mode(fd, 0o644)
            if len(self._records) == 1:
                self._fd = fd
                lock(fd)
            written = system.write_all(fd, [line_of(run=facts)], 0)
            if len(self._records) == 1:
                self._size = written
                # No pointer may outlive a power cut without what it points to.
                if self.fsync and len(self.folders) > 1:
                    system.sync(fd)
                    system.sync_path(folder)
        except OSError as error:
            raise from_os_error(error, folder / min(self._names[folder])) from error
        finally:
            if fd not in (-1, self._fd):
                os.close(fd)

    def place_of(self, folder: Path) -> int:
        """The number of a folder in the record; `KeyError` for one that the run is not registered in."""
        return self._place[folder]

    def new_file(self, folder: Path, kind: str) -> tuple[int, Path]:
        """A number and a name for a file that the run is about to make."""
        number = next(self._numbers)
        return number, self.file(folder, number, kind)

    def file(self, folder: Path, number: int, kind: str) -> Path:
        """The name of the file with a number."""
        return file_of(folder, self.id, number, kind)

    def append(self, **entry: Any) -> None:
        """Add a step to the record, and have it on the disk; where that fails it is not there."""
        try:
            self._size += append_step(self._fd, self._size, fsync=self.fsync, **entry)
        except InDoubtError:
            # Whether the step stands there or not, both are safe, as long as nothing else is done.
            self.leave_to_recovery()
            raise

    def end(self, **entry: Any) -> None:
        """Say that nothing is left but to clear away; where that takes several steps, for one takes none."""
        if len(self.folders) > 1:
            self.append(**entry)

    def leave_to_recovery(self) -> None:
        """Do nothing more: a later run will bring this one to its end."""
        self.is_left = self.needs_recovery = True

    def heartbeat(self) -> Heartbeat:
        """What is called before each write that puts something back."""
        return Heartbeat(self._fd, fsync=self.fsync)

    def sync(self) -> None:
        """Bring the record, its pointers and the names of all files made so far to the disk."""
        if not self.fsync:
            return
        for record in self._records:
            system.sync_path(record)
        for folder in self.folders:
            system.sync_path(folder)

    def sync_folders(self) -> None:
        """Bring the names in all folders to the disk."""
        for folder in self.folders if self.fsync else ():
            system.sync_path(folder)

    def close(self) -> None:
        """Remove the record, its pointers first, and give up the lock."""
        with signals_deferred():
            records, self._records = self._records, []
            # A pointer must not outlive what it points to.
            if not self.is_left and not [pointer for pointer in records[1:] if not remove(pointer)]:
                for pointer in records[1:] if self.fsync else ():
                    with contextlib.suppress(OSError):
                        system.sync_path(pointer.parent)
                for home in records[:1]:
                    remove(home)
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class InDoubtError(OSError):
    """A step could neither be added to a record nor taken back."""


def append_step(fd: int, begin: int, *, fsync: bool, **entry: Any) -> int:
    """Add a step to a record that ends at byte `begin`, and have it on the disk, or take it back; the bytes it takes.

    Raises:
        OSError: it could not be added, and is not there.
        InDoubtError: it may be there or not.
    """
    try:
        count = system.write_all(fd, [line_of(**entry)], begin)
        if fsync:
            system.sync(fd)
    except OSError as error:
        try:
            system.resize(fd, begin)
            if fsync:
                system.sync(fd)
        except OSError:
            raise InDoubtError(error.errno, error.strerror) from error
        raise
    return count


def remove(path: Path) -> bool:
    """Remove a file that nobody needs any more, and say whether that is done; it is tried twice."""
    for _ in range(2):
        with contextlib.suppress(OSError):
            system.unlink(path)
            return True
    return False


def remove_all(paths: Sequence[Path]) -> None:
    """Remove files side by side: to give back what a large one holds takes the system as long as a pass over it."""
    threads, left = [], list(paths)
    with contextlib.suppress(RuntimeError):  # No more threads are to be had.
        while len(left) > 1:
            threads.append(threading.Thread(target=remove, args=(left[-1],)))
            threads[-1].start()
            left.pop()
    for path in left:
        remove(path)
    for thread in threads:
        if thread.ident is not None:
            thread.join()
