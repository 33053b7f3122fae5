"""What a writing run leaves beside the data while it works: its transaction log, and the files that go with it.

`.gradtool-ID.run` is the log, in the run's home, the first folder that it writes to; a pointer of the same name lies in
every other one. `.gradtool-ID.lock`, in the home, is locked while the run lives. Beside them lie the files that the run
makes: `.gradtool-ID-N.tmp` will take a target's place, `.gradtool-ID-N.old` is a second name for a target that is being
replaced, `.gradtool-ID-N.undo` is an undo log, which holds what was overwritten in place. In a folder that not
everybody may list, `.gradtool-HASH.at` is a second name of the log for each target, by which readers find it.

A log is a line for each step, a checksum before it; a torn line was not yet written.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import re
import stat
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import BadInputError, SystemRefusedError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gradtool.store.fs import Folder

PREFIX = ".gradtool-"
HOST = os.uname().nodename
# What this version writes, and the only one that it reads: none before it was released.
FORMAT = 2
MARKER = ".at"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"(\.gradtool-[0-9a-f]{12})(?:\.run|\.lock|-\d{1,9}\.(?:tmp|old|undo))")
_START = re.compile(rb'[0-9a-f]{8} \{"run":\{"id":"(\.gradtool-[0-9a-f]{12})"')
_START_BYTES = 64
# Of one log, and of all in a folder: a hundred thousand files have 15 MB.
_MAX_BYTES = 32_000_000
_MAX_BYTES_IN_FOLDER = 64_000_000
_MAX_FILES = 100_000
# What JSON costs depends on its values: how many of a character one file may have in a step, and a step without any.
_OF_FILE = {b"[": 1, b"{": 1, b",": 7, b'"': 4}
_OF_STEP = 100
# A run writes six, and each recovery adds two.
_MAX_STEPS = 1000
_MAX_PID = (1 << 31) - 1
_ENCODING = "utf-8", "surrogateescape"


class Move(NamedTuple):
    """A temporary, and the target that it takes the place of, with that one's size, mtime and inode if it is there.

    `inode` is the temporary's, by which the target can be told when it is new.
    """

    folder: int
    number: int
    name: str
    inode: int
    size: int | None
    mtime_ns: int | None
    original: int | None


class Change(NamedTuple):
    """A file that is changed in place."""

    folder: int
    name: str
    size: int
    inode: int


@dataclass(frozen=True)
class Log:
    """A transaction log as it was read; `names` are the targets in its own folder, `folders` those of the whole run.

    `ready` says that the run has its targets to itself; `moves` and `changes`, what may be half done; `revoked`, that
    moves are rolled back; `done` and `undone`, that all is new, or old, and only clearing away is left. `missing` are
    folders that the run makes in its home, `boot` names the time that the machine was up for, `key` is what checksums
    of its undo logs begin with. Behind the first `size` bytes it is torn, or tells who recovered it.
    """

    path: Path
    inode: int
    owner: int
    pid: int
    host: str
    boot: str
    key: str
    names: frozenset[str]
    home: Path
    folders: tuple[Path, ...]
    missing: tuple[str, ...] = ()
    ready: bool = False
    moves: tuple[Move, ...] = ()
    changes: tuple[Change, ...] = ()
    revoked: bool = False
    done: bool = False
    undone: bool = False
    size: int = 0

    @property
    def run(self) -> str:
        """The run's name, which all its files begin with."""
        return self.path.name.removesuffix(".run")

    @property
    def steps(self) -> list[Move | Change]:
        """What may be half done, file by file."""
        return [*self.moves, *self.changes]

    @property
    def is_unfinished(self) -> bool:
        """Whether some of its targets may have been changed, and others not; a single rename is whole at any time."""
        return bool(len(self.moves) > 1 or self.changes) and not (self.done or self.undone)

    @property
    def outcome(self) -> str:
        """What becomes, or became, of its targets when the run is recovered, but for a single move."""
        if self.undone or self.revoked:
            return "undone"
        if self.moves or self.done:
            return "finished"
        return "undone" if self.changes else "untouched"

    @property
    def who(self) -> str:
        """The process, as a person would look for it."""
        user = "" if self.owner == os.geteuid() else f" of user {self.owner}"
        return f"PID {self.pid}{user}" + ("" if self.host == HOST else f" on {self.host}")


