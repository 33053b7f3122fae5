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
from gradtool.engines import DivisiblePass, Found, Part, Pass, Staff
from gradtool.engines.roll_call import Roll
from gradtool.engines.work import Done, Identity, Job, call, identity_of, outcome, packed, perform, refuse_changed
from gradtool.errors import GradtoolError, SystemRefusedError, UsageError, changed_meanwhile
from gradtool.store import signals
from gradtool.store.io.channel import Clock
from gradtool.store.transaction.destination import DISCARD
from gradtool.store.transaction.orders import Ordered
from gradtool.wording import option, say

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from concurrent.futures import Future

    from gradtool.engines import Cluster, Progress
    from gradtool.store.format.header import Shard
    from gradtool.store.transaction.destination import Destination
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
    _roll: Roll | None = None
    _total: Clock = field(default_factory=Clock)
    # By host and ID.
    _processes: set[tuple[str, str]] = field(default_factory=set)
    _retries: int = 0
    # Where the data of a shard may still be in memory, and what workers must have seen of it.
    _homes: dict[Shard, str | None] = field(default_factory=dict)
    _identities: dict[Shard, Identity] = field(default_factory=dict)

    @property
    def clock(self) -> Clock:
        """Bytes of all processes; seconds of one of them, on average."""
        one, count = self._total, max(1, len(self._processes))
        return replace(one, read=one.read / count, compute=one.compute / count, write=one.write / count)

    @property
    def staff(self) -> Staff:
        """The processes that did something."""
        backend, why = ("", "") if self._roll is None else self._roll.backend
        return Staff(len(self._processes), len({host for host, _ in self._processes}), self._retries, backend, why)

    def prepare(self, output: Output | None, shards: Sequence[Shard]) -> None:
        """Ask every worker whether it can read these files, and write where the output is locked."""
        roll = self._known_roll()
        if output is not None and output.transaction is not None:
            roll.call_to_write(output.transaction.home.path, output.transaction.id)
        elif shards:
            roll.call_to_read(shards[0])

    def run(self, one: Pass[Found], destination: Destination = DISCARD) -> Found:
        """Run a pass, part by part."""
        found, whole, done = one.empty(), one.nbytes(destination), 0
        if not isinstance(one, DivisiblePass):
            what = say("{} cannot do this", option("engine", self.name))
            raise UsageError(what, hint=say("use {}", option("engine", "threads")))
        roll, parts = self._known_roll(), one.parts(destination)
        for order in list(destination.orders.values())[:1]:
            roll.call_to_write(order.folder, order.run)
        tasks = _Tasks(roll.cluster)
        while True:
            most = tuning.TASKS_IN_FLIGHT * max(1, sum(member.slots for member in roll.members.values()))
            while len(tasks) < most and (part := next(parts, None)) is not None:
                tasks.submit(part, self._payload(part, destination), self._home(part, roll))
            if not len(tasks):
                return found
            for part, future in tasks.finished():
                self._take(part, _result(future, part, roll), found, destination)
                done += part.nbytes
                self._show(one.title, done, whole)
            signals.deliver()
            roll.watch()
            self._retries += tasks.move(roll.cluster.stranded())

    def close(self) -> None:
        """Leave the cluster, which drops what is in flight."""
        if self._roll is not None:
            self._roll.cluster.close()

    def _known_roll(self) -> Roll:
        if self._roll is None:
            self._roll = Roll(self.join(), self.backend, self.device, self.timeout)
        return self._roll

    def _payload(self, part: Part, destination: Destination) -> bytes:
        order = None if part.writes is None else destination.orders[part.writes]
        return packed(Job(part._replace(places=()), self.backend, self.device, self.threads, order))

    def _home(self, part: Part, roll: Roll) -> str | None:
        """The worker that may still have the data of a part in memory."""
        homes = (self._homes.get(shard) for shard in part.reads)
        return next((home for home in homes if home in roll.members), None)

    def _take(self, part: Part, done: Done, found: Any, destination: Destination) -> None:
        """Add a result, if it is about the same files and fits into what was found."""
        for shard, seen in zip(part.reads, done.seen, strict=True):
            if self._identity(shard) != seen:
                raise changed_meanwhile(shard.path)
        # A worker has seen only what became of them since it began.
        refuse_changed(part.reads)
        try:
            found.put(part.places, done.found)
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise _foreign() from error
        if part.writes is not None and isinstance(destination, Ordered) and done.built is not None:
            destination.adopt(part.writes, done.built)
        self._processes.add((done.host, done.process))
        self._retries += done.late
        clock = done.clock.each()
        clock.workers = 0
        self._total.add(clock)
        self._total.workers = max(self._total.workers, done.clock.workers)
        address = None if self._roll is None else self._roll.addresses.get((done.host, done.process))
        self._homes |= dict.fromkeys(part.reads, address)

    def _identity(self, shard: Shard) -> Identity:
        if shard not in self._identities:
            self._identities[shard] = identity_of(shard)
        return self._identities[shard]

    def _show(self, title: str, done: int, whole: int) -> None:
        if self.progress is not None:
            counts = (self.staff.workers, "worker"), (self.staff.hosts, "host")
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

    def submit(self, part: Part, payload: bytes, home: str | None) -> None:
        """Give a part to some worker, to the one at home if it is free."""
        future = self._cluster.submit(call(perform, __version__, payload), home)
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


def _result(future: Future[Any], part: Part, roll: Roll) -> Done:
    """What a worker returned. An error names files as the call did."""
    try:
        answer = future.result()
    except (Exception, SystemExit) as error:
        # One that has joined meanwhile and is not fit explains it better.
        roll.settle(_SETTLE_SECONDS)
        file = part.reads[0].path if part.reads and not isinstance(error, CancelledError) else None
        what, hint = roll.cluster.why(error)
        raise SystemRefusedError(what, file=file, code="engine", hint=hint) from error
    try:
        return outcome(answer, part)
    except GradtoolError as error:
        roll.settle(_SETTLE_SECONDS)
        named = {str(shard.path.absolute()): str(shard.path) for shard in part.reads}
        error.problems = tuple(
            replace(one, file=None if one.file is None else named.get(one.file, one.file)) for one in error.problems
        )
        raise
    except ValueError as error:
        raise _foreign() from error


def _foreign() -> SystemRefusedError:
    what = "a worker returned something else than was asked for"
    return SystemRefusedError(what, code="engine", hint="run the command again")
