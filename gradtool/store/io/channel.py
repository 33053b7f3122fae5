"""How a worker thread reads and writes files: with memory that is reused, few open files, and a clock."""

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
from gradtool.store.format.tensors import Shard
from gradtool.store.source import Reader, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradtool.store.fs import File

    # What a destination writes, whatever a pass does.
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
    # What a progress bar counts: the bytes that passes went over, read or not.
    done_bytes: int = 0
    # The threads that got any work.
    workers: int = 0

    @property
    def moved_bytes(self) -> int:
        """All bytes, read or written."""
        return self.read_bytes + self.written_bytes

    def each(self) -> Clock:
        """Return the seconds of a thread, on average; the threads themselves do not count."""
        count = max(1, self.workers)
        seconds = self.read / count, self.compute / count, self.write / count
        return Clock(*seconds, self.read_bytes, self.written_bytes, self.done_bytes)

    def add(self, clock: Clock) -> None:
        """Add the counts of another thread, or of another pass."""
        for name, count in vars(clock).items():
            setattr(self, name, getattr(self, name) + count)


class Channel:
    """Reads shards and writes files, for a thread, with at most `max_files` open at a time.

    Memory comes from `allocate`, and is used again. `on_bytes` is told of all bytes that are done. What opens, reads or
    writes a file raises `SystemRefusedError` if that fails, or the file changed since its header was read.
    """

    def __init__(
        self, max_files: int, allocate: Callable[[int], memoryview], on_bytes: Callable[[int], None] | None = None
    ) -> None:
        self.clock = Clock()
        self._on_bytes = on_bytes or (lambda _nbytes: None)
        self._max_files = max_files
        self._allocate = allocate
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
                try:
                    # A power of two, for sizes that differ a little.
                    memory = self._allocate(1 << max(12, (nbytes - 1).bit_length()))
                except OSError as error:
                    raise MemoryError from error
            yield memory[:nbytes]
        finally:
            self._memory[at] = memory

    def read(self, shard: Shard, begin: int, view: memoryview, *, counts: bool = True) -> None:
        """Fill `view` with the bytes of a shard from `begin` on; they count unless they are read again."""
        began = perf_counter()
        for file, at, part in shard.runs(begin, len(view)):
            fill(self._reader(file), at, view[part])
        seconds = perf_counter() - began
        if counts:
            self.record_read(len(view), seconds)
        else:
            self.clock.read += seconds

    def record_read(self, nbytes: int, seconds: float) -> None:
        """Count bytes that were read, and the seconds that it took to read them."""
        self.clock.read += seconds
        self.clock.read_bytes += nbytes
        self.record_done(nbytes)

    def record_done(self, nbytes: int) -> None:
        """Count bytes that a pass went over."""
        self.clock.done_bytes += nbytes
        self._on_bytes(nbytes)

    @contextlib.contextmanager
    def borrow_fd(self, shard: Shard) -> Iterator[int]:
        """Borrow the descriptor of a local file, to read it elsewhere and then report that to `record_read`."""
        began = perf_counter()
        fd = self._reader(shard).fileno
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

    def touch(self, shard: Shard) -> None:
        """Open a shard for `check` to examine, though nothing of it is read."""
        for file in shard.files:
            self._reader(file)

    def write(self, file: File, begin: int, parts: Sequence[bytes | memoryview], nbytes: int = 0) -> None:
        """Write parts one after another into a file, from byte `begin` on; `nbytes` of them count as results."""
        began = perf_counter()
        with os_errors_about(file.path):
            fs.write_all(self._reader(file).fileno, parts, begin)
        self.clock.write += perf_counter() - began
        self.clock.written_bytes += nbytes

    def check(self) -> None:
        """Raise `SystemRefusedError` if a file that is open changed while it was read."""
        for reader in self._open.values():
            self._check(reader)

    def close(self) -> None:
        """Close every file."""
        while self._open:
            self._open.popitem()[1].close()

    def _reader(self, file: Shard | File) -> Reader:
        """Return an open file; opening another closes the least recently used, if there are too many."""
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        if len(self._open) >= self._max_files:
            self._close_oldest()
        while True:
            try:
                if isinstance(file, Shard):
                    reader = file.source.open()
                else:
                    # Without a status, because its status changes.
                    reader = Reader(Source(str(file.path), 0), file.open(os.O_WRONLY))
                break
            except SystemRefusedError:
                raise
            except OSError as error:
                # The limit of the system may be lower than `max_files`.
                if error.errno != errno.EMFILE or not self._close_oldest():
                    raise from_os_error(error, file.name if isinstance(file, Shard) else file.path) from error
        try:
            self._check(reader)
        except SystemRefusedError:
            reader.close()
            raise
        self._open[file] = reader
        # A small file is read at once.
        if isinstance(file, Shard) and reader.fileno >= 0 and file.size > tuning.BLOCK_BYTES:
            system.read_in_order(reader.fileno)
        return reader

    def _close_oldest(self) -> bool:
        """Close the least recently used file, unless all are borrowed; return whether a file was closed."""
        file = next((file for file in self._open if file not in self._borrowed), None)
        if file is None:
            return False
        with contextlib.closing(self._open.pop(file)) as reader:
            self._check(reader)
        return True

    @staticmethod
    def _check(reader: Reader) -> None:
        if not reader.is_unchanged:
            raise changed_meanwhile(reader.source.name)


def fill(reader: Reader, begin: int, view: memoryview) -> None:
    """Fill `view` with the bytes of a source from `begin` on; `SystemRefusedError` if it has not so many."""
    try:
        count = reader.read_into(view, begin)
    except OSError as error:
        raise from_os_error(error, reader.source.name) from error
    if count < len(view):
        raise _shortened(reader.source.name)


def _shortened(name: str) -> SystemRefusedError:
    return SystemRefusedError("became shorter while it was read", file=name, hint="run the command again")
