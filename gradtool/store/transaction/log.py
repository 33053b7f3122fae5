"""Transaction logs: the hidden files that runs leave beside the data while they work, and what their logs say.

`.gradtool-ID.run` is the log of a run, in its log folder: the first folder that it writes to. Every other folder has a
pointer to the log, of the same name. `.gradtool-ID.lock`, in the log folder, is locked while the process lives.
`.gradtool-ID-N.tmp` will replace a target, and `.gradtool-ID-N.redo` is a redo log: what will be copied into targets.
In folders that not every user may list, `.gradtool-HASH.at` is a second name of the log for each target, by which
readers find it.

A log has a line for each step, with a checksum in front. A torn line at the end was not written yet.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import BadInputError, from_os_error, os_errors_about, unfinished
from gradtool.store import fs
from gradtool.store.format.index import is_file_name
from gradtool.store.fs import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gradtool.store.fs import Folder

HOST = os.uname().nodename
# The version that is written, and the only version that is read: none was released before.
FORMAT = 3
MARKER = ".at"
_NAME = re.compile(r"\.gradtool-[0-9a-f]{12}(\.run|\.lock|-\d{1,9}\.(tmp|redo))")
_ID_CHARS = len(PREFIX) + 12
_START = rb'[0-9a-f]{8} \{"run":\{"id":"(\.gradtool-[0-9a-f]{12})"'
_START_BYTES = 64
# Of a log: a hundred thousand files take 15 MB.
MAX_BYTES = 32_000_000
MAX_FILES = 100_000
# The cost of JSON depends on how many values it has: how many of each character a step may have, per file and at least.
_PER_FILE = {b"[": 1, b"{": 1, b",": 8, b'"': 4}
PER_STEP = 100
# A run writes four, and each recovery adds two.
_MAX_STEPS = 1000
# What became of the targets of a run: all are new, or all are old.
FINISHED, UNTOUCHED = "finished", "untouched"
_MAX_PID = (1 << 31) - 1
_ENCODING = "utf-8", "surrogateescape"
# What the system says of a link, a socket, or a path that cannot exist.
_NOT_A_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG)


class InDoubtError(OSError):
    """A step could neither be appended to a log nor removed again."""


class Move(NamedTuple):
    """A temporary and the target that it replaces; what follows the temporary's `inode` is the target's, if it exists.

    By that inode the target is recognized once it is new.
    """

    folder: int
    number: int
    name: str
    inode: int
    size: int | None
    mtime_ns: int | None
    ctime_ns: int | None
    attributes: int | None


class Change(NamedTuple):
    """A file that is changed in place, with its size and inode. Its place in the list is its number in the redo log."""

    folder: int
    name: str
    size: int
    inode: int


class Redo(NamedTuple):
    """The redo log of a run, in its log folder: the number in its name, its inode, and the bytes that count."""

    number: int
    inode: int
    size: int


class Log(NamedTuple):
    """A transaction log as it was read, or a pointer to the log at `log_path`.

    `names` are the targets in its own folder, `folders` those of the whole run. `holds_locks`: no other run writes the
    targets. `moves` and `changes`: the run is ready, and these are rolled forward; `redo` has the content of the
    changes. `ended`: what became of the targets; only the clean-up is left. `missing`: folders that the run makes in
    its log folder. `boot`: the boot of the machine. `size`: bytes without a torn end and without the lines that
    recoveries add.
    """

    path: Path
    inode: int
    owner: int
    pid: int
    host: str
    boot: str
    names: frozenset[str]
    log_path: Path
    folders: tuple[Path, ...]
    missing: tuple[str, ...] = ()
    holds_locks: bool = False
    moves: Sequence[Move] = ()
    changes: Sequence[Change] = ()
    redo: Redo | None = None
    ended: str | None = None
    size: int = 0

    @property
    def run(self) -> str:
        """The run's ID, which the names of all its files begin with."""
        return self.path.name.removesuffix(".run")

    @property
    def steps(self) -> list[Move | Change]:
        """The files that the run changes, once it is ready."""
        return [*self.changes, *self.moves]

    @property
    def is_atomic(self) -> bool:
        """Whether a single rename, which is done or not, is all that is left to do."""
        return len(self.moves) == 1 and not self.changes

    @property
    def is_unfinished(self) -> bool:
        """Whether some targets may be new and others old."""
        return bool(self.steps) and not self.is_atomic and self.ended is None

    @property
    def process(self) -> str:
        """The process, for messages."""
        user = "" if self.owner == os.geteuid() else f" of user {self.owner}"
        return f"PID {self.pid}{user}" + ("" if self.host == HOST else f" on {self.host}")


