"""The engine of worker processes: it gives them the parts of passes, some at a time, and takes the results.

This process alone holds the locks, decides, and puts files in place. What a worker answers is checked against what it
was asked. Results are taken and dropped one by one, so memory does not grow with the number of parts.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from gradtool import tuning
from gradtool.engines.cluster import wire
from gradtool.engines.cluster.membership import HEARTBEAT_SECONDS, Membership
from gradtool.engines.cluster.work import Check, Job, call_for, empty_outcome, fingerprint, require_unchanged
from gradtool.engines.protocol import Part, Pass, Result, WorkerSummary
from gradtool.errors import GradtoolError, SystemRefusedError, changed_meanwhile, number_of
from gradtool.store import signals
from gradtool.store.io.channel import Clock
from gradtool.store.io.destination import DISCARD
from gradtool.store.transaction.files import log_of
from gradtool.store.transaction.orders import Ordered
from gradtool.wording import option, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from gradtool.engines.cluster.membership import Cluster
    from gradtool.engines.cluster.work import Outcome
    from gradtool.engines.protocol import Progress
    from gradtool.store.format.header import Shard
    from gradtool.store.io.destination import Destination
    from gradtool.store.transaction.output import Output

# So many workers may be lost that had the same task, before it is taken for what they die of.
_MOST_LOSSES = 3


@dataclass(eq=False)
class _Task:
    """A part of a pass, given to one worker, and how many workers were lost that had it."""

    part: Part
    call: bytes
    address: str = ""
    losses: int = 0


@dataclass
class Workers:
    """Runs passes on the workers of a cluster, which is joined when there is work."""

    name: str
    join: Callable[[], Cluster]
    backend: str | None = None
    device: int | None = None
    threads: int | None = None
    # Seconds to wait for a worker.
    timeout: float = 60.0
    progress: Progress | None = None
    # Bytes of all processes, and their seconds added up.
    _total: Clock = field(default_factory=Clock)
    # By host and ID.
    _processes: set[tuple[str, str]] = field(default_factory=set)
    _retries: int = 0
    # The worker that may still have the data of a shard in memory, and what workers must have seen of it.
    _preferred: dict[Shard, str] = field(default_factory=dict)
    _fingerprints: dict[Shard, str] = field(default_factory=dict)

    @cached_property
    def _membership(self) -> Membership:
        return Membership(self.join(), self.timeout)

    @property
    def clock(self) -> Clock:
        """Bytes of all processes; seconds of one of them, on average."""
        total, count = self._total, max(1, len(self._processes))
        return replace(total, read=total.read / count, compute=total.compute / count, write=total.write / count)

    @property
    def workers(self) -> WorkerSummary:
        """The processes that did something."""
        hosts = len({host for host, _ in self._processes})
        return WorkerSummary(*self._membership.backend, len(self._processes), hosts, self._retries)

    def prepare(self, output: Output | None, shards: Sequence[Shard]) -> None:
        """Ask every worker whether it can read these files, and write where the output is locked."""
        membership = self._membership
        if output is not None and output.transaction is not None:
            self._require_writable(output.transaction.home.path, output.transaction.id)
        elif shards:
            membership.require_fit(self._check(shards[0].source.address, shards[0].source.inode))

    def run(self, work: Pass[Result], destination: Destination = DISCARD) -> Result:
        """Run a pass, part by part."""
        for order in list(destination.orders.values())[:1]:
            self._require_writable(order.folder, order.run)
        tally, whole, done = work.tally(), work.nbytes(destination), 0
        tasks = (_Task(part, self._call_for(part, destination)) for part in work.parts(destination))
        rest, waiting, flight = whole, list[_Task](), _Flight(self._membership)
        while True:
            if self._membership.watch():
                waiting += (lost := flight.take_back())
                self._retries += len(lost)
            while (task := waiting.pop() if waiting else next(tasks, None)) is not None:
                if (address := flight.free_worker(task.part, rest, self._preferred)) is None:
                    waiting.append(task)
                    break
                flight.submit(task, address)
                rest -= task.part.nbytes
            if not flight.tasks and not waiting:
                return tally
            for part, future in flight.finished():
                self._take(part, self._result(future, part), tally, destination)
                done += part.nbytes
                self._show(work.title, done, whole)
            signals.deliver()

    def close(self) -> None:
        """Leave the cluster, which drops what is in flight."""
        if "_membership" in vars(self):
            self._membership.cluster.close()

    def _check(self, path: str, inode: int, run: str | None = None) -> Check:
        return Check(path, inode, run, os.geteuid(), self.backend, self.device)

    def _require_writable(self, folder: Path, run: str) -> None:
        """Ask every worker whether it sees the log of a run, whose name nobody can guess, and can write beside it."""
        log = folder / log_of(run)
        self._membership.require_fit(self._check(str(log), log.stat().st_ino, run))

    def _call_for(self, part: Part, destination: Destination) -> bytes:
        order = None if part.writes is None else destination.orders[part.writes]
        return call_for(Job(part._replace(places=()), self.backend, self.device, self.threads, order))

    def _result(self, future: Future[Any], part: Part) -> Outcome:
        """Return what a worker answered about a part; an error names files as the call did."""
        try:
            answer = future.result()
        except (Exception, SystemExit) as error:
            if type(error).__name__ == "KilledWorker":
                raise _died() from error
            what, hint = self._membership.cluster.why(error)
            file = part.reads[0].name if part.reads and not isinstance(error, CancelledError) else None
            raise SystemRefusedError(what, file=file, code="engine", hint=hint) from error
        try:
            return wire.unpacked(answer, empty_outcome(part))
        except GradtoolError as error:
            names = {shard.source.address: shard.name for shard in part.reads}
            error.problems = tuple(replace(each, file=names.get(each.file or "", each.file)) for each in error.problems)
            raise
        except ValueError as error:
            raise _foreign() from error

    def _take(self, part: Part, outcome: Outcome, tally: Any, destination: Destination) -> None:
        """Add a result, if it is about the same files and fits into the tally."""
        for shard, seen in zip(part.reads, outcome.read, strict=True):
            if shard not in self._fingerprints:
                self._fingerprints[shard] = fingerprint(shard)
            if self._fingerprints[shard] != seen:
                raise changed_meanwhile(shard.name)
        # A worker has seen only what became of them since it began.
        require_unchanged(part.reads)
        try:
            tally.merge_part(part.places, outcome.tally)
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise _foreign() from error
        if part.writes is not None and isinstance(destination, Ordered) and outcome.built is not None:
            destination.adopt(part.writes, outcome.built)
        process = outcome.host, outcome.process
        self._processes.add(process)
        self._retries += outcome.late
        self._total.add(outcome.clock.each())
        self._total.workers = max(self._total.workers, outcome.clock.workers)
        if process in self._membership.addresses:
            self._preferred |= dict.fromkeys(part.reads, self._membership.addresses[process])

    def _show(self, title: str, done: int, whole: int) -> None:
        if self.progress is not None:
            summary = self.workers
            counts = number_of(summary.workers, "worker"), number_of(summary.hosts, "host")
            self.progress(", ".join([title, *counts]), done, max(done, whole))


class _Flight:
    """The tasks that workers have, each with its call."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.tasks: dict[Future[Any], _Task] = {}
        self._load: Counter[str] = Counter()
        # Not `wait`, which looks at every future each time.
        self._finished: SimpleQueue[Future[Any]] = SimpleQueue()
        # The addresses of workers that were gone or silent at the last look.
        self._gone: set[str] = set()

    def free_worker(self, part: Part, rest: int, preferred: Mapping[Shard, str]) -> str | None:
        """Return the worker to give a part to, if possible one that may have its data in memory; None if all are busy.

        Each has several tasks for each of its threads, so as not to wait for the next; fewer near the end of the pass,
        when `rest` bytes are left for all.
        """
        fit, load = self._membership.fit, self._load
        most = min(tuning.TASKS_IN_FLIGHT, max(1, rest // max(1, sum(fit.values()) * part.nbytes)))
        free = {address: load[address] / slots for address, slots in fit.items() if load[address] < most * slots}
        liked = (preferred[shard] for shard in part.reads if preferred.get(shard) in free)
        return next(liked, None) or min(free, key=free.__getitem__, default=None)

    def submit(self, task: _Task, address: str) -> None:
        """Give a task to a worker."""
        future = self._membership.cluster.submit(task.call, address)
        task.address, self.tasks[future] = address, task
        self._load[address] += 1
        future.add_done_callback(self._finished.put)

    def finished(self) -> Iterator[tuple[Part, Future[Any]]]:
        """Yield the part that is done next, if that is soon."""
        with contextlib.suppress(Empty):
            future = self._finished.get(timeout=HEARTBEAT_SECONDS)
            if future in self.tasks:
                yield self._taken(future).part, future

    def take_back(self) -> list[_Task]:
        """Take back the tasks of workers that are lost; raises `SystemRefusedError` if one has lost many of them."""
        before, self._gone = self._gone, {task.address for task in self.tasks.values()} - self._membership.fit.keys()
        gone = before & self._gone
        lost = [future for future, task in self.tasks.items() if task.address in gone and future.cancel()]
        tasks = [self._taken(future) for future in lost]
        for task in tasks:
            task.losses += 1
            if task.losses > _MOST_LOSSES:
                raise _died()
        return tasks

    def _taken(self, future: Future[Any]) -> _Task:
        task = self.tasks.pop(future)
        self._load[task.address] -= 1
        return task


def _died() -> SystemRefusedError:
    hint = say("see their logs; fewer {} and smaller shards need less memory", option("threads"))
    return SystemRefusedError("every worker that was given the task died", code="engine", hint=hint)


def _foreign() -> SystemRefusedError:
    what = "a worker returned something else than was asked for"
    return SystemRefusedError(what, code="engine", hint="run the command again")
