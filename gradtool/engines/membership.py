"""The workers of a cluster: waited for, asked before they get work, and watched while they have some."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool._version import __version__
from gradtool.engines.work import call
from gradtool.engines.worker_check import Question, problem_with, report_in, report_status
from gradtool.errors import BackendUnavailableError, SystemRefusedError, shortened
from gradtool.store import signals
from gradtool.store.transaction.files import log_of, name_of
from gradtool.store.transaction.orders import FIRST_ATTEMPT, LAST_ATTEMPT
from gradtool.wording import option, say

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from gradtool.engines.protocol import Cluster, WorkerInfo
    from gradtool.store.format.header import Shard

_HEARTBEAT_SECONDS = 0.2
_LOOK_SECONDS = 1.0
# Until a worker that has not answered is known to be busy, and not silent.
_GRACE_SECONDS = 2.0


class _Asked(NamedTuple):
    """A question that a worker has been asked."""

    topic: str
    address: str
    host: str
    question: Question
    deadline: float


class Membership:
    """Who is there. A question that was put to all workers is put to those that join later too."""

    def __init__(self, cluster: Cluster, backend: str | None, device: int | None, timeout: float) -> None:
        self.cluster = cluster
        self.members: Mapping[str, WorkerInfo] = {}
        # The address of each process.
        self.addresses: dict[tuple[str, str], str] = {}
        self._backend, self._device, self._timeout = backend, device, timeout
        self._backends: Counter[tuple[str, str]] = Counter()
        # By topic: what is asked, who was asked, and how many have answered.
        self._questions: dict[str, Callable[[], Question]] = {}
        self._asked: dict[str, set[str]] = {}
        self._answered: Counter[str] = Counter()
        self._pending: dict[Future[Any], _Asked] = {}
        self._answers: SimpleQueue[Future[Any]] = SimpleQueue()
        self._looked = self._seen = monotonic()

    @property
    def backend(self) -> tuple[str, str]:
        """The backends of all workers that answered, and why the usual one was options."""
        names = sorted({name for name, _ in self._backends})
        return ", ".join(names), next(iter(self._backends.most_common(1)), (("", ""), 0))[0][1]

    def require_readable(self, shard: Shard) -> None:
        """Ask every worker whether it sees a shard."""
        path, inode = shard.source.address, shard.source.inode
        self._call("", lambda: Question(path, inode, None, self._backend, self._device))

    def require_writable(self, folder: Path, run: str) -> None:
        """Ask every worker whether it sees the log of a run, whose name nobody can guess, and can write beside it."""
        log = folder / log_of(run)

        def question() -> Question:
            number = FIRST_ATTEMPT + secrets.randbelow(LAST_ATTEMPT - FIRST_ATTEMPT)
            probe = name_of(run, number, "tmp")
            return Question(str(log), log.stat().st_ino, probe, self._backend, self._device)

        self._call(run, question)

    def watch(self) -> None:
        """Look after the workers, once a second at most; ask those that are new, and hear what they have answered.

        One that joins late may get tasks before it is asked, and answer only after these.

        Raises:
            SystemRefusedError: the cluster is lost, or has had no worker for too long.
            BackendUnavailableError: a worker cannot do the work.
        """
        while not self._answers.empty():
            self._hear(self._answers.get())
        now = monotonic()
        if now < self._looked + _LOOK_SECONDS:
            return
        self.members, self._looked = self.cluster.members(), now
        if self.members:
            self._seen = now
        elif now > self._seen + self._timeout:
            what = f"{self.cluster.name} has had no worker for {self._timeout:g} s"
            hint = say("start some, or wait longer with {}", option("worker_timeout"))
            raise SystemRefusedError(what, code="engine", hint=hint)
        # One that has died will not answer; another one may come to its address.
        self._pending = {future: asked for future, asked in self._pending.items() if asked.address in self.members}
        for topic, asked in self._asked.items():
            asked.intersection_update(self.members)
            for address in self.members.keys() - asked:
                self._ask(topic, address)

    def settle(self, seconds: float) -> None:
        """Wait some seconds for the answers of all workers that are there now; raises what `watch` does."""
        self._looked, deadline = -_LOOK_SECONDS, monotonic() + seconds
        self.watch()
        while self._pending and monotonic() < deadline:
            self._wait()

    def _call(self, topic: str, question: Callable[[], Question]) -> None:
        """Put a question to all workers, of which there must be one, and wait for their answers."""
        if topic in self._questions:
            return
        self._questions[topic], self._asked[topic] = question, set()
        self._seen, self._looked = monotonic(), -_LOOK_SECONDS
        self.watch()
        while self._pending or not self._answered[topic]:
            self._wait()
            late = [asked.address for asked in self._pending.values() if asked.deadline < monotonic()]
            if late:
                what = f"the worker {late[0]} has not answered for {self._timeout:g} s"
                hint = say("stop it, or wait longer with {}", option("worker_timeout"))
                raise SystemRefusedError(what, code="engine", hint=hint)

    def _wait(self) -> None:
        with contextlib.suppress(Empty):
            self._hear(self._answers.get(timeout=_HEARTBEAT_SECONDS))
        signals.deliver()
        self.watch()

    def _ask(self, topic: str, address: str) -> None:
        question, host = self._questions[topic](), self.members[address].host
        future = self.cluster.submit(call(report_status, tuple(question)), address, only=True)
        self._asked[topic].add(address)
        self._pending[future] = _Asked(topic, address, host, question, monotonic() + self._timeout + _GRACE_SECONDS)
        future.add_done_callback(self._answers.put)

    def _hear(self, future: Future[Any]) -> None:
        """Refuse a worker that cannot do the work."""
        asked = self._pending.pop(future, None)
        if asked is None:
            return
        try:
            answered = future.result()
        except Exception as error:
            if type(error).__name__ in {"ImportError", "ModuleNotFoundError"}:
                what = f"the worker on {asked.host} cannot load gradtool: {shortened(str(error))}"
                raise _unfit(what, f"install gradtool {__version__} there") from error
            what, hint = self.cluster.why(error)
            raise SystemRefusedError(f"{asked.host}: {what}", code="engine", hint=hint) from error
        try:
            report = report_in(answered)
        except ValueError as error:
            what = f"the worker on {asked.host} has another version of gradtool"
            raise _unfit(what, f"install {__version__} there") from error
        if (problem := problem_with(report, asked.question)) is not None:
            raise _unfit(*problem)
        process, backend = (report["host"], report["process"]), (report["backend"], report["why"])
        if process not in self.addresses:
            self._backends[backend] += 1
        self.addresses[process] = asked.address
        self._answered[asked.topic] += 1


def _unfit(message: str, hint: str | None) -> BackendUnavailableError:
    return BackendUnavailableError(message, code="engine", hint=hint)
