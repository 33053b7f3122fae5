"""A cluster of Dask workers. This module alone imports Dask, when an engine needs it.

Dask unpickles what the scheduler and the workers send: types, exceptions, and whatever a message says is a pickle. In
this process, for this cluster, such pickles are read into objects that do nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import pickle
import re
import socket
import threading
import warnings
from concurrent.futures import CancelledError, Future, wait
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from gradtool.errors import BackendUnavailableError, SystemRefusedError, option, os_errors_about, say, shortened
from gradtool.store import signals
from gradtool.store.format.header import read_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Answer = TypeVar("Answer")

_POLL_SECONDS = 0.2
# Until a wait is announced.
_SILENT_SECONDS = 2.0
# For an answer of a scheduler that is connected.
_ANSWER_SECONDS = 30.0
_CLOSE_SECONDS = 2.0
_FILE_BYTES = 1 << 20
# How long a worker must be silent before its task is given away, however short the timeout. Heartbeats are 0.5 to 2 s
# apart, and up to 5 ms more for each worker.
_MIN_PATIENCE, _PATIENCE_FOR_EACH = 5.0, 0.05
_MAX_SLOTS = 1024
_ADDRESS = re.compile(r".*://.*|[^/]+:\d+", re.DOTALL)
# An option of Dask's command.
_START_WITH_FILE = "`dask scheduler --scheduler-file`"
_INSTALL = "install it here and on the workers: pip install 'gradtool[dask]'"


class Wait:
    """A wait for something, which `told`, if given, is called with once it takes long."""

    def __init__(self, what: str, told: Callable[[str], None] | None = None) -> None:
        self._what, self._told, self._due = what, told, monotonic() + _SILENT_SECONDS

    def check(self) -> None:
        """Handle signals, and announce a wait that has become long; called between two pauses."""
        signals.deliver()
        if self._told is not None and monotonic() > self._due:
            self._told(self._what)
            self._told = None


class Dask:
    """The workers of a scheduler, which is named by its address or by the file that it has written.

    An address may refuse connections for `refused` seconds, because its scheduler is being started.
    """

    def __init__(self, address: str, timeout: float, refused: float, told: Callable[[str], None] | None = None) -> None:
        self.name, self._timeout = f"the Dask scheduler at {address}", timeout
        # The last sign of life of each worker, as the scheduler dates it, and when it was new here.
        self._signs: dict[str, tuple[Any, float]] = {}
        try:
            client = _client_class()
        except ImportError as error:
            raise BackendUnavailableError(f"Dask cannot be loaded: {error}", code="engine", hint=_INSTALL) from error
        where = address
        if not _ADDRESS.fullmatch(address):
            # A scheduler that starts will write the file again.
            where, refused = _address_in(address, timeout, Wait(f"a scheduler to write {address}", told)), timeout
        with contextlib.ExitStack() as stack:
            # What Dask would log, we report.
            stack.enter_context(_muted())
            try:
                with warnings.catch_warnings(action="ignore"):
                    self._client = _connected(client, where, timeout, refused, Wait(f"a scheduler at {where}", told))
            except Exception as error:
                # Any error: Dask takes the bytes of another kind of server for sizes of its own messages, for example.
                said = "it is not one" if isinstance(error, (AssertionError, MemoryError)) else shortened(str(error))
                message = f"{self.name} does not answer: {said or type(error).__name__}"
                hint = "start one with `dask scheduler`, correct {}, or wait longer with {}"
                hint = say(hint, option("engine"), option("worker_timeout"))
                raise SystemRefusedError(message, code="engine", hint=hint) from error
            self._muted = stack.pop_all()

    def members(self) -> Mapping[str, int]:
        """Return the workers that the scheduler knows and that have lately given a sign of life, with their threads."""
        client = self._client
        # The task that listens to the scheduler ends at a message that it cannot read.
        listens = getattr(client, "_handle_report_task", None)
        if client.status != "running" or (listens is not None and listens.done()):
            raise self._lost()
        try:
            workers = _answer(lambda: client.sync(client.scheduler.identity), _ANSWER_SECONDS)["workers"]
            now, patience = monotonic(), max(self._timeout, _MIN_PATIENCE + _PATIENCE_FOR_EACH * len(workers))
            signs = {}
            for address, worker in workers.items():
                sign, since = self._signs.get(address, (None, now))
                signs[address] = (sign, since) if sign == worker["last_seen"] else (worker["last_seen"], now)
            slots = {address: min(max(int(worker["nthreads"]), 1), _MAX_SLOTS) for address, worker in workers.items()}
        except Exception as error:
            raise self._lost() from error
        self._signs = signs
        return {address: count for address, count in slots.items() if now <= signs[address][1] + patience}

    def submit(self, call: bytes, address: str) -> Future[Any]:
        """Have the worker at an address make a pickled call."""
        try:
            return _run_inert(self._submit, call, address)
        except Exception as error:
            raise self._lost() from error

    def _submit(self, call: bytes, address: str) -> Future[Any]:
        with warnings.catch_warnings(action="ignore"):  # Of a large call, such as a call about many tensors.
            # Not pure: the same call is work to be done again.
            future = self._client.submit(pickle.loads, call, pure=False, workers=[address])

        async def result() -> Any:
            return await future

        # Not Dask's executor, whose futures never end where an answer cannot be read.
        return asyncio.run_coroutine_threadsafe(result(), self._client.loop.asyncio_loop)

    def why(self, error: BaseException) -> tuple[str, str | None]:
        """Say what happened to a call that Dask gave up, with a hint; raises `SystemRefusedError` if all is lost."""
        self.members()
        if isinstance(error, CancelledError):
            return f"{self.name} gave up a task", "run the command again"
        return f"a worker failed: {shortened(f'{type(error).__name__}: {error}')}", None

    def close(self) -> None:
        """Drop all calls, and disconnect."""
        with self._muted, contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            self._client.close(timeout=_CLOSE_SECONDS)

    def _lost(self) -> SystemRefusedError:
        hint = "start it and its workers again, and run the command again"
        return SystemRefusedError(f"{self.name} is lost", code="engine", hint=hint)


def _connected(client: Callable[..., Any], where: str, timeout: float, refused: float, waiting: Wait) -> Any:
    """Connect to a scheduler; raise `ConnectionRefusedError` if nothing has listened there for so long."""
    connect = partial(client, where, timeout=refused, set_as_default=False, name="gradtool")
    try:
        return _answer(connect, refused + 1, waiting)
    except OSError:
        if _refuses(where):
            raise ConnectionRefusedError(f"the connection was refused for {refused:g} s") from None
        if refused >= timeout:
            raise
    return _connected(client, where, timeout - refused, timeout - refused, waiting)


def _refuses(where: str) -> bool:
    """Check whether an address refuses connections; the error of Dask may tell of another attempt."""
    from distributed.comm.addressing import parse_address, parse_host_port

    try:
        socket.create_connection(parse_host_port(parse_address(where)[1]), _CLOSE_SECONDS).close()
    except (OSError, ValueError) as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _answer(ask: Callable[[], Answer], seconds: float, waiting: Wait | None = None) -> Answer:
    """Ask Dask, which may never answer, in another thread, while this thread handles signals.

    Raises:
        TimeoutError: there is no answer for so many seconds.
    """
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(_run_inert(ask))
        except BaseException as error:  # noqa: BLE001
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    deadline, waiting = monotonic() + seconds, waiting or Wait("an answer")
    while not wait([answer], timeout=_POLL_SECONDS).done:
        waiting.check()
        if monotonic() > deadline:
            raise TimeoutError(f"no answer for {seconds:g} s")
    return answer.result()


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Disable the logs of Dask and its event loop, each of which has a level of its own."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in {"distributed", "tornado"}]
    loggers = [logger for logger in map(logging.getLogger, names) if not logger.disabled]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in loggers:
            logger.disabled = False


def _address_in(path: str, timeout: float, waiting: Wait) -> str:
    """Read the address from a scheduler's file, as soon as the scheduler has written it."""
    deadline = monotonic() + timeout
    while True:
        # The scheduler's file is empty until it is written.
        with os_errors_about(path), contextlib.suppress(FileNotFoundError):
            if Path(path).stat().st_size:
                break
        if monotonic() > deadline:
            message = f"no scheduler has written it for {timeout:g} s"
            raise SystemRefusedError(message, file=path, code="engine", hint=f"start one with {_START_WITH_FILE}")
        sleep(_POLL_SECONDS)
        waiting.check()
    text = read_small(Path(path), _FILE_BYTES).content
    with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
        if type(address := json.loads(text)["address"]) is str:
            return address
    hint = say("start one with {}, or correct {}", _START_WITH_FILE, option("engine"))
    raise SystemRefusedError("is not the file of a Dask scheduler", file=path, code="engine", hint=hint)


