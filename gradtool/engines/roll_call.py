"""The workers of a cluster: waited for, asked before they get work, and watched while they have some."""

from __future__ import annotations

import os
import pickle
import secrets
from collections import Counter
from concurrent.futures import wait
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from gradtool._version import __version__
from gradtool.engines.probe import Question, answer, complaint
from gradtool.engines.work import call
from gradtool.errors import BackendUnavailableError, SystemRefusedError
from gradtool.store import signals
from gradtool.store.transaction.files import log_of, name_of
from gradtool.store.transaction.orders import FIRST_ATTEMPT, LAST_ATTEMPT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from gradtool.engines import Cluster, Member
    from gradtool.store.format.header import Shard

_HEARTBEAT_SECONDS = 0.2
_LOOK_SECONDS = 1.0


class Roll:
    """Who is there. A question that was put to all workers is put to those that join later too."""

    def __init__(self, cluster: Cluster, backend: str | None, device: int | None, timeout: float) -> None:
        self.cluster = cluster
        self.members: Mapping[str, Member] = {}
        # The address of each process.
        self.addresses: dict[tuple[str, int], str] = {}
        self._backend, self._device, self._timeout = backend, device, timeout
        self._backends: Counter[tuple[str, str]] = Counter()
        # By topic: what is asked, who was asked, and how many have answered.
        self._questions: dict[str, Callable[[], Question]] = {}
        self._asked: dict[str, set[str]] = {}
        self._answered: Counter[str] = Counter()
        self._looked = self._seen = monotonic()

    @property
    def backend(self) -> tuple[str, str]:
        """The backends of all workers that answered, and why the usual one was chosen."""
        names = sorted({name for name, _ in self._backends})
        return ", ".join(names), next(iter(self._backends.most_common(1)), (("", ""), 0))[0][1]

    def call_to_read(self, shard: Shard) -> None:
        """Ask every worker whether it sees a shard."""
        path = os.path.abspath(shard.path)  # noqa: PTH100 - as it is sent
        self._call("", lambda: Question(path, shard.stat.st_ino, None, self._backend, self._device))

    def call_to_write(self, folder: Path, run: str) -> None:
        """Ask every worker whether it sees the log of a run, whose name nobody can guess, and can write beside it."""
        log = folder / log_of(run)

        def question() -> Question:
            number = FIRST_ATTEMPT + secrets.randbelow(LAST_ATTEMPT - FIRST_ATTEMPT)
            probe = name_of(run, number, "tmp")
            return Question(str(log), log.stat().st_ino, probe, self._backend, self._device)

        self._call(run, question)

    def watch(self) -> None:
        """Look after the workers, once a second at most; ask those that are new.

        Raises:
            SystemRefusedError: the cluster is lost, or has had no worker for too long.
        """
        now = monotonic()
        if now < self._looked + _LOOK_SECONDS:
            return
        self.members, self._looked = self.cluster.members(), now
        if self.members:
            self._seen = now
        elif now > self._seen + self._timeout:
            what = f"{self.cluster.name} has had no worker for {self._timeout:g} s"
            raise SystemRefusedError(f"{what}; start some, or wait longer with --worker-timeout", code="engine")
        for topic in self._questions:
            self._ask(topic, self.members.keys() - self._asked[topic])

    def _call(self, topic: str, question: Callable[[], Question]) -> None:
        """Put a question to all workers, of which there must be one."""
        if topic in self._questions:
            return
        self._questions[topic], self._asked[topic] = question, set()
        self._seen, self._looked = monotonic(), 0.0
        self.watch()
        while not self._answered[topic]:
            sleep(_HEARTBEAT_SECONDS)
            signals.deliver()
            self.watch()

    def _ask(self, topic: str, addresses: Collection[str]) -> None:
        """Put a question to some workers, and refuse those that cannot do the work."""
        asked: dict[str, tuple[Question, Future[Any]]] = {}
        for address in addresses:
            question = self._questions[topic]()
            executor = self.cluster.executor(address, only=True)
            asked[address] = question, executor.submit(pickle.loads, call(answer, tuple(question)))
        deadline, look = monotonic() + self._timeout, monotonic() + _LOOK_SECONDS
        there, left = self.members, {future for _, future in asked.values()}
        try:
            while left and monotonic() < deadline:
                _, left = wait(left, timeout=_HEARTBEAT_SECONDS)
                signals.deliver()
                if left and monotonic() > look:
                    # One that has died will not answer.
                    there, look = self.cluster.members(), monotonic() + _LOOK_SECONDS
                    left &= {future for address, (_, future) in asked.items() if address in there}
            for address, (question, future) in asked.items():
                if address in there:
                    self._hear(address, question, future)
                    self._answered[topic] += 1
        finally:
            for _, future in asked.values():
                future.cancel()
        self._asked[topic] |= asked.keys()

    def _hear(self, address: str, question: Question, future: Future[Any]) -> None:
        host = self.members[address].host
        if not future.done():
            what = f"the worker {address} has not answered for {self._timeout:g} s"
            raise SystemRefusedError(f"{what}; stop it, or give it longer with --worker-timeout", code="engine")
        try:
            facts = future.result()
        except ImportError as error:
            what = f"the worker on {host} cannot load gradtool: {error}"
            raise _unfit(f"{what}; install gradtool {__version__} there") from error
        except Exception as error:
            raise SystemRefusedError(f"{host}: {self.cluster.why(error)}", code="engine") from error
        try:
            problem = complaint(facts, question)
            process = str(facts["host"]), int(facts["pid"])
            backend = str(facts["backend"]), str(facts["why"])
        except (TypeError, LookupError, ValueError) as error:
            what = f"the worker on {host} has another version of gradtool"
            raise _unfit(f"{what}; install {__version__} there") from error
        if problem is not None:
            raise _unfit(problem)
        if process not in self.addresses:
            self._backends[backend] += 1
        self.addresses[process] = address


def _unfit(message: str) -> BackendUnavailableError:
    return BackendUnavailableError(message, code="engine")