@functools.cache
def boot() -> str:
    """A name for the time since the machine was started; nothing where there is none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def line_of(**entry: Any) -> bytes:
    """One step, as it stands in a log.

    Raises:
        BadInputError: it is about more than could be read back.
    """
    # As the system has names, bytes of no encoding among them: escaped, they would take up to three times the room.
    text = json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode(*_ENCODING)
    if len(text) > _MAX_BYTES // 2 or not _is_small(text):
        raise BadInputError(
            f"the names of the files to write are too many or too long for a transaction log ({len(text):,} bytes of "
            f"{_MAX_BYTES // 2:,} allowed, {_MAX_FILES:,} files); write them in several calls",
            code="limit",
        )
    return b"%08x %s\n" % (zlib.crc32(text), text)


def name_of(run: str, number: int, kind: str) -> str:
    """The name of the file that a run makes with a number."""
    return f"{run}-{number}.{kind}"


def run_of(name: str) -> str | None:
    """The run that a file belongs to, by the file's name."""
    match = _NAME.fullmatch(name)
    return None if match is None else match[1]


def marker_of(name: str) -> str:
    """The second name that a log has for one of its targets, where not everybody may list the folder."""
    return f"{PREFIX}{hashlib.sha256(os.fsencode(name)).hexdigest()[:24]}{MARKER}"


def files_of_runs(folder: Folder) -> list[str]:
    """The names of all files of runs in a folder, but for the second names of logs.

    Raises:
        SystemRefusedError: the folder cannot be listed.
    """
    try:
        names = folder.names()
    except OSError as error:
        raise from_os_error(error, folder.path) from error
    return sorted(name for name in names if name.startswith(PREFIX) and run_of(name))


def is_trusted(owner: int, folder: Folder) -> bool:
    """Whether a user's files are to be heeded.

    In a folder where all may leave what they like, and nobody else may remove it (one that is sticky), that is the
    user, root or who owns the folder; elsewhere it is anybody who may write there at all.
    """
    return not folder.mode & stat.S_ISVTX or owner in (0, os.geteuid(), folder.owner)


def logs_in(folder: Folder) -> list[Log]:
    """Every log and pointer in a folder that can be read.

    Raises:
        SystemRefusedError: the folder cannot be listed, one is of another version, or they are too large to be read.
    """
    logs = []
    # By owner: what one leaves where everybody may must not hide what another does.
    left: dict[int, int] = {}
    for name in files_of_runs(folder):
        status = folder.status(name) if name.endswith(".run") else None
        if status is None or status.st_size > _MAX_BYTES:
            continue
        owner = -1 if is_trusted(status.st_uid, folder) else status.st_uid
        left[owner] = left.get(owner, _MAX_BYTES_IN_FOLDER) - status.st_size
        if left[owner] < 0 and owner >= 0:
            continue
        if left[owner] < 0:
            raise SystemRefusedError(
                f"holds more than {_MAX_BYTES_IN_FOLDER:,} bytes of transaction logs ({PREFIX}*.run); recover or "
                f"delete those of crashed runs",
                file=folder.path,
                code="limit",
            )
        if (log := read_log(folder, name)) is not None:
            logs.append(log)
    return logs


def read_log(folder: Folder, name: str) -> Log | None:
    """A log, or None for what is none, or not yet one, or no more.

    Raises:
        SystemRefusedError: it cannot be read, or is one of another version.
    """
    try:
        fd = folder.open(name, os.O_RDONLY)
    except OSError as error:
        # Among them what is no file at all: a link, a socket, a path that nothing could have.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG):
            return None
        # Of another user, who has not come to open it to all, or never meant to, or has a lease on it.
        if (
            error.errno in (errno.EACCES, errno.EWOULDBLOCK)
            and (status := folder.status(name))
            and status.st_uid != os.geteuid()
        ):
            return None
        raise from_os_error(error, folder.path / name) from error
    try:
        status = os.fstat(fd)
        start = _START.match(os.pread(fd, _START_BYTES, 0)) if stat.S_ISREG(status.st_mode) else None
        if start is None or status.st_size > _MAX_BYTES:
            return None
        run = start[1].decode()
        # A second name of somebody's choosing must not pass for another run.
        if not name.endswith(MARKER) and name != f"{run}.run":
            return None
        with os.fdopen(fd, "rb", closefd=False) as file:
            return _parsed(folder, f"{run}.run", status, file.read())
    except OSError as error:
        if isinstance(error, SystemRefusedError):
            raise
        raise from_os_error(error, folder.path / name) from error
    finally:
        os.close(fd)