# Whether pickles are for `Dask`. A process may have other clients, or workers. Dask's own tasks inherit this.
_reads_inert: ContextVar[bool] = ContextVar("reads_inert", default=False)


class _Inert(Exception):  # noqa: N818 - it stands for anything
    """Whatever a pickle names: it takes any arguments and any state, and remembers nothing but texts."""

    def __init__(self, *args: object, **_: object) -> None:
        super().__init__(*(text for text in args if type(text) is str))

    def __setstate__(self, _: object) -> None:
        pass


class GuardedUnpickler(pickle.Unpickler):
    """Reads a pickle without importing or calling what it names."""

    def find_class(self, module: str, name: str) -> Any:
        """Stand in for a name. Dask has to know bytes, because all answers are bytes."""
        if (module, name) == ("builtins", "bytes"):
            return bytes
        return _exception if name.startswith("unpickle_exception") else type(shortened(name), (_Inert,), {})


def _exception(kind: Callable[..., _Inert], args: Any, *_: object) -> _Inert:
    """Make an exception as Dask pickles it: with its arguments, or with attributes that include them."""
    return kind(*(args["args"] if isinstance(args, dict) else args))


def _loads(data: Any, **options: Any) -> Any:
    """Read a pickle for Dask; where it comes from the cluster of an engine, without believing it."""
    if not _reads_inert.get():
        return pickle.loads(data, **options)  # noqa: S301 - as Dask does
    return GuardedUnpickler(io.BytesIO(data), **options).load()


