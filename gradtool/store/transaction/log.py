"""Transaction logs: what is in one, as it is written and as it is read back.

A log is one line for each step, with a checksum in front. A torn line at the end was not written yet.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import BadInputError
from gradtool.store.format.index import is_file_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

HOST = os.uname().nodename
# The version that is written, and the only one that is read: none was released before.
FORMAT = 3
# Of one log: a hundred thousand files take 15 MB.
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
    """The redo log of the run, in its home: the number in its name, its inode, and the bytes that count."""

    number: int
    inode: int
    size: int


class Log(NamedTuple):
    """A transaction log as it was read; `names` are the targets in its own folder, `folders` those of the whole run.

    `holds_locks`: no other run writes the targets. `moves` and `changes`: the run is ready, and these are rolled
    forward; `redo` has the content of the changes. `ended`: what became of the targets; only the clean-up is left.
    `missing`: folders that the run makes in its home. `boot`: the boot of the machine. `size`: bytes without a torn end
    and without the lines that recoveries add.
    """

    path: Path
    inode: int
    owner: int
    pid: int
    host: str
    boot: str
    names: frozenset[str]
    home: Path
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
    def outcome(self) -> str:
        """What recovery makes, or made, of the targets, unless the run is atomic."""
        return self.ended or (FINISHED if self.steps else UNTOUCHED)

    @property
    def who(self) -> str:
        """The process, for messages."""
        user = "" if self.owner == os.geteuid() else f" of user {self.owner}"
        return f"PID {self.pid}{user}" + ("" if self.host == HOST else f" on {self.host}")


def line_of(file: Path | None = None, /, **entry: Any) -> bytes:
    """One step as a line of a log; raises `BadInputError` about a file if it is too large to be read back."""
    # Names as the system has them, bytes of no encoding included: escaped, they would take up to three times the space.
    text = json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode(*_ENCODING)
    if len(text) > MAX_BYTES // 2 or not _is_small(text):
        limits = f"{MAX_FILES:,} files, or {MAX_BYTES // 2:,} bytes (they have {len(text):,})"
        what = f"the names of the files to write exceed the limit of {limits}"
        raise BadInputError(what, file=file, code="limit", hint="write them in several calls")
    return b"%08x %s\n" % (zlib.crc32(text), text)


def parse(path: Path, status: os.stat_result, content: bytes) -> Log | None:
    """The log in a file, or None before its first line is complete; `ValueError` and others if it is malformed."""
    steps, size = _steps(content)
    if not steps:
        return None
    run = steps[0]["run"]
    if run["format"] != FORMAT:
        raise ValueError
    missing = run.get("missing", [])
    home = path if "home" not in run else _beside(path, run["home"])
    if home.name != path.name or not all(map(is_file_name, [*run["files"], *missing])):
        raise ValueError
    log = Log(
        path=path,
        inode=status.st_ino,
        owner=status.st_uid,
        names=frozenset(run["files"]),
        home=home,
        folders=(path.parent, *(_beside(path, folder) for folder in run.get("folders", []))),
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
    """How far the run got, from the steps after the first."""
    facts: dict[str, Any] = {}
    for step in steps:
        if "taken" in step:
            facts |= _process(step["taken"])
        elif "ready" in step:
            moves, changes, redo = step["ready"]
            facts["moves"], facts["changes"] = [Move(*move) for move in moves], [Change(*change) for change in changes]
            facts["redo"] = None if redo is None else Redo(*redo)
        elif step.get("ended") in (FINISHED, UNTOUCHED):
            facts["ended"] = step["ended"]
        elif "holds_locks" in step:
            facts["holds_locks"] = True
        else:
            raise ValueError
    return facts


def _is_sound(step: Move | Change, log: Log) -> bool:
    """Whether the fields of a step have the right types, and its file is in a folder of the run."""
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


def _steps(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The complete steps, and their bytes up to the last that is not a recovery's."""
    steps: list[dict[str, Any]] = []
    size = end = 0
    for line in io.BytesIO(content):
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


def _is_small(text: bytes) -> bool:
    """Whether a step has no more values than the largest that is written; checked before it is parsed."""
    return all(text.count(character) <= most * MAX_FILES + PER_STEP for character, most in _PER_FILE.items())


def _beside(path: Path, relative: Any) -> Path:
    """A path relative to the folder of a log, links not followed: the paths of runs have none."""
    return Path(os.path.normpath(path.parent / _text(relative)))


def _text(value: Any) -> str:
    if not isinstance(value, str) or b"\0" in os.fsencode(value):
        raise TypeError
    return value
