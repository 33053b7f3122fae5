"""What a writing run leaves beside the data while it works: a record of what it is about to do, and the files of it.

`.gradtool-ID.run` is the record, in the first folder that a run writes to (its home); a pointer of the same name is in
every other one. The run holds a lock on its home record, so that a record without one is that of a run which died.
Beside it lie the files that the run makes: `.gradtool-ID-N.tmp` will take a target's place, `.gradtool-ID-N.old` is a
second name for a target that is being replaced, `.gradtool-ID-N.undo` holds what was overwritten in place.

A record is a line for each step, a checksum before it; one that is torn was not yet made.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import SystemRefusedError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PREFIX = ".gradtool-"
HOST = os.uname().nodename
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"\.gradtool-([0-9a-f]{12})(?:\.run|-\d{1,9}\.(?:tmp|old|undo))")
# A hundred thousand files have 15 MB; what is larger was not written by us.
_MAX_BYTES = 32_000_000
_MAX_FOLDERS = 100_000
_MAX_PID = (1 << 31) - 1


class Move(NamedTuple):
    """A temporary, and the target that it takes the place of, with the target's size and time of change if it is there.

    `inode` is the temporary's, by which the target can be told when it is new.
    """

    folder: int
    number: int
    name: str
    inode: int
    size: int | None
    mtime_ns: int | None


class Change(NamedTuple):
    """A file that is changed in place."""

    folder: int
    name: str
    size: int
    inode: int


@dataclass(frozen=True)
class Record:
    """A record as it was read; `names` are the targets in its own folder, `folders` those of the whole run, home first.

    `moves` and `changes` tell what may be half done; `revoked`, that moves are taken back; `done` and `undone`, that
    all is new, or old, and nothing is left but to clear away. `boot` names the time that the machine was up for. What
    is behind the first `size` bytes is torn.
    """

    path: Path
    owner: int
    mtime_ns: int
    pid: int
    host: str
    names: frozenset[str]
    home: Path
    folders: tuple[Path, ...]
    moves: tuple[Move, ...] = ()
    changes: tuple[Change, ...] = ()
    revoked: bool = False
    done: bool = False
    undone: bool = False
    boot: str = ""
    size: int = 0

    @property
    def run(self) -> str:
        """The run's name, which all its files begin with."""
        return self.path.name.removesuffix(".run")

    @property
    def is_unfinished(self) -> bool:
        """Whether some of its targets may have been changed, and others not."""
        return bool(self.moves or self.changes) and not (self.done or self.undone)

    @property
    def outcome(self) -> str:
        """What becomes, or became, of its targets when it is brought to its end."""
        if self.undone or self.revoked:
            return "undone"
        if self.moves or self.done:
            return "finished"
        return "undone" if self.changes else "untouched"

    @property
    def who(self) -> str:
        """The process, as a person would look for it."""
        return f"PID {self.pid}" + ("" if self.host == HOST else f" on {self.host}")


def boot() -> str:
    """A name for the time since the machine was started; nothing where there is none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def line_of(**entry: Any) -> bytes:
    """One step, as it stands in a record."""
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def file_of(folder: Path, run: str, number: int, kind: str) -> Path:
    """The file that a run made with a number."""
    return folder / f"{run}-{number}.{kind}"


def run_of(name: str) -> str | None:
    """The run that a file belongs to, by the file's name."""
    match = _NAME.fullmatch(name)
    return None if match is None else PREFIX + match[1]


def files_of_runs(folder: Path) -> list[str]:
    """The names of all files of runs in a folder.

    Raises:
        SystemRefusedError: the folder cannot be read.
        BadInputError: it is not there.
    """
    try:
        # Not Path's own, which makes a Path of each of what may be thousands.
        names = os.listdir(folder)  # noqa: PTH208
    except OSError as error:
        raise from_os_error(error, folder) from error
    return sorted(name for name in names if name.startswith(PREFIX) and run_of(name))


def records_in(folder: Path) -> list[Record]:
    """Every record in a folder that says what it is about."""
    return list(read_records(folder, files_of_runs(folder)))


