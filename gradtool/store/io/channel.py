"""How one worker thread reads and writes files: reused memory, few open files, every byte and second counted."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import OrderedDict
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from gradtool import tuning
from gradtool.errors import SystemRefusedError, changed_meanwhile, from_os_error, os_errors_about
from gradtool.store import fs, system
from gradtool.store.format.header import Shard
from gradtool.store.source import Reader, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradtool.store.fs import File
    from gradtool.store.transaction.inplace import InPlace
    from gradtool.store.transaction.undolog import UndoLog

    # What a destination writes whatever a pass does.
    Task = Callable[["Channel"], None]


# Writable, as all memory is.
_NOTHING = memoryview(bytearray())


@dataclass(eq=False, repr=False)
class Clock:
    """Seconds, summed over the threads, and the bytes that were moved in them."""

    read: float = 0.0
    compute: float = 0.0
    write: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    # The threads that got any work.
    workers: int = 0

    @property
    def moved_bytes(self) -> int:
        """All bytes, read or written."""
        return self.read_bytes + self.written_bytes

    def each(self) -> Clock:
        """The seconds of one thread, on average; the threads themselves do not count."""
        count = max(1, self.workers)
        seconds = self.read / count, self.compute / count, self.write / count
        return Clock(*seconds, self.read_bytes, self.written_bytes)

    def add(self, other: Clock) -> None:
        """Add the figures of another thread, or of another pass."""
        self.read += other.read
        self.compute += other.compute
        self.write += other.write
        self.read_bytes += other.read_bytes
        self.written_bytes += other.written_bytes
        self.workers += other.workers


class Channel:
    """Reads shards and writes files, for one thread, with at most `max_files` open at a time.

    Memory comes from `allocate`, and is used again. `in_place` is the transaction whose files are overwritten, if there
    is one.
    """

    def __init__(
        self,
        max_files: int,
        allocate: Callable[[int], memoryview],
        in_place: InPlace | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self.clock = Clock()
        self._max_files = max_files
        self._allocate = allocate
        self._in_place = in_place
        self._on_bytes = on_bytes
        self._undo_log: UndoLog | None = None
        # None while a `with` block owns it. Tasks ask in the same order, so that each gets what it had the last time.
        self._memory: list[memoryview | None] = []
        # The least recently used first.
        self._open: OrderedDict[Shard | File, Reader] = OrderedDict()
        self._borrowed: list[Shard] = []

    @contextlib.contextmanager
    def memory(self, nbytes: int) -> Iterator[memoryview]:
        """Own `nbytes` of memory, which is not cleared, for the length of a `with` block; others own it afterwards."""
        at = next((at for at, free in enumerate(self._memory) if free is not None), len(self._memory))
        if at == len(self._memory):
            self._memory.append(_NOTHING)
        memory, self._memory[at] = self._memory[at] or _NOTHING, None
        try:
            if len(memory) < nbytes:
                memory = _NOTHING
                memory = self._allocated(nbytes)
            yield memory[:nbytes]
        finally:
            self._memory[at] = memory

    def _allocated(self, nbytes: int) -> memoryview:
        try:
            # A power of two, for sizes that differ a little.
            return self._allocate(1 << max(12, (nbytes - 1).bit_length()))
        except OSError as error:
            raise MemoryError from error

    def read(self, shard: Shard, begin: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a shard from `begin` on.

        Raises:
            SystemRefusedError: reading failed, or the file changed since its header was read.
        """
        began = perf_counter()
        for file, at, part in shard.runs(begin, len(view)):
            self._fill(self._reader(file), at, view[part])
        self.record_read(len(view), perf_counter() - began)

    @contextlib.contextmanager
    def borrow_fd(self, shard: Shard) -> Iterator[int]:
        """Borrow the descriptor of a shard, a local file, to read it elsewhere and then report that to `record_read`.

        Raises:
            SystemRefusedError: reading failed, or the file changed since its header was read.
        """
        began = perf_counter()
        fd = self._descriptor(shard)
        self.clock.read += perf_counter() - began
        self._borrowed.append(shard)
        try:
            yield fd
        except EOFError as error:
            raise _shortened(shard.name) from error
        except OSError as error:
            raise from_os_error(error, shard.name) from error
        finally:
            self._borrowed.remove(shard)

    def record_read(self, nbytes: int, seconds: float) -> None:
        """Count bytes that were read, and the seconds that it took to read them."""
        self.clock.read += seconds
        self.clock.read_bytes += nbytes
        self.count(nbytes)

    def touch(self, shard: Shard) -> None:
        """Have `check` look at a shard, though nothing of it is read.

        Raises:
            SystemRefusedError: the file changed since its header was read.
        """
        for file in shard.files:
            self._reader(file)

    def count(self, nbytes: int) -> None:
        """Count bytes as processed."""
        if self._on_bytes is not None:
            self._on_bytes(nbytes)

    def write(self, file: File, begin: int, view: memoryview) -> None:
        """Write `view` into a new file, from byte `begin` on.

        Raises:
            SystemRefusedError: writing failed.
        """
        began = perf_counter()
        with os_errors_about(file.path):
            self.clock.written_bytes += fs.write_all(self._descriptor(file), [view], begin)
        self.clock.write += perf_counter() - began

    def keep(self, file: File, begin: int, view: memoryview, in_place: InPlace) -> None:
        """Save `view`, which was read from byte `begin` of a file on: to overwrite it, it need not be read again.

        Raises:
            SystemRefusedError: it could not be saved.
        """
        began = perf_counter()
        self._undo_log = self._undo_log or in_place.undo_log()
        self._undo_log.keep(in_place.number_of(file), begin, view)
        self.clock.write += perf_counter() - began

    def overwrite(
        self, file: File, begin: int, view: memoryview, parts: Sequence[tuple[int, int]], in_place: InPlace
    ) -> None:
        """Overwrite the given parts of `view`, which lies at byte `begin` of the file; the old content is saved first.

        Raises:
            SystemRefusedError: the old content could not be saved, or writing failed.
        """
        began = perf_counter()
        fd, number = self._descriptor(file), in_place.number_of(file)
        log = self._undo_log = self._undo_log or in_place.undo_log()
        if not log.has_kept(number, begin, len(view)):
            with self.memory(len(view)) as old:
                self._fill(self._reader(file), begin, old)
                log.keep(number, begin, old)
        log.seal(view)
        with os_errors_about(file.path):
            for start, stop in parts:
                self.clock.written_bytes += fs.write_all(fd, [view[start:stop]], begin + start)
        self.clock.write += perf_counter() - began

    def check(self) -> None:
        """Raise `SystemRefusedError` if a file that is open changed while it was read."""
        for reader in self._open.values():
            self._check(reader)

    def close(self) -> None:
        """Close every file."""
        while self._open:
            self._open.popitem()[1].close()
        if self._undo_log is not None:
            self._undo_log.close()
            self._undo_log = None

    @staticmethod
    def _fill(reader: Reader, begin: int, view: memoryview) -> None:
        try:
            count = reader.read_into(view, begin)
        except OSError as error:
            raise from_os_error(error, reader.source.name) from error
        if count < len(view):
            raise _shortened(reader.source.name)

    def _descriptor(self, file: Shard | File) -> int:
        return self._reader(file).fileno

    def _reader(self, file: Shard | File) -> Reader:
        reader = self._open.get(file)
        if reader is not None:
            self._open.move_to_end(file)
            return reader
        if len(self._open) >= self._max_files:
            self._close_oldest()
        while True:
            try:
                reader = self._open_source(file) if isinstance(file, Shard) else self._open_destination(file)
            except SystemRefusedError:
                raise
            except OSError as error:
                # The limit of the system may be lower than ours.
                if error.errno != errno.EMFILE or not self._close_oldest():
                    raise from_os_error(error, file.name if isinstance(file, Shard) else file.path) from error
            else:
                self._open[file] = reader
                return reader

    def _close_oldest(self) -> bool:
        """Close the file that was not used for longest, unless all are borrowed; whether one was closed."""
        file = next((file for file in self._open if file not in self._borrowed), None)
        if file is None:
            return False
        with contextlib.closing(self._open.pop(file)) as reader:
            self._check(reader)
        return True

    def _check(self, reader: Reader) -> None:
        if reader.is_unchanged:
            return
        # A file that this run overwrites has changed, of course.
        if self._in_place is None or not self._in_place.is_ours(reader.fileno):
            raise changed_meanwhile(reader.source.name)

    def _open_source(self, shard: Shard) -> Reader:
        reader = shard.source.open()
        try:
            self._check(reader)
            # A small file is read at once.
            if reader.fileno >= 0 and shard.size > tuning.BLOCK_BYTES:
                system.read_in_order(reader.fileno)
        except BaseException:
            reader.close()
            raise
        return reader

    def _open_destination(self, file: File) -> Reader:
        # Without a status that it would have to keep.
        written = Source(str(file.path), 0)
        if self._in_place is None:
            return Reader(written, file.open(os.O_WRONLY))
        fd = file.open(os.O_RDWR)
        if not self._in_place.is_ours(fd):
            os.close(fd)
            raise changed_meanwhile(file.path)
        return Reader(written, fd)


def _shortened(name: str) -> SystemRefusedError:
    return SystemRefusedError("became shorter while it was read", file=name, hint="run the command again")