def _run_inert(function: Callable[..., Answer], *arguments: object) -> Answer:
    """Call a function; pickles that Dask reads in it, or in tasks that it starts, stay inert."""
    context = copy_context()
    context.run(_reads_inert.set, True)
    return context.run(function, *arguments)


def _client_class() -> Any:
    """Import Dask's client, so that it reads pickles as `_loads` does.

    Raises:
        ImportError: Dask is not installed, or reads pickles in a way that is not known here.
    """
    import distributed
    from distributed.protocol import pickle as untyped

    protocol: Any = untyped
    if getattr(protocol, "pickle", None) is pickle:
        protocol.pickle = SimpleNamespace(**vars(pickle) | {"loads": _loads})
    if type(_run_inert(protocol.loads, pickle.dumps(ValueError()))) is ValueError:
        raise ImportError("gradtool cannot keep this version from running what it is sent")
    # Anyone may send events, to have them printed here.
    return type("Client", (distributed.Client,), {"_handle_event": lambda *_, **__: None, "_handle_task_erred": _end})


def _end(client: Any, key: str | None = None, exception: object = None, **_: object) -> None:
    """End a call with an error. Dask would never end it where the error or its traceback cannot be read."""
    try:
        error: Any = GuardedUnpickler(io.BytesIO(exception)).load()  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - bytes that are no pickle may raise anything
        error = None
    if (state := client.futures.get(key)) is not None:
        state.set_error(error if isinstance(error, _Inert) else _Inert("it cannot be read"), None)