def read_records(folder: Path, names: Iterable[str]) -> Iterator[Record]:
    """The same, of those among some names."""
    for name in names:
        if name.endswith(".run") and (record := read_record(folder / name)) is not None:
            yield record


def read_record(path: Path) -> Record | None:
    """A record, or None for what is none, or not yet one, or no more."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        # Among them what is no file at all: a link, a socket, a path that nothing could have.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG):
            return None
        raise from_os_error(error, path) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            return None
        with os.fdopen(fd, "rb", closefd=False) as file:
            return _parse(path, status, file.read())
    except OSError as error:
        raise from_os_error(error, path) from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        # It may be anybody's; what is not ours is not believed.
        return None
    finally:
        os.close(fd)


def home_of(record: Record) -> Record | None:
    """The record in the run's home, which says how far the run got; None when the run has come to its end meanwhile.

    Raises:
        SystemRefusedError: it is not there, though the run is not at its end.
    """
    if record.path == record.home:
        return record
    home = read_record(record.home)
    # A pointer to a pointer was not made by us.
    if home is not None and home.path == home.home:
        return home
    if not record.path.exists():
        return None
    raise SystemRefusedError(
        f"belongs to an unfinished run whose record {record.home} is missing; bring that back, or delete this file and "
        f"{record.run}-* beside it to keep the data as they are",
        file=record.path,
        code="unfinished",
    )


def _parse(path: Path, status: os.stat_result, content: bytes) -> Record | None:
    steps, size = _steps(content)
    if not steps or "run" not in steps[0]:
        return None
    run = steps[0]["run"]
    others = run.get("folders", [])
    home = path if "home" not in run else _beside(path, run["home"])
    if home.name != path.name or len(others) > _MAX_FOLDERS:
        return None
    record = Record(
        path=path,
        owner=status.st_uid,
        mtime_ns=status.st_mtime_ns,
        names=frozenset(name for name in run["files"] if is_plain(name)),
        home=home,
        folders=(path.parent, *(_beside(path, folder) for folder in others)),
        boot=str(run.get("boot")),
        size=size,
        **_process(run),
    )
    record = replace(record, **_progress(steps[1:]))
    sound = [_is_sound(one, record) for one in record.moves] + [_is_sound(one, record) for one in record.changes]
    return record if all(sound) else None


def _progress(steps: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """How far the run got, by the steps after its first."""
    facts: dict[str, Any] = {}
    for step in steps:
        if "taken" in step:
            facts |= _process(step["taken"])
        elif "moves" in step:
            facts["moves"] = tuple(Move(*one) for one in step["moves"])
        elif "changes" in step:
            facts["changes"] = tuple(Change(*one) for one in step["changes"])
        elif step.keys() <= {"revoked", "done", "undone"}:
            facts |= dict.fromkeys(step, True)
    return facts


def _is_sound(one: Move | Change, record: Record) -> bool:
    """Whether it is about a file in a folder of the run, and all its numbers are such."""
    numbers = one._asdict()
    name = numbers.pop("name")
    if isinstance(one, Move) and one.size is None and one.mtime_ns is None:
        del numbers["size"], numbers["mtime_ns"]
    whole = all(type(number) is int and number >= 0 for number in numbers.values())
    return is_plain(name) and whole and one.folder < len(record.folders)


def _process(step: dict[str, Any]) -> dict[str, Any]:
    pid = step["pid"]
    if type(pid) is not int or not 0 < pid <= _MAX_PID:
        raise ValueError
    return {"pid": pid, "host": _text(step["host"])}


def _steps(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The steps that are whole, and how many bytes they take."""
    steps, size = [], 0
    for line in content.splitlines(keepends=True):
        checksum, _, text = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
            break
        steps.append(json.loads(text))
        size += len(line)
    return steps, size


def _beside(path: Path, relative: Any) -> Path:
    """What a record calls by its way from there. No link is followed: the paths of runs have none."""
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
