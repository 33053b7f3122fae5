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
    from collections.abc import Iterable, Mapping

HOST = os.uname().nodename
# The version that is written, and the only one that is read: none was released before.
FORMAT = 2
# Of one log: a hundred thousand files take 15 MB.
MAX_BYTES = 32_000_000
MAX_FILES = 100_000
# The cost of JSON depends on how many values it has: how many of each character a step may have, per file and at least.
_PER_FILE = {b"[": 1, b"{": 1, b",": 7, b'"': 4}
PER_STEP = 100
# A run writes six, and each recovery adds two.
_MAX_STEPS = 1000
_MAX_PID = (1 << 31) - 1
_ENCODING = "utf-8", "surrogateescape"


class Move(NamedTuple):
    """A temporary and the target that it replaces; `size`, `mtime_ns` and `original` (its inode) if the target exists.

    `inode` is the temporary's, by which the target is recognized once it is new.
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


class Log(NamedTuple):
    """A transaction log as it was read; `names` are the targets in its own folder, `folders` those of the whole run.

    `ready`: no other run writes the targets. `moves` and `changes`: what may be half done. `revoked`: the moves are
    rolled back. `done` and `undone`: all files are new, or old, and only the clean-up is left. `missing`: folders that
    the run makes in its home. `boot`: the boot of the machine. `key`: what the checksums of its undo logs begin with.
    `size`: bytes without a torn end and without the lines that recoveries add.
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
        """The run's ID, which the names of all its files begin with."""
        return self.path.name.removesuffix(".run")

    @property
    def steps(self) -> list[Move | Change]:
        """What may be half done, file by file."""
        return [*self.moves, *self.changes]

    @property
    def is_unfinished(self) -> bool:
        """Whether some targets may be new and others old; a single rename is atomic."""
        return bool(len(self.moves) > 1 or self.changes) and not (self.done or self.undone)

    @property
    def ends_with_rename(self) -> bool:
        """Whether files are changed in place, and become new as a whole when one more file is renamed."""
        return bool(self.changes and self.moves)

    @property
    def outcome(self) -> str:
        """What recovery makes, or made, of the targets; a single move is not considered."""
        if self.undone or self.revoked:
            return "undone"
        if self.moves or self.done:
            return "finished"
        return "undone" if self.changes else "untouched"

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
        key=_text(run["key"]),
        size=size,
        **_process(run),
    )
    log = log._replace(**_progress(steps[1:]))
    if not all(_is_sound(step, log) for step in log.steps):
        raise ValueError
    return log


def _progress(steps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How far the run got, from the steps after the first."""
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


def _is_sound(step: Move | Change, log: Log) -> bool:
    """Whether the fields of a step have the right types, and its file is in a folder of the run."""
    fields = step._asdict()
    name = fields.pop("name")
    if isinstance(step, Move):
        # Negative before 1970.
        has_mtime = type(fields.pop("mtime_ns")) is int
        if (step.size, step.mtime_ns, step.original) == (None, None, None):
            del fields["size"], fields["original"]
        elif not has_mtime:
            return False
    are_counts = all(type(value) is int and value >= 0 for value in fields.values())
    return is_file_name(name) and are_counts and step.folder < len(log.folders)


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
