"""The engine of one process: worker threads that do the tasks of a pass, each with a `Worker` of its own.

The system calls that move data, and the arithmetic, release the interpreter lock, so that threads run side by side.
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from gradtool.arrays import quiet
from gradtool.engines.protocol import Pass, Result, WorkerSummary
from gradtool.engines.worker import Worker
from gradtool.errors import DeviceMemoryError
from gradtool.store import signals, system
from gradtool.store.io.channel import Clock
from gradtool.store.io.destination import DISCARD, NewFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gradtool.backends.protocol import Backend, Data
    from gradtool.engines.protocol import Progress
    from gradtool.store.format.header import Shard
    from gradtool.store.io.destination import Destination
    from gradtool.store.transaction.output import Output, Staging

# Each thread takes a block's memory and more; past this many, the interpreter lock eats the gain.
MAX_DEFAULT_THREADS = 16
_HEARTBEAT_SECONDS = 0.2
# Most of a small task is Python's own work, which threads cannot share and slow down for each other. As long as tasks
# are small and quick, as those of many small files in the page cache are, one thread does them. One may be delayed.
_SMALL_BYTES = 512 << 10
_QUICK_SECONDS, _SPARE_SECONDS = 0.0003, 0.002
# Of all threads together; a process may usually have 1,024, on some systems 256.
_MAX_OPEN_FILES = 192


def default_threads() -> int:
    """Return one thread for each core that this process may use."""
    return min(system.cores(), MAX_DEFAULT_THREADS)


class Threads:
    """Runs passes on up to `count` threads, and adds up time and bytes over all; `why` says why this backend."""

    name: ClassVar = "threads"

    def __init__(self, backend: Backend, count: int = 1, progress: Progress | None = None, why: str = "") -> None:
        self.backend, self.count, self.progress = backend, count, progress
        self.why = why
        self.clock = Clock()
        self._files = 0
        self._resident: dict[tuple[Shard, int, int], Data] = {}

    @property
    def workers(self) -> WorkerSummary:
        """This process alone."""
        return WorkerSummary(self.backend.name, self.why)

    def prepare(self, output: Output | None, shards: Sequence[Shard]) -> None:  # noqa: ARG002 - it is open here
        """Count the files; this process has opened them itself."""
        self._files = len(shards)

    def destination(self, staging: Staging) -> Destination:
        """Return the destination whose files this process writes."""
        return NewFiles({new.shard: (new, staging.stage(new)) for new in staging.files})

    def run(self, work: Pass[Result], destination: Destination = DISCARD) -> Result:
        """Run a pass, and write what the destination needs besides. The first exception stops all threads."""
        tally, nbytes = work.tally(), work.nbytes(destination)
        budget = min(_MAX_OPEN_FILES, system.descriptors_left())
        # A thread for less than a few blocks costs more than it saves.
        threads = max(1, min(self.count, nbytes >> 20, budget))
        tasks = (partial(work.work, task, tally=tally) for task in work.tasks(self.backend, destination))
        open_worker = partial(Worker, max(1, budget // threads), self.backend, destination, self._resident)
        queue = _Queue(chain(destination.tasks(), tasks), open_worker, work.halves)
        if self.progress is not None:
            queue.progress, queue.whole = partial(self.progress, work.title), nbytes
        try:
            # This thread works itself, unless it must be free to handle Ctrl-C while others work.
            are_small = nbytes <= self._files * _SMALL_BYTES
            is_worth_it = threads > 1 and (not are_small or _drain(queue, while_quick=True))
            started = _start(threads, queue) if is_worth_it else 0
            if not started:
                _drain(queue)
            for _ in range(started):
                # Python does not handle a signal that arrived just before a wait until the wait ends.
                while not queue.left.acquire(timeout=_HEARTBEAT_SECONDS):
                    signals.deliver()
        except BaseException:
            # Not Thread.join, which does not survive an interrupt. A thread that only starts now finds nothing to do,
            # and a second Ctrl-C must not remove what a thread is still writing.
            with signals.deferred():
                queue.stop()
                queue.idle.wait()
            raise
        if queue.error is not None:
            raise queue.error
        self.clock.add(queue.clock.each())
        self.clock.workers = max(self.clock.workers, queue.clock.workers)
        return tally

    def close(self) -> None:
        """Free what is left on the device for a pass that did not come."""
        self._resident.clear()


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
    """The tasks still to do, shared by the worker threads. Each is a call with a worker."""

    def __init__(
        self,
        tasks: Iterable[Callable[[Worker], None]],
        open_worker: Callable[..., Worker],
        halves: Callable[[Any], Sequence[Any]],
    ) -> None:
        self._tasks: Iterator[Callable[[Worker], None]] = iter(tasks)
        self._open_worker = open_worker
        self._halves = halves
        # Told of the bytes that are read, and about how many will be.
        self.progress: Callable[[int, int], None] | None = None
        self.whole = self._done = 0
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

    def worker(self) -> Worker:
        return self._open_worker(on_bytes=self._count)

    def next(self) -> Callable[[Worker], None] | None:
        with self._lock:
            return None if self._stopped else next(self._tasks, None)

    def halves(self, task: Any) -> list[Callable[[Worker], None]]:
        """Cut a task for a device that has no room for it; the half to do first is the last."""
        return [partial(task.func, half, **task.keywords) for half in reversed(self._halves(*task.args))]

    def _count(self, nbytes: int) -> None:
        if self.progress is not None:
            with self._lock:
                self._done += nbytes
                # Holes that are read over count too, so the whole is only an estimate until then.
                self.progress(self._done, max(self._done, self.whole))

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
        worker = queue.worker()
        clock, due, is_quick = worker.clock, perf_counter() + _SPARE_SECONDS, True
        halves: list[Callable[[Worker], None]] = []
        try:
            while is_quick and (task := halves.pop() if halves else queue.next()) is not None:
                began, moved, nbytes = perf_counter(), clock.read + clock.write, clock.moved_bytes
                try:
                    with quiet():
                        task(worker)
                except DeviceMemoryError:
                    # Done once the handler is left: the error refers to the memory of the task.
                    cut = queue.halves(task)
                    if not cut:
                        raise
                    halves += cut
                # Where there is no other thread, this one handles signals.
                signals.deliver()
                now = perf_counter()
                clock.compute += now - began - (clock.read + clock.write - moved)
                due = min(due, now + _SPARE_SECONDS) + _QUICK_SECONDS
                is_quick = bool(halves) or not while_quick or (now < due and clock.moved_bytes - nbytes <= _SMALL_BYTES)
                # The threads that follow are counted instead.
                clock.workers = int(is_quick)
            worker.check()
        finally:
            worker.close()
            queue.finish(clock)
    except BaseException as error:  # noqa: BLE001
        queue.stop(error)
        return False
    return not is_quick
