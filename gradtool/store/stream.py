"""Blocks in and out: stretches of files, read and rewritten by worker threads that each reuse one buffer.

A pass reads contiguous ranges that span tensors, with large `preadv` and `pwrite` calls. Those calls and the arithmetic
release the interpreter lock, so that threads really run side by side.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from gradtool.errors import SystemRefusedError, from_os_error
from gradtool.store import blocks
from gradtool.store.header import Shard, changed_meanwhile, is_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from gradtool.store.blocks import Block

# Each thread takes a block's memory and more; past this many, the interpreter lock eats the gain.
MAX_DEFAULT_THREADS = 16


@dataclass
class Clock:
    """Seconds, summed over the threads."""

    read: float = 0.0
    compute: float = 0.0
    write: float = 0.0
    # The threads that got any work.
    workers: int = 0

    def add(self, other: Clock) -> None:
        """Add another thread's, or another pass's, seconds."""
        self.read += other.read
        self.compute += other.compute
        self.write += other.write
        self.workers += other.workers


def default_threads() -> int:
    """One thread for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_DEFAULT_THREADS)


def run(
    blocks: Iterable[Block],
    work: Callable[[Block, memoryview], None],
    *,
    threads: int,
    destinations: Mapping[Shard, Path] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Clock:
    """Read every block and do `work` on it, in worker threads; write it to its file's destination, if there is one.

    `work` may change the block in place. The first exception stops all threads and is raised again here.

    Raises:
        SystemRefusedError: reading or writing failed, or a file changed since its header was read.
    """
    queue = _Queue(iter(blocks), on_bytes)
    arguments = (queue, work, destinations or {})
    try:
        # This thread works itself, unless it must be free to hear of Ctrl-C while others do.
        if threads == 1 or not _start(threads, arguments):
            _drain_quietly(*arguments)
        queue.idle.wait()
    except BaseException:
        queue.stop()
        # Not Thread.join, which does not survive being interrupted and called again.
        queue.idle.wait()
        raise
    if queue.error is not None:
        raise queue.error
    return queue.clock


def _start(count: int, arguments: tuple[_Queue, Any, Any]) -> int:
    """Start as many threads as the system lets us have, and say how many those are."""
    queue = arguments[0]
    for started in range(count):
        queue.enter()
        try:
            threading.Thread(target=_drain_and_leave, args=arguments, daemon=True).start()
        except RuntimeError:
            queue.leave()
            return started
    return count


def _drain_and_leave(
    queue: _Queue, work: Callable[[Block, memoryview], None], destinations: Mapping[Shard, Path]
) -> None:
    try:
        _drain_quietly(queue, work, destinations)
    finally:
        queue.leave()


class _Queue:
    """The blocks still to do, shared by the worker threads."""

    def __init__(self, blocks: Iterator[Block], on_bytes: Callable[[int], None] | None) -> None:
        self._blocks = blocks
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._stopped = False
        self._working = 0
        # Set while no thread is working.
        self.idle = threading.Event()
        self.idle.set()
        self.error: BaseException | None = None
        self.clock = Clock()

    def enter(self) -> None:
        with self._lock:
            self._working += 1
            self.idle.clear()

    def leave(self) -> None:
        with self._lock:
            self._working -= 1
            if not self._working:
                self.idle.set()

    def next(self) -> Block | None:
        with self._lock:
            return None if self._stopped else next(self._blocks, None)

    def done(self, block: Block) -> None:
        if self._on_bytes is not None:
            with self._lock:
                self._on_bytes(block.end - block.begin)

    def stop(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._stopped = True
            self.error = self.error or error

    def finish(self, clock: Clock) -> None:
        with self._lock:
            self.clock.add(clock)


def _drain_quietly(
    queue: _Queue, work: Callable[[Block, memoryview], None], destinations: Mapping[Shard, Path]
) -> None:
    try:
        _drain(queue, work, destinations)
    except BaseException as error:  # noqa: BLE001 - raised again by run(), in the thread that called it
        queue.stop(error)


def _drain(queue: _Queue, work: Callable[[Block, memoryview], None], destinations: Mapping[Shard, Path]) -> None:
    clock = Clock()
    files = _OpenFiles(destinations)
    try:
        buffer = memoryview(mmap.mmap(-1, blocks.BLOCK_BYTES))
    except OSError as error:
        raise MemoryError from error
    try:
        while (block := queue.next()) is not None:
            view = buffer[: block.end - block.begin]
            began = perf_counter()
            files.switch(block.shard)
            _read_fully(files.source, view, block)
            read = perf_counter()
            work(block, view)
            computed = perf_counter()
            clock.add(Clock(read - began, computed - read))
            clock.workers = 1
            if files.target is not None:
                _write_fully(files.target, view, block, destinations[block.shard])
                clock.write += perf_counter() - computed
            queue.done(block)
        files.check()
    finally:
        files.close()
        queue.finish(clock)


class _OpenFiles:
    """The file that a thread reads, and the one that it writes: two descriptors however many shards there are."""

    def __init__(self, destinations: Mapping[Shard, Path]) -> None:
        self._destinations = destinations
        self._shard: Shard | None = None
        self.source = -1
        self.target: int | None = None

    def switch(self, shard: Shard) -> None:
        if shard is self._shard:
            return
        self.check()
        self.close()
        self.source = _open_source(shard)
        self._shard = shard
        destination = self._destinations.get(shard)
        if destination is not None:
            try:
                self.target = os.open(destination, os.O_WRONLY | os.O_CLOEXEC)
            except OSError as error:
                raise from_os_error(error, destination) from error

    def check(self) -> None:
        """Whether what was read was one state of the file."""
        if self._shard is not None and not is_unchanged(self.source, self._shard.stat):
            raise changed_meanwhile(self._shard.path)

    def close(self) -> None:
        if self.source >= 0:
            os.close(self.source)
        if self.target is not None:
            os.close(self.target)
        self._shard, self.source, self.target = None, -1, None


def _open_source(shard: Shard) -> int:
    try:
        fd = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise from_os_error(error, shard.path) from error
    if not is_unchanged(fd, shard.stat):
        os.close(fd)
        raise changed_meanwhile(shard.path)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return fd


def _read_fully(fd: int, view: memoryview, block: Block) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], block.begin + done)
        except OSError as error:
            raise from_os_error(error, block.shard.path) from error
        if not count:
            raise SystemRefusedError("became shorter while it was read; run again", file=block.shard.path)
        done += count


def _write_fully(fd: int, view: memoryview, block: Block, target: Path) -> None:
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], block.begin + done)
        except OSError as error:
            raise from_os_error(error, target) from error
