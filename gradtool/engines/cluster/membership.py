"""The workers of a cluster: waited for, checked before they get work, and watched while they have some."""

from __future__ import annotations

from concurrent.futures import Future, wait
from time import monotonic
from typing import TYPE_CHECKING, Any

from gradtool._version import __version__
from gradtool.engines.cluster import wire
from gradtool.engines.cluster.work import Report, call_for
from gradtool.errors import BackendUnavailableError, GradtoolError, SystemRefusedError, option, say, shortened
from gradtool.store import signals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradtool.engines.cluster.dask import Dask
    from gradtool.engines.cluster.work import Check

HEARTBEAT_SECONDS = 0.2
_LOOK_SECONDS = 1.0
# Until a worker that has not answered is known to be busy, and not silent.
_GRACE_SECONDS = 2.0


class Membership:
    """Who is there. Each worker is asked whether it is fit, even one that joins late, and gets work once it says so."""

    def __init__(self, cluster: Dask, timeout: float, check: Check) -> None:
        self.cluster, self._timeout = cluster, timeout
        # How many tasks each worker that is fit does at a time, and what it computes with, by its address.
        self.fit: dict[str, int] = {}
        self.reports: dict[str, Report] = {}
        # What workers are asked, who has not answered yet, and since when.
        self._question = call_for(check)
        self._asked: dict[str, tuple[Future[Any], float]] = {}
        self._members: Mapping[str, int] = {}
        self._looked, self._seen = -_LOOK_SECONDS, monotonic()

    def wait_until_fit(self) -> None:
        """Wait for the answers of all workers, of which there must be one.

        Raises:
            SystemRefusedError: as `watch`; or a worker is busy with something else.
            BackendUnavailableError: as `watch`.
        """
        self.watch()
        while self._asked or not self.fit:
            wait([future for future, _ in self._asked.values()] or [Future()], HEARTBEAT_SECONDS)
            signals.deliver()
            self.watch()
            late = [address for address, (_, since) in self._asked.items() if monotonic() > since + self._timeout]
            if late:
                what = f"the worker {late[0]} has not answered for {self._timeout:g} s"
                hint = say("stop it, or wait longer with {}", option("worker_timeout"))
                raise SystemRefusedError(what, code="engine", hint=hint)

    def watch(self) -> bool:
        """Hear what workers have answered and, once a second at most, look who is there; return whether it looked.

        Raises:
            SystemRefusedError: the cluster is lost, or has had no worker for too long.
            BackendUnavailableError: a worker cannot do the work.
        """
        for address, (future, _) in list(self._asked.items()):
            if future.done():
                del self._asked[address]
                self._hear(address, future)
        now = monotonic()
        if now < self._looked + _LOOK_SECONDS:
            return False
        members = self._members = self.cluster.members()
        self._looked = now
        if members:
            self._seen = now
        elif now > self._seen + self._timeout:
            what = f"{self.cluster.name} has had no worker for {self._timeout:g} s"
            hint = say("start some, or wait longer with {}", option("worker_timeout"))
            raise SystemRefusedError(what, code="engine", hint=hint)
        # One that has died will not answer; another one may come to its address.
        self.fit = {address: members[address] for address in self.fit if address in members}
        self._asked = {address: asked for address, asked in self._asked.items() if address in members}
        for address in members.keys() - self.fit.keys() - self._asked.keys():
            self._asked[address] = self.cluster.submit(self._question, address), now + _GRACE_SECONDS
        return True

    def _hear(self, address: str, future: Future[Any]) -> None:
        """Count a worker as fit, or raise what is wrong with it."""
        try:
            self.reports[address] = wire.unpacked(future.result(), Report())
        except GradtoolError:
            raise
        except ValueError as error:
            what = f"the worker {address} has another version of gradtool"
            raise BackendUnavailableError(what, code="engine", hint=f"install {__version__} there") from error
        except Exception as error:
            if type(error).__name__ in {"ImportError", "ModuleNotFoundError"}:
                what = f"the worker {address} cannot load gradtool: {shortened(str(error))}"
                hint = f"install gradtool {__version__} there"
                raise BackendUnavailableError(what, code="engine", hint=hint) from error
            what, remedy = self.cluster.why(error)
            raise SystemRefusedError(f"{address}: {what}", code="engine", hint=remedy) from error
        self.fit[address] = self._members[address]
