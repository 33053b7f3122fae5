"""Worker threads: they do tasks, each with a `Channel` of its own.

The system calls that move data, and the arithmetic, release the interpreter lock, so that threads run side by side.
"""

from __future__ import annotations

import os
import resource
import threading
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from gradtool.store import signals, system
from gradtool.store.io.channel import Channel, Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gradtool.store.transaction.inplace import InPlace

    # A stretch of work, done with the files and the memory of one thread.
    Task = Callable[[Channel], None]

# Each thread takes a block's memory and more; past this many, the interpreter lock eats the gain.
MAX_DEFAULT_THREADS = 16
_HEARTBEAT_SECONDS = 0.2
# Most of a small task is Python's own work, which threads cannot share and slow down for each other. As long as tasks
# are small and quick, as those of many small files in the page cache are, one thread does them. One may be delayed.
SMALL_BYTES = 512 << 10
_QUICK_SECONDS, _SPARE_SECONDS = 0.0003, 0.002
# Of all threads together; a process may usually have 1,024, on some systems 256.
_MAX_OPEN_FILES = 192


def default_threads() -> int:
    """One thread for each core that this process may use."""
    return min(system.cores(), MAX_DEFAULT_THREADS)


def run(
    tasks: Iterable[Task],
    *,
    threads: int,
    allocate: Callable[[int], memoryview],
    in_place: InPlace | None = None,
    on_bytes: Callable[[int], None] | None = None,
    are_small: bool = False,
) -> Clock:
    """Do every task, in worker threads. The first exception stops all threads and is raised here.

    `allocate` gives the threads their memory. `in_place` is the transaction whose files are overwritten, if any.
    `on_bytes` is called with the number of bytes that were read, from one thread at a time. Where tasks `are_small`,
    this thread does them itself, until one is not, or they are not quick.
    """
    budget = min(_MAX_OPEN_FILES, _descriptors_left())
    if in_place is not None:
        # An undo log for each thread, and a file with its folder while it is made.
        threads = max(1, min(threads, budget // 4))
        budget -= 2 * threads
    threads = max(1, min(threads, budget))
    queue = _Queue(iter(tasks), partial(Channel, max(1, budget // threads), allocate, in_place), on_bytes)
    try:
        # This thread works itself, unless it must be free to handle Ctrl-C while others work.
        is_worth_it = threads > 1 and (not are_small or _drain(queue, while_quick=True))
        started = _start(threads, queue) if is_worth_it else 0
        if not started:
            _drain(queue)
        for _ in range(started):
            # Python does not handle a signal that arrived just before a wait until the wait ends.
            while not queue.left.acquire(timeout=_HEARTBEAT_SECONDS):
                signals.deliver()
    except BaseException:
        # Not Thread.join, which does not survive an interrupt. A thread that only starts now finds nothing to do, and a
        # second Ctrl-C must not roll back what a thread is still writing.
        with signals.deferred():
            queue.stop()
            queue.idle.wait()
        raise
    if queue.error is not None:
        raise queue.error
    return queue.clock


def _descriptors_left() -> int:
    """How many more files this process may have open, about: a few are left to others."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_OPEN_FILES
    try:
        taken = len(os.listdir("/dev/fd"))  # noqa: PTH208 - names, of descriptors
    except OSError:
        taken = 16
    return limit - taken - 4


def _start(count: int, queue: _Queue) -> int:
    """Start as many threads as the system lets us have, and say how many those are."""
    for started in range(count):
        try:
            threading.Thread(target=_drain_and_leave, args=(queue,), daemon=True).start()
        except RuntimeError:
            return started
    return count


def _drain_and_leave(queue: _Queue) -> None:
    queue.enter()
    try:
        _drain(queue)
    finally:
        queue.leave()


class _Queue:
    """The tasks still to do, shared by the worker threads."""

    def __init__(
        self, tasks: Iterator[Task], open_channel: Callable[..., Channel], on_bytes: Callable[[int], None] | None
    ) -> None:
        self._tasks = tasks
        self._open_channel = open_channel
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._stopped = False
        self._working = 0
        # Set while no thread is working.
        self.idle = threading.Event()
        self.idle.set()
        # Released once by every thread that is done.
        self.left = threading.Semaphore(0)
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
        self.left.release()

    def channel(self) -> Channel:
        return self._open_channel(on_bytes=self._count)

    def next(self) -> Task | None:
        with self._lock:
            return None if self._stopped else next(self._tasks, None)

    def _count(self, nbytes: int) -> None:
        if self._on_bytes is not None:
            with self._lock:
                self._on_bytes(nbytes)

    def stop(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._stopped = True
            self.error = self.error or error

    def finish(self, clock: Clock) -> None:
        with self._lock:
            self.clock.add(clock)


def _drain(queue: _Queue, *, while_quick: bool = False) -> bool:
    """Do tasks until there are no more; an error stops the queue, and `run` raises it in the thread that called it.

    With `while_quick`, only while they are small and quick: whether they no longer were, and there may be more.
    """
    try:
        channel = queue.channel()
        clock, due, is_quick = channel.clock, perf_counter() + _SPARE_SECONDS, True
        try:
            while is_quick and (task := queue.next()) is not None:
                began, moved, nbytes = perf_counter(), clock.read + clock.write, clock.moved_bytes
                task(channel)
                # Where there is no other thread, this one handles signals.
                signals.deliver()
                now = perf_counter()
                clock.compute += now - began - (clock.read + clock.write - moved)
                due = min(due, now + _SPARE_SECONDS) + _QUICK_SECONDS
                is_quick = not while_quick or (now < due and clock.moved_bytes - nbytes <= SMALL_BYTES)
                # The threads that follow are counted instead.
                clock.workers = int(is_quick)
            channel.check()
        finally:
            channel.close()
            queue.finish(clock)
    except BaseException as error:  # noqa: BLE001
        queue.stop(error)
        return False
    return not is_quick
