"""The engine of worker processes: it gives them the parts of passes, some at a time, and takes the results.

This process alone holds the locks, decides, and puts files in place. What a worker answers is checked against what it
was asked. Results are taken and dropped one by one, so memory does not grow with the number of parts.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from gradtool import tuning
from gradtool.engines.cluster import wire
from gradtool.engines.cluster.dask import Dask
from gradtool.engines.cluster.membership import HEARTBEAT_SECONDS, Membership
from gradtool.engines.cluster.remote_files import RemoteFiles
from gradtool.engines.cluster.work import Check, Job, call_for, empty_outcome, fingerprint
from gradtool.engines.worker import WorkerSummary
from gradtool.errors import GradtoolError, SystemRefusedError, changed_meanwhile, number_of, option, say
from gradtool.store import signals
from gradtool.store.io.channel import Clock
from gradtool.store.io.destination import DISCARD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from gradtool.engines.cluster.work import Outcome
    from gradtool.engines.passes import Part, Pass, Result
    from gradtool.engines.threads import Progress
    from gradtool.store.format.tensors import Shard
    from gradtool.store.io.destination import WrittenFiles
    from gradtool.store.transaction.output import Output, Staging

# So many workers may be lost that had the same task, before it is taken for what they die of.
_MOST_LOSSES = 3


@dataclass(eq=False)
class _Task:
    """A part of a pass, the worker that has it, and how many workers were lost that had it."""

    part: Part
    address: str = ""
    losses: int = 0


@dataclass
class Workers:
    """Runs passes on the workers of a cluster, which is joined when there is work."""

    name: str
    address: str
    backend: str | None = None
    device: int | None = None
    threads: int | None = None
    # Seconds to wait for a worker.
    timeout: float = 60.0
    progress: Progress | None = None
    _membership: Membership = field(init=False)
    # Bytes of all processes, and their seconds added up; and who they are, by host and ID.
    _total: Clock = field(default_factory=Clock)
    _processes: set[tuple[str, str]] = field(default_factory=set)
    _retries: int = 0
    # The worker that may still have the data of a shard in memory.
    _preferred: dict[Shard, str] = field(default_factory=dict)
    # The tasks that workers have, and how many each has; those that are done; and workers that the last look missed.
    _flight: dict[Future[Any], _Task] = field(default_factory=dict)
    _load: Counter[str] = field(default_factory=Counter)
    _done: SimpleQueue[Future[Any]] = field(default_factory=SimpleQueue)
    _missed: set[str] = field(default_factory=set)

    @property
    def clock(self) -> Clock:
        """Bytes of all processes; seconds of one of them, on average."""
        total, count = self._total, max(1, len(self._processes))
        return replace(total, read=total.read / count, compute=total.compute / count, write=total.write / count)

    @property
    def workers(self) -> WorkerSummary:
        """The processes that did something, and the backends of all that were fit, with the commonest reason."""
        reports = self._membership.reports.values()
        backend = ", ".join(sorted({report.backend for report in reports}))
        why = "".join(why for why, _ in Counter(report.why for report in reports).most_common(1))
        hosts = {host for host, _ in self._processes}
        return WorkerSummary(backend, why, len(self._processes), len(hosts), self._retries)

    def prepare(self, output: Output | None, shards: Sequence[Shard]) -> None:
        """Ask every worker whether it can read these files, and write where the output is locked."""
        source, transaction = shards[0].source, None if output is None else output.transaction
        check = Check(source.address, source.inode, None, self.backend, self.device)
        if transaction is not None:
            # Nobody can guess the name of the log; in a folder that was made for the files, there is a pointer to it.
            log = [transaction.log_folder, *transaction.targets.made][-1].path / f"{transaction.id}.run"
            check = check._replace(path=str(log), inode=log.stat().st_ino, user=os.geteuid())
        self._membership = Membership(Dask(self.address, self.timeout), self.timeout, check)
        self._membership.wait_until_fit()

    def destination(self, staging: Staging) -> RemoteFiles:
        """Return the destination whose files the workers write."""
        return RemoteFiles(staging)

    def run(self, work: Pass[Result], destination: WrittenFiles = DISCARD) -> Result:
        """Run a pass, part by part."""
        tally, whole, done = work.tally(), work.nbytes(destination), 0
        rest, tasks, waiting = whole, map(_Task, work.parts(destination)), list[_Task]()
        while True:
            if self._membership.watch():
                waiting += self._lost_tasks()
            while (task := waiting.pop() if waiting else next(tasks, None)) is not None:
                if (address := self._free_worker(task.part, rest)) is None:
                    waiting.append(task)
                    break
                self._submit(task, address, destination)
                rest -= task.part.nbytes
            if not self._flight and not waiting:
                return tally
            with contextlib.suppress(Empty):
                # Not `wait`, which looks at every future each time.
                future = self._done.get(timeout=HEARTBEAT_SECONDS)
                if future in self._flight:
                    task = self._taken(future)
                    self._add(task, self._outcome(future, task.part), tally)
                    done += task.part.nbytes
                    self._show(work.title, done, whole)
            signals.deliver()

    def close(self) -> None:
        """Leave the cluster, which drops what is in flight."""
        if hasattr(self, "_membership"):
            self._membership.cluster.close()

    def _free_worker(self, part: Part, rest: int) -> str | None:
        """Return the worker to give a part to, if possible one that may have its data in memory; None if all are busy.

        Each has several tasks for each of its threads, so as not to wait for the next; fewer near the end of the pass,
        when `rest` bytes are left for all.
        """
        fit, load = self._membership.fit, self._load
        most = min(tuning.TASKS_IN_FLIGHT, max(1, rest // max(1, sum(fit.values()) * part.nbytes)))
        free = {address: load[address] / slots for address, slots in fit.items() if load[address] < most * slots}
        preferred = (address for shard in part.reads if (address := self._preferred.get(shard)) in free)
        return next(preferred, None) or min(free, key=free.__getitem__, default=None)

    def _submit(self, task: _Task, address: str, destination: WrittenFiles) -> None:
        part, request = task.part, None
        if part.writes is not None and isinstance(destination, RemoteFiles):
            request = destination.request(part.writes)
        job = Job(part._replace(places=()), self.backend, self.device, self.threads, request)
        future = self._membership.cluster.submit(call_for(job), address)
        task.address, self._flight[future] = address, task
        self._load[address] += 1
        future.add_done_callback(self._done.put)

    def _taken(self, future: Future[Any]) -> _Task:
        task = self._flight.pop(future)
        self._load[task.address] -= 1
        return task

    def _lost_tasks(self) -> list[_Task]:
        """Take back the tasks of workers that are lost; raises `SystemRefusedError` if many were that had the same.

        If such a worker goes on, nobody takes its answer.
        """
        before, self._missed = self._missed, self._load.keys() - self._membership.fit.keys()
        gone = before & self._missed
        lost = [future for future, task in self._flight.items() if task.address in gone and not future.done()]
        tasks = [self._taken(future) for future in lost]
        for task in tasks:
            task.losses += 1
            self._retries += 1
            if task.losses > _MOST_LOSSES:
                raise _died()
        return tasks

    def _outcome(self, future: Future[Any], part: Part) -> Outcome:
        """Return what a worker answered about a part; an error names files as the call did."""
        try:
            answer = future.result()
        except (Exception, SystemExit) as error:
            if type(error).__name__ == "KilledWorker":
                raise _died() from error
            what, hint = self._membership.cluster.why(error)
            file = part.reads[0].name if part.reads else None
            raise SystemRefusedError(what, file=file, code="engine", hint=hint) from error
        try:
            return wire.unpacked(answer, empty_outcome(part))
        except GradtoolError as error:
            names = {shard.source.address: shard.name for shard in part.reads}
            error.problems = tuple(replace(each, file=names.get(each.file or "", each.file)) for each in error.problems)
            raise
        except ValueError as error:
            raise _foreign() from error

    def _add(self, task: _Task, outcome: Outcome, tally: Any) -> None:
        """Add a result, if it is about the same files and fits into the tally."""
        part = task.part
        for shard, seen in zip(part.reads, outcome.read, strict=True):
            if fingerprint(shard) != seen:
                raise changed_meanwhile(shard.name)
        try:
            tally.merge_part(part.places, outcome.tally)
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise _foreign() from error
        self._processes.add((outcome.host, outcome.process))
        self._retries += outcome.waits
        self._total.add(outcome.clock.each())
        self._total.workers = max(self._total.workers, outcome.clock.workers)
        self._preferred |= dict.fromkeys(part.reads, task.address)

    def _show(self, title: str, done: int, whole: int) -> None:
        if self.progress is not None:
            summary = self.workers
            counts = number_of(summary.workers, "worker"), number_of(summary.hosts, "host")
            self.progress(", ".join([title, *counts]), done, max(done, whole))


def _died() -> SystemRefusedError:
    hint = say("see their logs; fewer {} and smaller shards need less memory", option("threads"))
    return SystemRefusedError("every worker that was given the task died", code="engine", hint=hint)


def _foreign() -> SystemRefusedError:
    what = "a worker returned something else than was asked for"
    return SystemRefusedError(what, code="engine", hint="run the command again")
