"""What a worker process does: it checks whether it is fit, and does parts of passes on files that it opens by path.

A call is sent as one pickle that makes the call when it is read, so that whoever passes it on needs no gradtool. Files
are sent as paths, and looked at where the pickle is read: they must be those that the command has read the headers of.
What comes back is never a pickle (`gradtool.engines.cluster.wire`).
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
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool._version import __version__
from gradtool.backends.choose import Choice, choose
from gradtool.engines.cluster import wire
from gradtool.engines.threads import Threads, default_threads
from gradtool.errors import (
    BackendUnavailableError,
    BadInputError,
    GradtoolError,
    SystemRefusedError,
    changed_meanwhile,
    os_errors_about,
    shortened,
)
from gradtool.store.format.header import Shard
from gradtool.store.fs import Folder
from gradtool.store.io.channel import Clock
from gradtool.store.io.destination import NewFiles
from gradtool.store.late import WAITS, retry_until_visible
from gradtool.store.source import Source, open_source, read_range
from gradtool.store.transaction.attempts import Attempt, new_temporary
from gradtool.store.transaction.orders import Built
from gradtool.wording import as_command, option, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradtool.engines.protocol import Part
    from gradtool.store.transaction.orders import Order

HOST = os.uname().nodename
# In containers, processes may share the name of a host and a number.
_SALT = secrets.token_hex(4)
_MOUNT = "mount the same file system there, at the same path"


class Report(NamedTuple):
    """What a worker that is fit answers: its machine, its process, its backend, and why that one."""

    host: str = ""
    process: str = ""
    backend: str = ""
    why: str = ""


class Check(NamedTuple):
    """Asks a worker whether it is fit: sees a file, has a backend and, for a `run`, can make files beside that file."""

    path: str
    inode: int
    run: str | None
    user: int
    backend: str | None
    device: int | None

    def perform(self) -> Report:
        """Return who the worker is; raises `BackendUnavailableError` if it is not fit."""
        if not self._sees_file():
            raise _unfit(f"the worker on {HOST} does not see {self.path}", _MOUNT)
        try:
            choice = _chosen(self.backend, self.device)
        except GradtoolError as error:
            (problem,) = error.problems
            raise _unfit(say("the worker on {}: {}", HOST, problem.message), problem.hint) from error
        if self.run is not None:
            self._require_writable(self.run)
        return Report(HOST, process(), choice.backend.name, as_command(choice.why))

    def _sees_file(self) -> bool:
        def look() -> bool | None:
            with contextlib.closing(open_source(Path(self.path))) as reader:
                return reader.source.inode == self.inode or None

        try:
            return retry_until_visible(look) is not None
        except (OSError, BadInputError):
            return False

    def _require_writable(self, run: str) -> None:
        if os.geteuid() != self.user:
            what = f"the worker on {HOST} runs as user {os.geteuid()}, and this command as user {self.user}"
            raise _unfit(what, "start the workers as the user who runs the command")
        folder = Path(self.path).parent
        try:
            with Folder.at(folder) as opened:
                _, fd, file = new_temporary(opened, run)
                os.close(fd)
                opened.unlink(file.name)
        except OSError as error:
            what = f"the worker on {HOST} cannot make files in {folder}: {error.strerror or error}"
            raise _unfit(what, "make it writable there") from error


class Outcome(NamedTuple):
    """What a worker answers about a part: what was collected and built, fingerprints of the files read, and who did it.

    `late` files had to be waited for.
    """

    tally: Any
    built: Built | None
    read: list[str]
    clock: Clock
    host: str = ""
    process: str = ""
    late: int = 0


class Job(NamedTuple):
    """Asks a worker to do a part of a pass, and to build the new file that the part writes."""

    part: Part
    backend: str | None
    device: int | None
    threads: int | None
    order: Order | None

    def perform(self) -> Outcome:
        """Do the part."""
        threads = Threads(_chosen(self.backend, self.device).backend, self.threads or default_threads())
        read = [fingerprint(shard) for shard in self.part.reads]
        built = None
        if self.order is None:
            tally = threads.run(self.part.work)
            require_unchanged(self.part.reads)
        else:
            with Attempt(self.order) as attempt:
                threads.progress = lambda *_: attempt.look()
                tally = threads.run(self.part.work, NewFiles({self.order.new.shard: (self.order.new, attempt.file)}))
                require_unchanged(self.part.reads)
                built = attempt.finish()
        threads.close()
        return Outcome(tally.compact(), built, read, threads.clock, HOST, process(), WAITS.taken())


def empty_outcome(part: Part) -> Outcome:
    """Return the outcome that an answer about a part is read into."""
    built = None if part.writes is None else Built(0, 0, 0)
    return Outcome(part.work.tally(), built, [""] * len(part.reads), Clock())


def call_for(task: Check | Job) -> bytes:
    """Return a call that does a task, as a pickle; of a shard, only what is needed to read its data is sent."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(task)
    return pickle.dumps(Call(answer, __version__, buffer.getvalue()))


