"""The engine of worker processes: it gives them the parts of passes, some at a time, and takes the results.

This process alone holds the locks, decides, and puts files in place. What a worker answers is checked against what it
was asked. Each result is taken and dropped, so memory does not grow with the number of parts.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

from gradtool import tuning
from gradtool._version import __version__
from gradtool.engines.cluster import wire
from gradtool.engines.cluster.dask import Dask, Wait
from gradtool.engines.cluster.remote_files import RemoteFiles
from gradtool.engines.cluster.work import Check, Job, Report, call_for, empty_outcome, fingerprint
from gradtool.engines.worker import WorkerSummary
from gradtool.errors import (
    BackendUnavailableError,
    GradtoolError,
    Problem,
    SystemRefusedError,
    changed_meanwhile,
    number_of,
    option,
    say,
    shortened,
)
from gradtool.store import signals
from gradtool.store.io.channel import Clock
from gradtool.store.io.destination import DISCARD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gradtool.engines.cluster.work import Outcome
    from gradtool.engines.passes import Part, Pass, Result
    from gradtool.options import ComputeOptions
    from gradtool.store.format.tensors import Shard
    from gradtool.store.io.destination import WrittenFiles
    from gradtool.store.transaction.output import Output, Staging

_HEARTBEAT_SECONDS = 0.2
_LOOK_SECONDS = 1.0
# Until a worker that has not answered is known to be busy, and not silent.
_GRACE_SECONDS = 2.0
# When more workers that had the same task are lost, the task is what they die of.
_MAX_LOSSES = 3
# Unless an option sets them: to wait for a scheduler and for workers, and while an address refuses connections.
_TIMEOUT_SECONDS, _REFUSED_SECONDS = 60.0, 5.0
_DEATH_HINT = say("see their logs; fewer {} and smaller shards need less memory", option("threads"))


class Membership:
    """The workers of a cluster. Each is asked whether it is fit, even if it joins late, and gets work once it is."""

    def __init__(self, cluster: Dask, timeout: float, check: Check) -> None:
        self.cluster, self._timeout = cluster, timeout
        # How many tasks each worker that is fit does at a time, and what it computes with, by its address.
        self.fit: dict[str, int] = {}
        self.reports: dict[str, Report] = {}
        # What workers are asked, who has not answered yet, and since when.
        self._question = call_for(check)
        self._asked: dict[str, tuple[Future[Any], float]] = {}
        self._members: Mapping[str, int] = {}
        self._last_look, self._last_member = -_LOOK_SECONDS, monotonic()

    def wait_until_fit(self, told: Callable[[str], None] | None = None) -> None:
        """Wait until all workers have answered, and there is a worker; a long wait may be `told`.

        Raises:
            SystemRefusedError: as `watch`; or a worker is busy with something else.
            BackendUnavailableError: as `watch`.
        """
        waiting = Wait(f"the workers of {self.cluster.name}", told)
        self.watch()
        while self._asked or not self.fit:
            wait([future for future, _ in self._asked.values()] or [Future()], _HEARTBEAT_SECONDS)
            waiting.check()
            self.watch()
            late = [address for address, (_, since) in self._asked.items() if monotonic() > since + self._timeout]
            if late:
                hint = say("stop it, or wait longer with {}", option("worker_timeout"))
                raise _error(f"the worker {late[0]} has not answered for {self._timeout:g} s", hint)

    def watch(self) -> bool:
        """Take answers and, once a second at most, look for workers that came or went; return whether it looked.

        Raises:
            SystemRefusedError: the cluster is lost, or has had no worker for too long.
            BackendUnavailableError: a worker cannot do the work.
        """
        for address, (future, _) in list(self._asked.items()):
            if future.done():
                del self._asked[address]
                self.reports[address] = self._report(address, future)
                self.fit[address] = self._members[address]
        now = monotonic()
        if now < self._last_look + _LOOK_SECONDS:
            return False
        members = self._members = self.cluster.members()
        self._last_look = now
        if members:
            self._last_member = now
        elif now > self._last_member + self._timeout:
            hint = say("start some, or wait longer with {}", option("worker_timeout"))
            raise _error(f"{self.cluster.name} has had no worker for {self._timeout:g} s", hint)
        # A worker that has died will not answer, and a new worker may come to its address.
        self.fit = {address: members[address] for address in self.fit if address in members}
        self._asked = {address: asked for address, asked in self._asked.items() if address in members}
        for address in members.keys() - self.fit.keys() - self._asked.keys():
            self._asked[address] = self.cluster.submit(self._question, address), now + _GRACE_SECONDS
        return True

    def _report(self, address: str, future: Future[Any]) -> Report:
        """Return what a worker that is fit answers, or raise what is wrong with it."""
        try:
            return wire.unpacked(future.result(), Report())
        except GradtoolError:
            raise
        except Exception as error:
            if isinstance(error, ValueError):
                message = f"the worker {address} has another version of gradtool"
            elif type(error).__name__ in {"ImportError", "ModuleNotFoundError"}:
                message = f"the worker {address} cannot load gradtool: {shortened(str(error))}"
            else:
                reason, remedy = self.cluster.why(error)
                raise _error(f"{address}: {reason}", remedy) from error
            hint = f"install gradtool {__version__} there"
            raise BackendUnavailableError(message, code="engine", hint=hint) from error


@dataclass(eq=False)
class _Task:
    """A part of a pass, the worker that has it, and how many workers were lost that had it."""

    part: Part
    address: str = ""
    losses: int = 0


class Workers:
    """Runs passes on the workers of a cluster, which it joins when there is work."""

    _membership: Membership

    def __init__(self, name: str, address: str, options: ComputeOptions, progress: object = None) -> None:
        self.name, self._address, self._options = name, address, options
        self._progress, self._told = progress if callable(progress) else None, getattr(progress, "waiting", None)
        # Bytes of all processes, and their seconds added up; and who they are, by host and ID.
        self._total, self._processes, self._retries = Clock(), set[tuple[str, str]](), 0
        # The worker that may still have the data of a shard in memory.
        self._preferred: dict[Shard, str] = {}
        # Workers whose tasks were given to others.
        self._lost = set[str]()
        # The tasks that workers have, how many each has, those that are done, and workers that the last look missed.
        self._flight: dict[Future[Any], _Task] = {}
        self._load: Counter[str] = Counter()
        self._done: SimpleQueue[Future[Any]] = SimpleQueue()
        self._missed: set[str] = set()

    @property
    def clock(self) -> Clock:
        """Bytes of all processes; the mean of their seconds."""
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

    @property
    def warnings(self) -> Sequence[Problem]:
        """A warning if work was done again, because workers were lost."""
        lost, known = len(self._lost), len(self._membership.reports.keys() | self._lost)
        verb, whose = ("was", "its") if lost == 1 else ("were", "their")
        message = f"{lost} of {number_of(known, 'worker')} {verb} lost; {whose} work was done again"
        return [Problem("worker-lost", message, hint=_DEATH_HINT)] if lost else ()

    def prepare(self, output: Output | None, shards: Sequence[Shard]) -> None:
        """Ask every worker whether it finds the first of these files, and can write to the log of the output."""
        source, transaction = shards[0].source, None if output is None else output.transaction
        check = Check(source.address, source.inode, None, self._options.backend, self._options.device)
        if transaction is not None:
            # Nobody can guess the name of the log; in a folder that was made for the files, there is a pointer to it.
            log = [transaction.log_folder, *transaction.targets.made][-1].path / f"{transaction.id}.run"
            check = check._replace(path=str(log), inode=log.stat().st_ino, user=os.geteuid())
        timeout = self._options.worker_timeout or _TIMEOUT_SECONDS
        cluster = Dask(self._address, timeout, self._options.worker_timeout or _REFUSED_SECONDS, self._told)
        self._membership = Membership(cluster, timeout, check)
        self._membership.wait_until_fit(self._told)

    def destination(self, staging: Staging) -> RemoteFiles:
        """Return the destination whose files the workers write."""
        return RemoteFiles(staging)

    def run(self, pass_: Pass[Result], destination: WrittenFiles = DISCARD) -> Result:
        """Run a pass, part by part."""
        tally, total, done = pass_.tally(), pass_.nbytes(destination), 0
        left, tasks, waiting = total, map(_Task, pass_.parts(destination)), list[_Task]()
        while True:
            if self._membership.watch():
                waiting += self._lost_tasks()
            while (task := waiting.pop() if waiting else next(tasks, None)) is not None:
                if (address := self._free_worker(task.part, left)) is None:
                    waiting.append(task)
                    break
                self._submit(task, address, destination)
                left -= task.part.nbytes
            if not self._flight and not waiting:
                return tally
            with contextlib.suppress(Empty):
                # Not `wait`, which looks at every future each time.
                future = self._done.get(timeout=_HEARTBEAT_SECONDS)
                if future in self._flight:
                    task = self._landed(future)
                    self._add(task, self._outcome(future, task.part), tally)
                    done += task.part.nbytes
                    if self._progress is not None:
                        counts = number_of(self.workers.workers, "worker"), number_of(self.workers.hosts, "host")
                        self._progress(", ".join([pass_.title, *counts]), done, max(done, total))
            signals.deliver()

    def close(self) -> None:
        """Leave the cluster, which drops what is in flight."""
        if hasattr(self, "_membership"):
            self._membership.cluster.close()

    def _free_worker(self, part: Part, left: int) -> str | None:
        """Return the worker to give a part to, if possible with its data still in memory; None if all are busy.

        Each has several tasks for each of its threads, so as not to wait for the next; fewer near the end of the pass,
        when `left` bytes are left for all.
        """
        fit, load = self._membership.fit, self._load
        limit = min(tuning.TASKS_IN_FLIGHT, max(1, left // max(1, sum(fit.values()) * part.nbytes)))
        free = {address: load[address] / slots for address, slots in fit.items() if load[address] < limit * slots}
        preferred = (address for shard in part.reads if (address := self._preferred.get(shard)) in free)
        return next(preferred, None) or min(free, key=free.__getitem__, default=None)

    def _submit(self, task: _Task, address: str, destination: WrittenFiles) -> None:
        part, options, request = task.part, self._options, None
        if part.writes is not None and isinstance(destination, RemoteFiles):
            request = destination.request(part.writes)
        job = Job(part._replace(places=()), options.backend, options.device, options.threads, request)
        future = self._membership.cluster.submit(call_for(job), address)
        task.address, self._flight[future] = address, task
        self._load[address] += 1
        future.add_done_callback(self._done.put)

    def _landed(self, future: Future[Any]) -> _Task:
        task = self._flight.pop(future)
        self._load[task.address] -= 1
        return task

    def _lost_tasks(self) -> list[_Task]:
        """Take back the tasks of lost workers; raises `SystemRefusedError` if a task was lost too often.

        If such a worker goes on, its answer is ignored.
        """
        before, self._missed = self._missed, self._load.keys() - self._membership.fit.keys()
        lost = before & self._missed
        futures = [future for future, task in self._flight.items() if task.address in lost and not future.done()]
        tasks = [self._landed(future) for future in futures]
        for task in tasks:
            self._lost.add(task.address)
            task.losses += 1
            self._retries += 1
            if task.losses > _MAX_LOSSES:
                raise _died()
        return tasks

    def _outcome(self, future: Future[Any], part: Part) -> Outcome:
        """Return what a worker answered about a part; an error names files as the call did."""
        try:
            answer = future.result()
        except (Exception, SystemExit) as error:
            if type(error).__name__ == "KilledWorker":
                raise _died() from error
            reason, hint = self._membership.cluster.why(error)
            raise _error(reason, hint, part.reads[0].name if part.reads else None) from error
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
        for shard, seen in zip(part.reads, outcome.fingerprints, strict=True):
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


def _error(message: str, hint: str | None, file: str | None = None) -> SystemRefusedError:
    return SystemRefusedError(message, file=file, code="engine", hint=hint)


def _died() -> SystemRefusedError:
    return _error("every worker that was given the task died", _DEATH_HINT)


def _foreign() -> SystemRefusedError:
    return _error("a worker returned an unexpected result", "run the command again")