def files_by_run(folder: Folder) -> dict[str, list[str]]:
    """List the files of each run in a folder, without markers; raise `SystemRefusedError` if it cannot be listed."""
    with os_errors_about(folder.path):
        names = folder.names()
    files: dict[str, list[str]] = {}
    for name in sorted(filter(_NAME.fullmatch, names)):
        files.setdefault(name[:_ID_CHARS], []).append(name)
    return files


def marker_name(target: str) -> str:
    """Return the second name of a log for a target."""
    import hashlib  # slow to import

    return f"{PREFIX}{hashlib.sha256(os.fsencode(target)).hexdigest()[:24]}{MARKER}"


def is_trusted(owner: int, folder: Folder) -> bool:
    """Check whether the files of a user count in a folder.

    In a sticky folder (such as /tmp), where every user may add files, only those of this user, root and its owner do.
    """
    return not folder.mode & stat.S_ISVTX or owner in (0, os.geteuid(), folder.owner)


def read_log(folder: Folder, name: str) -> Log | None:
    """Read a log; return None if the file is gone, is no log, or is not complete yet."""
    try:
        fd = folder.open(name, os.O_RDONLY)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            return None
        status = folder.status(name) if error.errno in (errno.EACCES, errno.EWOULDBLOCK) else None
        # Another user's is not public yet, or never will be, or has a lease.
        if status is not None and status.st_uid != os.geteuid():
            return None
        raise from_os_error(error, folder.path / name) from error
    with os_errors_about(folder.path / name), fs.closing(fd):
        status = os.fstat(fd)
        start = re.match(_START, os.pread(fd, _START_BYTES, 0)) if stat.S_ISREG(status.st_mode) else None
        if start is None or status.st_size > MAX_BYTES:
            return None
        log_name = f"{start[1].decode()}.run"
        # A second name must not pass for another run.
        if not name.endswith(MARKER) and name != log_name:
            return None
        with os.fdopen(fd, "rb", closefd=False) as file:
            content = file.read()
    try:
        return parse(folder.path / log_name, status, content)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if not is_trusted(status.st_uid, folder):
            return None
        # Its checksums are right. To ignore it could cost the data that it protects.
        message = "is a transaction log that this version of gradtool cannot read"
        files = f"{log_name.removesuffix('.run')}*"
        hint = f"recover with the version that wrote it, or delete {files} beside it to keep the data as it is"
        raise unfinished(message, folder.path / log_name, hint) from error


def append_step(fd: int, begin: int, *, fsync: bool, **step: Any) -> int:
    """Append a step at byte `begin`, the end of a log; return its bytes. If that fails, it is not in the log.

    Raises:
        InDoubtError: it may be in the log.
    """
    line = encode_step(**step)
    try:
        count = fs.write_all(fd, [line], begin)
        if fsync:
            fs.sync(fd)
    except OSError as error:
        try:
            fs.resize(fd, begin)
            if fsync:
                fs.sync(fd)
        except OSError:
            raise InDoubtError(error.errno, error.strerror) from error
        raise
    return count


def encode_step(file: Path | None = None, /, **step: Any) -> bytes:
    """Return a step as a line of a log; raise `BadInputError` about a file if it is too large to be read back."""
    # Names as the system has them, bytes of no encoding included: escaped, they would take up to three times the space.
    text = json.dumps(step, ensure_ascii=False, separators=(",", ":")).encode(*_ENCODING)
    if len(text) > MAX_BYTES // 2 or not _is_small(text):
        limits = f"{MAX_FILES:,} files, or {MAX_BYTES // 2:,} bytes (they have {len(text):,})"
        message = f"the names of the files to write exceed the limit of {limits}"
        raise BadInputError(message, file=file, code="limit", hint="write them in several calls")
    return b"%08x %s\n" % (zlib.crc32(text), text)


