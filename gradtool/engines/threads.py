"""The engine of one process: worker threads that do the tasks of a pass, each with a `Worker` of its own.

The system calls that move data, and the arithmetic, release the interpreter lock, so that threads run side by side.
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from gradtool.arrays import quiet
from gradtool.engines.worker import Worker, WorkerSummary
from gradtool.errors import DeviceMemoryError
from gradtool.store import signals, system
from gradtool.store.io.channel import Clock
from gradtool.store.io.destination import DISCARD, NewFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gradtool.backends.protocol import Backend
    from gradtool.backends.values import Data
    from gradtool.engines.passes import Pass, Result
    from gradtool.errors import Problem
    from gradtool.options import Progress
    from gradtool.store.format.tensors import Shard
    from gradtool.store.io.destination import Destination
    from gradtool.store.transaction.output import Output, Staging

# Each thread takes a block's memory and more; past this many, the interpreter lock eats the gain.
MAX_DEFAULT_THREADS = 16
_HEARTBEAT_SECONDS = 0.2
# Most of a small task is Python's own work, which threads cannot share and slow down for each other. As long as tasks
# are small and quick, such as those of many small files in the page cache, a single thread does them. A single delay is
# forgiven.
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
    # Nothing happens to threads that a result has to tell.
    warnings: ClassVar[tuple[Problem, ...]] = ()

    def __init__(self, backend: Backend, count: int = 1, progress: Progress | None = None, why: str = "") -> None:
        self.backend, self.count, self.progress = backend, count, progress
        self.workers = WorkerSummary(backend.name, why)
        self.clock = Clock()
        self._files = 0
        # Blocks that a pass has left on the device.
        self._resident: dict[tuple[Shard, int, int], Data] = {}

    def prepare(self, output: Output | None, shards: Sequence[Shard]) -> None:  # noqa: ARG002 - it is open here
        """Count the files; this process has opened them itself."""
        self._files = len(shards)

    def destination(self, staging: Staging) -> Destination:
        """Return the destination whose files this process writes."""
        return NewFiles([(new, staging.stage(new)) for new in staging.files])

    def run(self, pass_: Pass[Result], destination: Any = DISCARD) -> Result:
        """Run a pass, and write what the destination needs besides. The first exception stops all threads."""
        tally, nbytes = pass_.tally(), pass_.nbytes(destination)
        budget = min(_MAX_OPEN_FILES, system.descriptors_left())
        # A thread for less than a few blocks costs more than it saves.
        threads = max(1, min(self.count, nbytes >> 20, budget))
        tasks = (partial(pass_.work, task, tally=tally) for task in pass_.tasks(self.backend, destination))
        open_worker = partial(Worker, max(1, budget // threads), self.backend, destination, self._resident)
        progress = None if self.progress is None else partial(self.progress, pass_.title)
        queue = _Queue(chain(destination.tasks(), tasks), open_worker, pass_.halves, progress, nbytes)
        try:
            # This thread works itself, unless it must be free to handle Ctrl-C while others work.
            are_small = nbytes <= self._files * _SMALL_BYTES
            is_worth_it = threads > 1 and (not are_small or _drain(queue, while_quick=True))
            if not is_worth_it or not _drain_elsewhere(queue, threads):
                _drain(queue)
        except BaseException:
            # Not Thread.join, which does not survive an interrupt. A thread that only starts now gets nothing to do,
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
        """Free the blocks that wait on the device for a pass that did not come."""
        self._resident.clear()


class _Queue:
    """The tasks that are still to do, shared by the worker threads. Each is a call with a worker."""

    def __init__(
        self,
        tasks: Iterable[partial[None]],
        open_worker: Callable[..., Worker],
        halves: Callable[[Any], Sequence[Any]],
        progress: Callable[[int, int], None] | None,
        nbytes: int,
    ) -> None:
        self.open_worker, self.halves, self.progress = open_worker, halves, progress
        self._tasks, self._nbytes, self._done = iter(tasks), nbytes, 0
        self.lock, self._stopped, self._working = threading.Lock(), False, 0
        # Set while no thread is working.
        self.idle = threading.Event()
        self.idle.set()
        # Released once by every thread that is done.
        self.left = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.clock = Clock()

    def enter(self) -> None:
        with self.lock:
            self._working += 1
            self.idle.clear()

    def leave(self) -> None:
        with self.lock:
            self._working -= 1
            if not self._working:
                self.idle.set()
        self.left.release()

    def next(self) -> partial[None] | None:
        with self.lock:
            return None if self._stopped else next(self._tasks, None)

    def count(self, nbytes: int) -> None:
        with self.lock:
            self._done += nbytes
            if self.progress is not None:
                # Holes that are read over count too, so the whole is only an estimate until then.
                self.progress(self._done, max(self._done, self._nbytes))

    def stop(self, error: BaseException | None = None) -> None:
        with self.lock:
            self._stopped = True
            self.error = self.error or error


def _drain_elsewhere(queue: _Queue, count: int) -> bool:
    """Have threads do all tasks, as many as the system lets us have; return False if it lets us have none."""

    def work() -> None:
        queue.enter()
        try:
            _drain(queue)
        finally:
            queue.leave()

    started = 0
    with contextlib.suppress(RuntimeError):
        for _ in range(count):
            threading.Thread(target=work, daemon=True).start()
            started += 1
    for _ in range(started):
        # Python does not handle a signal that arrived just before a wait until the wait ends.
        while not queue.left.acquire(timeout=_HEARTBEAT_SECONDS):
            signals.deliver()
    return started > 0


def _drain(queue: _Queue, *, while_quick: bool = False) -> bool:
    """Do tasks until there are no more; an error stops the queue, and `run` raises it in the thread that called it.

    With `while_quick`, only while they are small and quick: return whether they no longer were, and there may be more.
    """
    try:
        worker = queue.open_worker(on_bytes=queue.count if queue.progress else None)
        clock, due, is_quick = worker.clock, perf_counter() + _SPARE_SECONDS, True
        halves: list[partial[None]] = []
        try:
            while is_quick and (task := halves.pop() if halves else queue.next()) is not None:
                began, moved, nbytes = perf_counter(), clock.read + clock.write, clock.moved_bytes
                try:
                    with quiet():
                        task(worker)
                except DeviceMemoryError:
                    # Done once the handler is left: the error refers to the memory of the task.
                    cut = [partial(task.func, half, **task.keywords) for half in queue.halves(*task.args)]
                    if not cut:
                        raise
                    halves += reversed(cut)
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
            with queue.lock:
                queue.clock.add(clock)
    except BaseException as error:  # noqa: BLE001
        queue.stop(error)
        return False
    return not is_quick
