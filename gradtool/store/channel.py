"""One worker thread's way to the files: reused memory, few open files, every byte and second counted."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from gradtool.errors import SystemRefusedError, from_os_error
from gradtool.store import system
from gradtool.store.header import Shard, changed_meanwhile, is_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gradtool.store.journal import Journal
    from gradtool.store.undo import Segment


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
        journal: Journal | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self.clock = Clock()
        self._max_files = max_files
        self._allocate = allocate
        self._journal = journal
        self._on_bytes = on_bytes
        self._segment: Segment | None = None
        # What was saved and is yet to be overwritten.
        self._saved: tuple[Path, int, int] | None = None
        self._memory: dict[str, memoryview] = {}
        # The least recently used first.
        self._open: OrderedDict[Shard | Path, int] = OrderedDict()

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

    def write(self, path: Path, begin: int, view: memoryview, parts: Sequence[tuple[int, int]] | None = None) -> None:
        """Write `view` into a file that is there, from byte `begin` on; of it only `parts`, where they are given.

        Raises:
            SystemRefusedError: writing failed.
        """
        began = perf_counter()
        fd = self._descriptor(path)
        if self._saves(path) and self._saved != (path, begin, len(view)):
            old = self.memory("undo", len(view))
            self._fill(path, fd, begin, old)
            self._save(path, begin, old)
        if self._segment is not None:
            self._segment.touch()
        for start, stop in [(0, len(view))] if parts is None else parts:
            try:
                self.clock.written_bytes += system.write_all(fd, [view[start:stop]], begin + start)
            except OSError as error:
                raise from_os_error(error, path) from error
        self.clock.write += perf_counter() - began

    def save(self, path: Path, begin: int, view: memoryview) -> None:
        """Tell what a file holds that will be overwritten next, so that it need not be read for the journal.

        Raises:
            SystemRefusedError: it could not be saved.
        """
        if self._saves(path):
            began = perf_counter()
            self._save(path, begin, view)
            self._saved = path, begin, len(view)
            self.clock.write += perf_counter() - began

    def _saves(self, path: Path) -> bool:
        return self._journal is not None and self._journal.number_of(path) is not None

    def _save(self, path: Path, begin: int, view: memoryview) -> None:
        if self._journal is not None and (number := self._journal.number_of(path)) is not None:
            self._segment = self._segment or self._journal.segment()
            self._segment.save(number, begin, view)

    def check(self) -> None:
        """Raise `SystemRefusedError` unless what was read was one state of each file."""
        for file, fd in self._open.items():
            self._check(file, fd)

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])
        if self._segment is not None:
            self._segment.close()
            self._segment = None

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

    def _descriptor(self, file: Shard | Path) -> int:
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
                    raise from_os_error(error, file.path if isinstance(file, Shard) else file) from error
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

    def _check(self, file: Shard | Path, fd: int) -> None:
        if not isinstance(file, Shard) or is_unchanged(fd, file.stat):
            return
        # What we change ourselves looks changed.
        if self._journal is None or not self._journal.is_ours(file.path, fd):
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

    def _open_destination(self, path: Path) -> int:
        if self._journal is None or not self._saves(path):
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        if not self._journal.is_ours(path, fd):
            os.close(fd)
            raise changed_meanwhile(path)
        return fd