def parse(path: Path, status: os.stat_result, content: bytes) -> Log | None:
    """Parse a log; return None before its first line is complete. Raise `ValueError` and others if it is malformed."""
    steps, size = _decode_steps(content)
    if not steps:
        return None
    run = steps[0]["run"]
    if run["format"] != FORMAT:
        raise ValueError
    missing = run.get("missing", [])
    log_path = path if "home" not in run else _resolved(path, run["home"])
    if log_path.name != path.name or not all(map(is_file_name, [*run["files"], *missing])):
        raise ValueError
    log = Log(
        path=path,
        inode=status.st_ino,
        owner=status.st_uid,
        names=frozenset(run["files"]),
        log_path=log_path,
        folders=(path.parent, *(_resolved(path, folder) for folder in run.get("folders", []))),
        missing=tuple(missing),
        boot=_text(run["boot"]),
        size=size,
        **_process(run),
    )
    log = log._replace(**_progress(steps[1:]))
    if not all(_is_sound(step, log) for step in log.steps) or not _are_counts(log.redo or ()):
        raise ValueError
    if log.changes and log.redo is None:
        raise ValueError
    return log


def _progress(steps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how far the run got, from the steps after the first."""
    fields: dict[str, Any] = {}
    for step in steps:
        if "taken" in step:
            fields |= _process(step["taken"])
        elif "ready" in step:
            moves, changes, redo = step["ready"]
            fields["moves"] = [Move(*move) for move in moves]
            fields["changes"] = [Change(*change) for change in changes]
            fields["redo"] = None if redo is None else Redo(*redo)
        elif step.get("ended") in (FINISHED, UNTOUCHED):
            fields["ended"] = step["ended"]
        elif "holds_locks" in step:
            fields["holds_locks"] = True
        else:
            raise ValueError
    return fields


def _is_sound(step: Move | Change, log: Log) -> bool:
    """Check whether the fields of a step have the right types, and its file is in a folder of the run."""
    fields = step._asdict()
    name = fields.pop("name")
    if isinstance(step, Move):
        # Negative before 1970.
        times = [type(fields.pop(name)) is int for name in ("mtime_ns", "ctime_ns")]
        if step[4:] == (None,) * 4:
            del fields["size"], fields["attributes"]
        elif not all(times):
            return False
    return is_file_name(name) and _are_counts(fields.values()) and step.folder < len(log.folders)


def _are_counts(values: Iterable[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _process(step: Mapping[str, Any]) -> dict[str, Any]:
    pid = step["pid"]
    if type(pid) is not int or not 0 < pid <= _MAX_PID:
        raise ValueError
    return {"pid": pid, "host": _text(step["host"])}


def _decode_steps(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the complete steps, and their bytes up to the last that is not a recovery's."""
    steps: list[dict[str, Any]] = []
    size = end = 0
    for line in io.BytesIO(content):
        checksum, _, text = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
            break
        if not _is_small(text) or len(steps) == _MAX_STEPS:
            raise ValueError
        steps.append(json.loads(text.decode(*_ENCODING)))
        end += len(line)
        size = size if "taken" in steps[-1] else end
    return steps, size


def _is_small(text: bytes) -> bool:
    """Check whether a step has no more values than the largest that is written; this is asked before it is parsed."""
    return all(text.count(character) <= count * MAX_FILES + PER_STEP for character, count in _PER_FILE.items())


def _resolved(path: Path, relative: Any) -> Path:
    """Return a path relative to the folder of a log, links not followed: the paths of runs have none."""
    return Path(os.path.normpath(path.parent / _text(relative)))


def _text(value: Any) -> str:
    if not isinstance(value, str) or b"\0" in os.fsencode(value):
        raise TypeError
    return value
