"""What a worker process does: a part of a pass, on files that it opens by their paths.

A call is sent as one pickle that makes the call when it is read, so that whoever passes it on needs no gradtool. Files
are sent as paths, and looked at where the pickle is read: they must be those that the command has read the headers of.
What comes back is never a pickle (`gradtool.engines.wire`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pickle
import secrets
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool._version import __version__
from gradtool.backends.choose import Choice, choose
from gradtool.engines import wire
from gradtool.engines.threads import Threads, default_threads
from gradtool.errors import (
    BackendUnavailableError,
    GradtoolError,
    SystemRefusedError,
    changed_meanwhile,
    os_errors_about,
    shortened,
)
from gradtool.store.format.header import Shard
from gradtool.store.io.channel import Clock
from gradtool.store.io.destination import NewFiles
from gradtool.store.late import patiently
from gradtool.store.source import Source, open_source, read_range
from gradtool.store.transaction.attempts import Attempt
from gradtool.store.transaction.orders import Built
from gradtool.wording import option, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradtool.engines.protocol import Part
    from gradtool.store.transaction.orders import Order

HOST = os.uname().nodename
# In containers, processes may share the name of a host and a number.
_SALT = secrets.token_hex(4)


class Job(NamedTuple):
    """A part, what to do it with, and the new file that it writes."""

    part: Part
    backend: str | None
    device: int | None
    threads: int | None
    order: Order | None


class Identity(NamedTuple):
    """A file as a process sees it: its version, and a digest of its header."""

    version: str
    digest: str


class Outcome(NamedTuple):
    """What was collected and built, the files as they were seen, and who did it; `late` files had to be waited for."""

    tally: Any
    built: Built | None
    seen: list[Identity]
    clock: Clock
    seconds: float
    host: str
    process: str
    late: int


def identity_of(shard: Shard) -> Identity:
    """A shard as it is seen here; raises `SystemRefusedError` if it is not the one whose header was read."""
    with os_errors_about(shard.name), contextlib.closing(shard.source.open()) as reader:
        digest = hashlib.blake2b(read_range(reader, 0, shard.data_start), digest_size=16).hexdigest()
        if not reader.is_unchanged:
            raise changed_meanwhile(shard.name)
    return Identity(shard.source.version, digest)


def process() -> str:
    """An ID of this process."""
    return f"{os.getpid()}-{_SALT}"


def call(function: Callable[..., Any], *arguments: Any) -> bytes:
    """A call of plain values, as a pickle that makes it when it is read."""
    return pickle.dumps(_Call(function, arguments))


def packed(job: Job) -> bytes:
    """A job as a pickle. Of a shard, only what is needed to read its data is sent."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(job)
    return buffer.getvalue()


def perform(version: str, payload: bytes) -> bytes:
    """Do a job; what `read_outcome` reads, errors too."""
    try:
        return wire.packed(_done(version, payload))
    except SystemRefusedError as error:
        error.problems = [replace(one, message=say("{} (worker on {})", one.message, HOST)) for one in error.problems]
        return wire.packed_error(error)
    except GradtoolError as error:
        return wire.packed_error(error)
    except MemoryError:
        what, hint = f"out of memory on the worker on {HOST}", say("use fewer {}", option("threads"))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the command is told of any
        what, hint = f"the worker on {HOST} failed: {type(error).__name__}: {shortened(str(error))}", None
    return wire.packed_error(SystemRefusedError(what, code="engine", hint=hint))


def read_outcome(data: object, part: Part) -> Outcome:
    """What was answered about a part.

    Raises:
        GradtoolError: the job failed, because an input is not the file that the command has read, or reading failed.
        ValueError: it is no answer about this part.
    """
    built = None if part.writes is None else Built(0, 0, 0)
    seen = [Identity("", "")] * len(part.reads)
    return wire.unpacked(data, Outcome(part.work.tally(), built, seen, Clock(), 0.0, "", "", 0))


def _done(version: str, payload: bytes) -> Outcome:
    if version != __version__:
        what = f"gradtool is {__version__} and not {version}"
        raise SystemRefusedError(what, hint="install the same version everywhere")
    began, late = perf_counter(), _late.count
    job: Job = pickle.loads(payload)  # noqa: S301 - the engine lets its users run anything here
    choice = _chosen(job.backend, job.device)
    threads = Threads(choice.backend, job.threads or default_threads())
    seen = [identity_of(shard) for shard in job.part.reads]
    built = None
    if job.order is None:
        tally = threads.run(job.part.work)
        refuse_changed(job.part.reads)
    else:
        with Attempt(job.order) as attempt:
            threads.progress = lambda *_: attempt.look()
            tally = threads.run(job.part.work, NewFiles({job.order.new.shard: (job.order.new, attempt.file)}))
            refuse_changed(job.part.reads)
            built = attempt.finish()
    threads.close()
    seconds = perf_counter() - began
    return Outcome(tally.compact(), built, seen, threads.clock, seconds, HOST, process(), _late.count - late)


def refuse_changed(shards: Sequence[Shard]) -> None:
    """Raise `SystemRefusedError` if a file was replaced or written to since its header was read."""
    for shard in shards:
        # Opened, because a status may be an old one where files come over a network.
        with contextlib.suppress(OSError), contextlib.closing(shard.source.open()) as reader:
            if reader.is_unchanged:
                continue
        raise changed_meanwhile(shard.name)


@functools.lru_cache(maxsize=4)
def _chosen(backend: str | None, device: int | None) -> Choice:
    return choose(backend, device)


class _Late:
    """How often this process has waited for a file to be shown."""

    count = 0


_late = _Late()


class _Call:
    """A pickle of this is a call."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


class _Pickler(pickle.Pickler):
    """Sends shards as what `_seen` needs to find them again."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Shard:
            return NotImplemented
        source = value.source
        return _seen, (source.address, value.data_start, source.size, source.version)


def _seen(path: str, data_start: int, size: int, version: str) -> Shard:
    """The shard at a path as it is seen here; one that is yet to be made has no version."""
    if not version:
        return Shard(Source(path, size), data_start, {}, ())

    def look() -> Source | None:
        with contextlib.closing(open_source(Path(path))) as reader:
            return reader.source if reader.source.version == version else None

    with os_errors_about(path):
        try:
            source, tries = patiently(look)
        except (FileNotFoundError, NotADirectoryError) as error:
            what, hint = f"the worker on {HOST} does not see it", "mount the same file system there, at the same path"
            raise BackendUnavailableError(what, file=path, code="engine", hint=hint) from error
    _late.count += tries
    if source is None:
        raise changed_meanwhile(path)
    return Shard(source, data_start, {}, ())