def _parsed(folder: Folder, name: str, status: os.stat_result, content: bytes) -> Log | None:
    path = folder.path / name
    try:
        return _parse(path, status, content)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if not is_trusted(status.st_uid, folder):
            return None
        # Its checksums are right, so whoever wrote it meant it. It is not ignored: that could cost what it would mend.
        raise SystemRefusedError(
            f"is the log of a run, and cannot be understood: was it made by another version of gradtool? Recover with "
            f"that one, or delete {name.removesuffix('.run')}* beside it to keep the data as they are",
            file=path,
            code="unfinished",
        ) from error


def _parse(path: Path, status: os.stat_result, content: bytes) -> Log | None:
    steps, size = _steps(content)
    if not steps:
        return None
    run = steps[0]["run"]
    if run["format"] != FORMAT:
        raise ValueError
    others, missing = run.get("folders", []), run.get("missing", [])
    home = path if "home" not in run else _beside(path, run["home"])
    if home.name != path.name or not all(map(is_plain, [*run["files"], *missing])):
        raise ValueError
    log = Log(
        path=path,
        inode=status.st_ino,
        owner=status.st_uid,
        names=frozenset(run["files"]),
        home=home,
        folders=(path.parent, *(_beside(path, folder) for folder in others)),
        missing=tuple(missing),
        boot=_text(run["boot"]),
        key=_text(run["key"]),
        size=size,
        **_process(run),
    )
    log = replace(log, **_progress(steps[1:]))
    if not all(_is_sound(one, log) for one in log.steps):
        raise ValueError
    return log


def _progress(steps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How far the run got, by the steps after its first."""
    facts: dict[str, Any] = {}
    for step in steps:
        if "taken" in step:
            facts |= _process(step["taken"])
        elif "moves" in step:
            facts["moves"] = tuple(Move(*one) for one in step["moves"])
        elif "changes" in step:
            facts["changes"] = tuple(Change(*one) for one in step["changes"])
        elif step.keys() <= {"ready", "revoked", "done", "undone"}:
            facts |= dict.fromkeys(step, True)
        else:
            raise ValueError
    return facts


def _is_sound(one: Move | Change, log: Log) -> bool:
    """Whether it is about a file in a folder of the run, and all its numbers are such."""
    numbers = one._asdict()
    name = numbers.pop("name")
    if isinstance(one, Move):
        was = numbers.pop("size"), numbers.pop("mtime_ns"), numbers.pop("original")
        if was != (None, None, None):
            # A time may lie before 1970.
            numbers |= {"size": was[0], "original": was[2]}
            if type(was[1]) is not int:
                return False
    whole = all(type(number) is int and number >= 0 for number in numbers.values())
    return is_plain(name) and whole and one.folder < len(log.folders)


def _process(step: Mapping[str, Any]) -> dict[str, Any]:
    pid = step["pid"]
    if type(pid) is not int or not 0 < pid <= _MAX_PID:
        raise ValueError
    return {"pid": pid, "host": _text(step["host"])}


def _steps(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The steps that are whole, and how many bytes they take, without those at the end that tell who recovers it."""
    steps: list[dict[str, Any]] = []
    size = end = 0
    for line in _lines(content):
        checksum, _, text = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
            break
        if not _is_small(text) or len(steps) == _MAX_STEPS:
            raise ValueError
        step = json.loads(text.decode(*_ENCODING))
        steps.append(step)
        end += len(line)
        size = size if "taken" in step else end
    return steps, size


def _lines(content: bytes) -> Iterator[bytes]:
    begin = 0
    while begin < len(content):
        end = content.find(b"\n", begin) + 1 or len(content)
        yield content[begin:end]
        begin = end


def _is_small(text: bytes) -> bool:
    """Whether a step holds no more values than one about as many files as a run may have; asked before it is parsed."""
    return all(text.count(character) <= most * _MAX_FILES + _OF_STEP for character, most in _OF_FILE.items())


def _beside(path: Path, relative: Any) -> Path:
    """What a log calls by its way from there. No link is followed: the paths of runs have none."""
    return Path(os.path.normpath(path.parent / _text(relative)))


def _text(value: Any) -> str:
    if not isinstance(value, str) or b"\0" in os.fsencode(value):
        raise TypeError
    return value


def is_plain(name: Any) -> bool:
    """Whether it names a file in a folder, and nothing elsewhere."""
    try:
        raw = os.fsencode(name) if isinstance(name, str) else b""
    except UnicodeError:
        return False
    return raw not in {b"", b".", b".."} and b"/" not in raw and b"\0" not in raw
