"""A cluster of Dask workers; alone in importing Dask, and only when it is asked for."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import threading
import warnings
from concurrent.futures import CancelledError, Future, wait
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from gradtool.engines import Member
from gradtool.errors import BackendUnavailableError, SystemRefusedError
from gradtool.store import signals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor

Answer = TypeVar("Answer")

_POLL_SECONDS = 0.2
# For an answer of a scheduler that is connected.
_ANSWER_SECONDS = 30.0
_CLOSE_SECONDS = 2.0
_ADDRESS = re.compile(r".*://.*|[^/]+:\d+", re.DOTALL)
_INSTALL = "install it here and on the workers: pip install 'gradtool[dask]'"


class Dask:
    """The workers of a scheduler, which is named by its address or by the file that it has written."""

    def __init__(self, address: str, timeout: float) -> None:
        self.name = f"the Dask scheduler at {address}"
        try:
            from distributed import Client as Untyped
        except ImportError as error:
            raise BackendUnavailableError(f"Dask cannot be loaded ({error}); {_INSTALL}", code="engine") from error
        client: Any = Untyped
        is_address = _ADDRESS.fullmatch(address)
        where = {"address": address} if is_address else {"scheduler_file": _awaited(address, timeout)}
        # What it would log, we report.
        self._muted = _mute()
        try:
            with warnings.catch_warnings(action="ignore"):
                self._client = _answer(
                    lambda: client(**where, timeout=timeout, set_as_default=False, name="gradtool"), timeout + 1
                )
        except Exception as error:
            # Anything: Dask takes what another kind of server says for sizes of its own messages, and for much else.
            self._unmute()
            said = "it is not one" if isinstance(error, (AssertionError, MemoryError)) else str(error)
            what = f"{self.name} does not answer: {said or type(error).__name__}"
            remedy = "start one with `dask scheduler`, or correct --engine"
            raise SystemRefusedError(f"{what}; {remedy}", code="engine") from error
        except BaseException:
            self._unmute()
            raise
        self._executors: dict[tuple[str | None, bool], Executor] = {}

    def members(self) -> Mapping[str, Member]:
        """The workers that the scheduler knows."""
        if self._client.status != "running":
            raise self._lost()
        try:
            slots = _answer(self._client.nthreads, _ANSWER_SECONDS)
        except Exception as error:
            raise self._lost() from error
        return {address: Member(urlsplit(address).hostname or address, count) for address, count in slots.items()}

    def submit(self, call: bytes, address: str | None = None, *, only: bool = False) -> Future[Any]:
        """Have a worker make a pickled call: any, if possible the one at an address, or that one only."""
        if (address, only) not in self._executors:
            place = {} if address is None else {"workers": [address], "allow_other_workers": not only}
            # Not pure: the same call is work to be done again.
            self._executors[address, only] = self._client.get_executor(pure=False, **place)
        with warnings.catch_warnings(action="ignore"):  # Of a call that is large, as one about many tensors is.
            return self._executors[address, only].submit(pickle.loads, call)

    def why(self, error: BaseException) -> str:
        """What happened to a call that Dask gave up."""
        if type(error).__name__ == "KilledWorker":
            last = getattr(getattr(error, "last_worker", None), "address", "unknown")
            remedy = "see their logs; --threads and smaller shards need less memory"
            return f"every worker that was given the task died, the last one at {last}; {remedy}"
        if isinstance(error, CancelledError):
            try:
                self.members()
            except SystemRefusedError as lost:
                return str(lost)
            return f"{self.name} gave a task up; run again"
        return f"a worker failed: {type(error).__name__}: {error}"

    def close(self) -> None:
        """Drop all calls, and disconnect."""
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            self._client.close(timeout=_CLOSE_SECONDS)
        self._unmute()

    def _unmute(self) -> None:
        while self._muted:
            self._muted.pop().disabled = False

    def _lost(self) -> SystemRefusedError:
        return SystemRefusedError(f"{self.name} is lost; start it and its workers again, and run again", code="engine")


def _answer(ask: Callable[[], Answer], seconds: float) -> Answer:
    """What Dask answers. It may wait for ever, so it is asked in a thread of its own, while this one handles signals.

    Raises:
        TimeoutError: it has not answered for so many seconds.
    """
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    deadline = monotonic() + seconds
    while not wait([answer], timeout=_POLL_SECONDS).done:
        signals.deliver()
        if monotonic() > deadline:
            raise TimeoutError(f"no answer for {seconds:g} s")
    return answer.result()


def _mute() -> list[logging.Logger]:
    """Disable the logs of Dask and its event loop, each of which has a level of its own; those that were enabled."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in {"distributed", "tornado"}]
    muted = [logger for logger in map(logging.getLogger, names) if not logger.disabled]
    for logger in muted:
        logger.disabled = True
    return muted


def _awaited(path: str, timeout: float) -> str:
    """The path of a scheduler's file, when it is there."""
    deadline = monotonic() + timeout
    while not os.path.exists(path):  # noqa: PTH110 - Path's own raises without permission
        if monotonic() > deadline:
            what = f"no scheduler has written it for {timeout:g} s"
            remedy = "start one with `dask scheduler --scheduler-file`"
            raise SystemRefusedError(f"{what}; {remedy}", file=path, code="engine")
        sleep(_POLL_SECONDS)
        signals.deliver()
    return path