def answer(version: str, payload: bytes) -> bytes:
    """Do a task of the same version, and return the packed answer, or the error."""
    if version != __version__:
        what = f"the worker on {HOST} has gradtool {__version__}, this is {version}"
        return wire.packed_error(_unfit(what, "install the same version there"))
    try:
        return wire.packed(pickle.loads(payload).perform())  # noqa: S301 - the engine lets its users run anything here
    except SystemRefusedError as error:
        error.problems = [
            replace(each, message=say("{} (worker on {})", each.message, HOST)) for each in error.problems
        ]
        return wire.packed_error(error)
    except GradtoolError as error:
        return wire.packed_error(error)
    except MemoryError:
        what, hint = f"out of memory on the worker on {HOST}", say("use fewer {}", option("threads"))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the command is told of any
        what, hint = f"the worker on {HOST} failed: {type(error).__name__}: {shortened(str(error))}", None
    return wire.packed_error(SystemRefusedError(what, code="engine", hint=hint))


def fingerprint(shard: Shard) -> str:
    """Return a checksum of what a process sees of a shard: its header, and the version of its source.

    Raises:
        SystemRefusedError: it is not the shard whose header was read.
    """
    with os_errors_about(shard.name), contextlib.closing(shard.source.open()) as reader:
        content = shard.source.version.encode() + read_range(reader, 0, shard.data_start)
        if not reader.is_unchanged:
            raise changed_meanwhile(shard.name)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def require_unchanged(shards: Sequence[Shard]) -> None:
    """Raise `SystemRefusedError` if a file was replaced or written to since its header was read."""
    for shard in shards:
        # Opened, because a status may be an old one where files come over a network.
        with contextlib.suppress(OSError), contextlib.closing(shard.source.open()) as reader:
            if reader.is_unchanged:
                continue
        raise changed_meanwhile(shard.name)


def _unfit(message: str, hint: str | None) -> BackendUnavailableError:
    """Return the error for a worker that cannot do the work."""
    return BackendUnavailableError(message, code="engine", hint=hint)


def process() -> str:
    """Return an ID of this process."""
    return f"{os.getpid()}-{_SALT}"


@functools.lru_cache(maxsize=4)
def _chosen(backend: str | None, device: int | None) -> Choice:
    return choose(backend, device)


class Call:
    """A pickle of this makes the call when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


class _Pickler(pickle.Pickler):
    """Sends shards as what `_shard_at` needs to find them again."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Shard:
            return NotImplemented
        return _shard_at, (value.source.address, value.data_start, value.size, value.source.version)


def _shard_at(path: str, data_start: int, size: int, version: str) -> Shard:
    """Return the shard at a path as it is seen here; one that is yet to be made has no version."""
    if not version:
        return Shard(Source(path, size), data_start, {}, ())

    def look() -> Source | None:
        with contextlib.closing(open_source(Path(path))) as reader:
            return reader.source if reader.source.version == version else None

    with os_errors_about(path):
        try:
            source = retry_until_visible(look)
        except (FileNotFoundError, NotADirectoryError) as error:
            what = f"the worker on {HOST} does not see it"
            raise BackendUnavailableError(what, file=path, code="engine", hint=_MOUNT) from error
    if source is None:
        raise changed_meanwhile(path)
    return Shard(source, data_start, {}, ())
