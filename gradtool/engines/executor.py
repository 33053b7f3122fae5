"""The engine of other processes: it gives them the parts of passes, a bounded number at a time, and takes the results.

This process alone holds the locks, decides, and puts files in place. What a worker returns is checked against what was
asked for. Results are taken and dropped one by one, so memory does not grow with the number of parts.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from gradtool import tuning
from gradtool._version import __version__
from gradtool.engines.membership import Membership
from gradtool.engines.protocol import Part, Pass, Result, WorkerSummary
from gradtool.engines.work import (
    Identity,
    Job,
    Outcome,
    call,
    identity_of,
    packed,
    perform,
    read_outcome,
    refuse_changed,
)
from gradtool.errors import GradtoolError, SystemRefusedError, changed_meanwhile
from gradtool.store import signals
from gradtool.store.io.channel import Clock
from gradtool.store.io.destination import DISCARD
from gradtool.store.transaction.orders import Ordered

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from concurrent.futures import Future

    from gradtool.engines.protocol import Cluster, Progress
    from gradtool.store.format.header import Shard
    from gradtool.store.io.destination import Destination
    from gradtool.store.transaction.output import Output

_HEARTBEAT_SECONDS = 0.2
# For workers to say whether they are fit, once a task has failed.
_SETTLE_SECONDS = 5.0


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
    _membership: Membership | None = None
    _total: Clock = field(default_factory=Clock)
    # By host and ID.
    _processes: set[tuple[str, str]] = field(default_factory=set)
    _retries: int = 0
    # Where the data of a shard may still be in memory, and what workers must have seen of it.
    _preferred: dict[Shard, str | None] = field(default_factory=dict)
    _identities: dict[Shard, Identity] = field(default_factory=dict)

    @property
    def clock(self) -> Clock:
        """Bytes of all processes; seconds of one of them, on average."""
        total, count = self._total, max(1, len(self._processes))
        return replace(total, read=total.read / count, compute=total.compute / count, write=total.write / count)

    @property
    def workers(self) -> WorkerSummary:
        """The processes that did something."""
        backend, why = ("", "") if self._membership is None else self._membership.backend
        return WorkerSummary(
            len(self._processes), len({host for host, _ in self._processes}), self._retries, backend, why
        )

    def prepare(self, output: Output | None, shards: Sequence[Shard]) -> None:
        """Ask every worker whether it can read these files, and write where the output is locked."""
        membership = self._joined()
        if output is not None and output.transaction is not None:
            membership.require_writable(output.transaction.home.path, output.transaction.id)
        elif shards:
            membership.require_readable(shards[0])

    def run(self, work: Pass[Result], destination: Destination = DISCARD) -> Result:
        """Run a pass, part by part."""
        tally, whole, done = work.tally(), work.nbytes(destination), 0
        membership, parts = self._joined(), work.parts(destination)
        for order in list(destination.orders.values())[:1]:
            membership.require_writable(order.folder, order.run)
        tasks = _Tasks(membership.cluster)
        while True:
            most = tuning.TASKS_IN_FLIGHT * max(1, sum(member.slots for member in membership.members.values()))
            while len(tasks) < most and (part := next(parts, None)) is not None:
                tasks.submit(part, self._payload(part, destination), self._preferred_worker(part, membership))
            if not len(tasks):
                return tally
            for part, future in tasks.finished():
                self._take(part, _result(future, part, membership), tally, destination)
                done += part.nbytes
                self._show(work.title, done, whole)
            signals.deliver()
            membership.watch()
            self._retries += tasks.move(membership.cluster.stranded())

    def close(self) -> None:
        """Leave the cluster, which drops what is in flight."""
        if self._membership is not None:
            self._membership.cluster.close()

    def _joined(self) -> Membership:
        if self._membership is None:
            self._membership = Membership(self.join(), self.backend, self.device, self.timeout)
        return self._membership

    def _payload(self, part: Part, destination: Destination) -> bytes:
        order = None if part.writes is None else destination.orders[part.writes]
        return packed(Job(part._replace(places=()), self.backend, self.device, self.threads, order))

    def _preferred_worker(self, part: Part, membership: Membership) -> str | None:
        """The worker that may still have the data of a part in memory."""
        addresses = (self._preferred.get(shard) for shard in part.reads)
        return next((address for address in addresses if address in membership.members), None)

    def _take(self, part: Part, outcome: Outcome, tally: Any, destination: Destination) -> None:
        """Add a result, if it is about the same files and fits into the tally."""
        for shard, seen in zip(part.reads, outcome.seen, strict=True):
            if self._identity(shard) != seen:
                raise changed_meanwhile(shard.name)
        # A worker has seen only what became of them since it began.
        refuse_changed(part.reads)
        try:
            tally.merge_part(part.places, outcome.tally)
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise _foreign() from error
        if part.writes is not None and isinstance(destination, Ordered) and outcome.built is not None:
            destination.adopt(part.writes, outcome.built)
        self._processes.add((outcome.host, outcome.process))
        self._retries += outcome.late
        clock = outcome.clock.each()
        clock.workers = 0
        self._total.add(clock)
        self._total.workers = max(self._total.workers, outcome.clock.workers)
        address = None if self._membership is None else self._membership.addresses.get((outcome.host, outcome.process))
        self._preferred |= dict.fromkeys(part.reads, address)

    def _identity(self, shard: Shard) -> Identity:
        if shard not in self._identities:
            self._identities[shard] = identity_of(shard)
        return self._identities[shard]

    def _show(self, title: str, done: int, whole: int) -> None:
        if self.progress is not None:
            counts = (self.workers.workers, "worker"), (self.workers.hosts, "host")
            who = [f"{count} {what}{'s' * (count != 1)}" for count, what in counts]
            self.progress(", ".join([title, *who]), done, max(done, whole))


class _Tasks:
    """The parts that are in flight, each with its call."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pending: dict[Future[Any], tuple[Part, bytes]] = {}
        # Not `wait`, which looks at every future each time.
        self._finished: SimpleQueue[Future[Any]] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, part: Part, payload: bytes, address: str | None) -> None:
        """Give a part to some worker, that at the address if it is free."""
        future = self._cluster.submit(call(perform, __version__, payload), address)
        self._pending[future] = part, payload
        future.add_done_callback(self._finished.put)

    def finished(self) -> Iterator[tuple[Part, Future[Any]]]:
        """The part that is done next, if that is soon."""
        with contextlib.suppress(Empty):
            future = self._finished.get(timeout=_HEARTBEAT_SECONDS)
            if future in self._pending:
                part, _ = self._pending.pop(future)
                yield part, future

    def move(self, stranded: Collection[Future[Any]]) -> int:
        """Give the parts of calls that are stranded to any worker; how many."""
        lost = [future for future in stranded if future in self._pending]
        for future in lost:
            part, payload = self._pending.pop(future)
            future.cancel()
            self.submit(part, payload, None)
        return len(lost)


def _result(future: Future[Any], part: Part, membership: Membership) -> Outcome:
    """What a worker returned. An error names files as the call did."""
    try:
        answer = future.result()
    except (Exception, SystemExit) as error:
        # One that has joined meanwhile and is not fit explains it better.
        membership.settle(_SETTLE_SECONDS)
        file = part.reads[0].name if part.reads and not isinstance(error, CancelledError) else None
        what, hint = membership.cluster.why(error)
        raise SystemRefusedError(what, file=file, code="engine", hint=hint) from error
    try:
        return read_outcome(answer, part)
    except GradtoolError as error:
        membership.settle(_SETTLE_SECONDS)
        named = {shard.source.address: shard.name for shard in part.reads}
        error.problems = tuple(
            replace(each, file=None if each.file is None else named.get(each.file, each.file))
            for each in error.problems
        )
        raise
    except ValueError as error:
        raise _foreign() from error


def _foreign() -> SystemRefusedError:
    what = "a worker returned something else than was asked for"
    return SystemRefusedError(what, code="engine", hint="run the command again")
