"""What a worker process does: it checks whether it is fit, and does parts of passes on files that it opens by path.

A call is sent as a pickle that makes the call when it is read, so that processes between need no gradtool. Files
are sent as paths, and looked at where the pickle is read: they must be those that the command has read the headers of.
What comes back is never a pickle (`gradtool.engines.cluster.wire`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import secrets
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool._version import __version__
from gradtool.backends.choose import Choice, choose
from gradtool.engines.cluster import wire
from gradtool.engines.cluster.remote_files import retry_until_visible, waits
from gradtool.engines.threads import Threads, default_threads
from gradtool.errors import (
    BackendUnavailableError,
    BadInputError,
    GradtoolError,
    SystemRefusedError,
    as_command,
    changed_meanwhile,
    option,
    os_errors_about,
    say,
    shortened,
)
from gradtool.store.format.tensors import Shard
from gradtool.store.io.channel import Clock
from gradtool.store.io.destination import NewFiles
from gradtool.store.source import Source, read_range

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradtool.engines.cluster.remote_files import BuildRequest
    from gradtool.engines.passes import Part
    from gradtool.store.fs import File

HOST = os.uname().nodename
# In containers, processes may share the name of a host and a number.
_SALT = secrets.token_hex(4)
_MOUNT = "mount the same file system there, at the same path"


class Report(NamedTuple):
    """The answer of a worker that is fit: its backend, and why that backend."""

    backend: str = ""
    why: str = ""


class Check(NamedTuple):
    """Asks a worker whether it is fit: sees a file, has a backend and, for a `user`, can write to that file."""

    path: str
    inode: int
    user: int | None
    backend: str | None
    device: int | None

    def perform(self) -> Report:
        """Return what the worker computes with; raises `BackendUnavailableError` if it is not fit."""
        try:
            source = retry_until_visible(Path(self.path), lambda source: source.inode == self.inode)
        except (OSError, BadInputError):
            source = None
        if source is None:
            raise _unfit(f" does not see {self.path}", _MOUNT)
        try:
            choice = _backend(self.backend, self.device)
        except GradtoolError as error:
            (problem,) = error.problems
            raise _unfit(say(": {}", problem.message), problem.hint) from error
        if self.user is not None:
            if os.geteuid() != self.user:
                message = f" runs as user {os.geteuid()}, and this command as user {self.user}"
                raise _unfit(message, "start the workers as the user who runs the command")
            try:
                os.close(os.open(self.path, os.O_RDWR | os.O_CLOEXEC))
            except OSError as error:
                message = f" cannot write in {Path(self.path).parent}: {error.strerror}"
                raise _unfit(message, "make it writable there") from error
        return Report(choice.backend.name, as_command(choice.why))


class Outcome(NamedTuple):
    """The answer about a part: what it collected, fingerprints of the files that were read, and which process did it.

    `waits` counts the pauses for files that were late.
    """

    tally: Any
    fingerprints: list[str]
    clock: Clock
    host: str = ""
    process: str = ""
    waits: int = 0


class Job(NamedTuple):
    """Asks a worker to do a part of a pass, and to write the new file of that part."""

    part: Part
    backend: str | None
    device: int | None
    threads: int | None
    request: BuildRequest | None

    def perform(self) -> Outcome:
        """Do the part."""
        part, request = self.part, self.request
        threads = Threads(_backend(self.backend, self.device).backend, self.threads or default_threads())
        if request is None:
            tally = threads.run(part.pass_)
        else:
            with request.opened() as file:
                threads.progress = partial(_require_there, file)
                tally = threads.run(part.pass_, NewFiles([(request.new, file)]))
        threads.close()
        fingerprints = [fingerprint(shard) for shard in part.reads]
        waited, waits[:] = len(waits), []
        return Outcome(tally.compact(), fingerprints, threads.clock, HOST, f"{os.getpid()}-{_SALT}", waited)


def empty_outcome(part: Part) -> Outcome:
    """Return the outcome that an answer about a part is read into."""
    return Outcome(part.pass_.tally(), [""] * len(part.reads), Clock())


def call_for(task: Check | Job) -> bytes:
    """Return a call that does a task, as a pickle; of a shard, only what is needed to read its data is sent."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(task)
    return pickle.dumps(RemoteCall(answer, __version__, buffer.getvalue()))


def answer(version: str, payload: bytes) -> bytes:
    """Do a task of the same version, and return the packed answer, or the error."""
    if version != __version__:
        message = f" has gradtool {__version__}, this is {version}"
        return wire.packed_error(_unfit(message, "install the same version there"))
    try:
        return wire.packed(pickle.loads(payload).perform())  # noqa: S301 - the engine lets its users run anything here
    except GradtoolError as error:
        if isinstance(error, SystemRefusedError):
            problems = error.problems
            error.problems = [replace(each, message=say("{} (worker on {})", each.message, HOST)) for each in problems]
        return wire.packed_error(error)
    except MemoryError:
        message, hint = f"out of memory on the worker on {HOST}", say("use fewer {}", option("threads"))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the command is told of any
        message, hint = f"the worker on {HOST} failed: {type(error).__name__}: {shortened(str(error))}", None
    return wire.packed_error(SystemRefusedError(message, code="engine", hint=hint))


def fingerprint(shard: Shard) -> str:
    """Return a checksum of what a process sees of a shard: its header, and the version of its source.

    Raises:
        SystemRefusedError: it was replaced or written to since its header was read.
    """
    with os_errors_about(shard.name):
        try:
            # Opened, because a status may be an old one where files come over a network.
            reader = shard.source.open()
        except (FileNotFoundError, NotADirectoryError):
            raise changed_meanwhile(shard.name) from None
        with contextlib.closing(reader):
            content = shard.source.version.encode() + read_range(reader, 0, shard.data_start)
            if not reader.is_unchanged:
                raise changed_meanwhile(shard.name)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _require_there(file: File, *_: object) -> None:
    """Raise `SystemRefusedError` if the run has no use for a file any more."""
    if not file.is_there:
        raise changed_meanwhile(file.path)


def _unfit(message: str, hint: str | None) -> BackendUnavailableError:
    return BackendUnavailableError(say("the worker on {}{}", HOST, message), code="engine", hint=hint)


@lru_cache(maxsize=4)
def _backend(name: str | None, device: int | None) -> Choice:
    return choose(name, device)


class RemoteCall:
    """A call that is made where its pickle is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


class _Pickler(pickle.Pickler):
    """Sends shards as what `_shard_at` needs to open them again."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Shard:
            return NotImplemented
        return _shard_at, (value.source.address, value.data_start, value.size, value.source.version)


def _shard_at(path: str, data_start: int, size: int, version: str) -> Shard:
    """Return the shard at a path as it is seen here; a shard that is yet to be made has no version."""
    if not version:
        return Shard(Source(path, size), data_start, {}, ())
    with os_errors_about(path):
        try:
            source = retry_until_visible(Path(path), lambda source: source.version == version)
        except (FileNotFoundError, NotADirectoryError) as error:
            message = f"the worker on {HOST} does not see it"
            raise BackendUnavailableError(message, file=path, code="engine", hint=_MOUNT) from error
    if source is None:
        raise changed_meanwhile(path)
    return Shard(source, data_start, {}, ())
