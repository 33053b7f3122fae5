"""One worker thread's way to the files: reused memory, few open files, every byte and second counted."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from gradtool.errors import SystemRefusedError, changed_meanwhile, from_os_error
from gradtool.store import fs
from gradtool.store.format.header import Shard, is_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gradtool.store.fs import File
    from gradtool.store.transaction.inplace import InPlace
    from gradtool.store.transaction.undolog import UndoLog


@dataclass
class Clock:
    """Seconds, summed over the threads, and the bytes that were moved in them."""

    read: float = 0.0
    compute: float = 0.0
    write: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    # The threads that got any work.
    workers: int = 0

    def add(self, other: Clock) -> None:
        """Add another thread's, or another pass's, figures."""
        self.read += other.read
        self.compute += other.compute
        self.write += other.write
        self.read_bytes += other.read_bytes
        self.written_bytes += other.written_bytes
        self.workers += other.workers


class Channel:
    """Reads shards and writes files, for one thread. At most `max_files` are open at a time, however many take part.

    Memory is taken from `allocate`. What is written to a file that the `journal` knows is saved there first.
    """

    def __init__(
        self,
        max_files: int,
        allocate: Callable[[int], memoryview],
        journal: InPlace | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self.clock = Clock()
        self._max_files = max_files
        self._allocate = allocate
        self._journal = journal
        self._on_bytes = on_bytes
        self._undo_log: UndoLog | None = None
        self._memory: dict[str, memoryview] = {}
        # The least recently used first.
        self._open: OrderedDict[Shard | File, int] = OrderedDict()

    def memory(self, use: str, nbytes: int) -> memoryview:
        """`nbytes` of memory, the same for the same use until more is asked for; what is in it is left from before."""
        kept = self._memory.get(use)
        if kept is None or len(kept) < nbytes:
            try:
                # A power of two, for sizes that differ a little.
                kept = self._memory[use] = self._allocate(1 << max(12, (nbytes - 1).bit_length()))
            except OSError as error:
                raise MemoryError from error
        return kept[:nbytes]

    def read(self, shard: Shard, begin: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a shard from `begin` on.

        Raises:
            SystemRefusedError: reading failed, or the file changed since its header was read.
        """
        began = perf_counter()
        self._fill(shard.path, self._descriptor(shard), begin, view)
        self.clock.read += perf_counter() - began
        self.clock.read_bytes += len(view)
        self.count(len(view))

    def touch(self, shard: Shard) -> None:
        """See to it that `check` looks at a shard of which nothing need be read.

        Raises:
            SystemRefusedError: the file changed since its header was read.
        """
        self._descriptor(shard)

    def count(self, nbytes: int) -> None:
        """Tell of bytes that are done with, because they were read, or need not be."""
        if self._on_bytes is not None:
            self._on_bytes(nbytes)

    def write(self, file: File, begin: int, view: memoryview, parts: Sequence[tuple[int, int]] | None = None) -> None:
        """Write `view` into a file that is there, from byte `begin` on; of it only `parts`, where they are given.

        Raises:
            SystemRefusedError: writing failed, or what is overwritten in place could not be saved.
        """
        began = perf_counter()
        fd = self._descriptor(file)
        number = None if self._journal is None else self._journal.number_of(file)
        if self._journal is not None and number is not None:
            old = self.memory("undo", len(view))
            self._fill(file.path, fd, begin, old)
            self._undo_log = self._undo_log or self._journal.undo_log()
            self._undo_log.save(number, begin, old, view)
        for start, stop in [(0, len(view))] if parts is None else parts:
            try:
                self.clock.written_bytes += fs.write_all(fd, [view[start:stop]], begin + start)
            except OSError as error:
                raise from_os_error(error, file.path) from error
        self.clock.write += perf_counter() - began

    def check(self) -> None:
        """Raise `SystemRefusedError` unless what was read was one state of each file."""
        for file, fd in self._open.items():
            self._check(file, fd)

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])
        if self._undo_log is not None:
            self._undo_log.close()
            self._undo_log = None

    @staticmethod
    def _fill(path: Path, fd: int, begin: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(fd, [view[done:]], begin + done)
            except OSError as error:
                raise from_os_error(error, path) from error
            if not count:
                raise SystemRefusedError("became shorter while it was read; run again", file=path)
            done += count

    def _descriptor(self, file: Shard | File) -> int:
        fd = self._open.get(file)
        if fd is not None:
            self._open.move_to_end(file)
            return fd
        if len(self._open) >= self._max_files:
            self._close_oldest()
        while True:
            try:
                fd = self._open_source(file) if isinstance(file, Shard) else self._open_destination(file)
            except SystemRefusedError:
                raise
            except OSError as error:
                # The limit of the system may be lower than ours.
                if error.errno != errno.EMFILE or not self._open:
                    raise from_os_error(error, file.path) from error
                self._close_oldest()
            else:
                self._open[file] = fd
                return fd

    def _close_oldest(self) -> None:
        file, fd = self._open.popitem(last=False)
        try:
            self._check(file, fd)
        finally:
            os.close(fd)

    def _check(self, file: Shard | File, fd: int) -> None:
        if not isinstance(file, Shard) or is_unchanged(fd, file.stat):
            return
        # What we change ourselves looks changed.
        if self._journal is None or not self._journal.is_ours(fd):
            raise changed_meanwhile(file.path)

    def _open_source(self, shard: Shard) -> int:
        fd = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._check(shard, fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _open_destination(self, file: File) -> int:
        if self._journal is None or self._journal.number_of(file) is None:
            return file.open(os.O_WRONLY)
        fd = file.open(os.O_RDWR)
        if not self._journal.is_ours(fd):
            os.close(fd)
            raise changed_meanwhile(file.path)
        return fd
