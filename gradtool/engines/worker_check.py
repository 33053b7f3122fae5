"""What is asked of a worker before it gets work: the version, the backend, and whether it sees and writes the files.

A worker may have another version of gradtool, or none. So questions and answers are plain values.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool._version import __version__
from gradtool.backends.choose import choose
from gradtool.engines import wire
from gradtool.engines.work import HOST, process
from gradtool.errors import BadInputError, GradtoolError
from gradtool.store.fs import Folder
from gradtool.store.late import patiently
from gradtool.store.source import open_source
from gradtool.wording import Text, as_command, say

if TYPE_CHECKING:
    from collections.abc import Mapping


# What is known of a worker that has not answered.
_NOTHING: dict[str, Any] = dict.fromkeys(("version", "host", "process", "error", "backend", "why"), "")
# What the backend says, and a hint: each as Python words it, and as the command does.
_NOTHING |= {"user": 0, "sees": False, "refused": [""] * 4}


class Question(NamedTuple):
    """What a worker is asked: a file that it must see, and whether it must make `probe` beside it."""

    path: str
    inode: int
    probe: str | None
    backend: str | None
    device: int | None


def report_status(question: tuple[Any, ...]) -> bytes:
    """In a worker: who it is, and what is wrong with it, if anything is; what `report_in` reads."""
    asked = Question(*question)
    report = _NOTHING | {"version": __version__, "host": HOST, "process": process()}
    report |= {"user": os.geteuid(), "sees": _sees(asked)}
    try:
        choice = choose(asked.backend, asked.device)
        report |= {"backend": choice.backend.name, "why": as_command(choice.why)}
    except GradtoolError as error:
        (problem,) = error.problems
        report["refused"] = [
            wording for text in (problem.message, problem.hint or "") for wording in (str(text), as_command(text))
        ]
    if report["sees"] and asked.probe is not None:
        report["error"] = _failure_to_write(asked)
    return wire.packed(report)


def report_in(data: object) -> dict[str, Any]:
    """Read a report; raises `ValueError` if it is none."""
    return wire.unpacked(data, _NOTHING)


def _sees(asked: Question) -> bool:
    def look() -> bool | None:
        with contextlib.closing(open_source(Path(asked.path))) as reader:
            return reader.source.inode == asked.inode or None

    try:
        return patiently(look)[0] is not None
    except (OSError, BadInputError):
        return False


def _failure_to_write(asked: Question) -> str:
    """Why a file cannot be made beside the one that is seen; empty if it can."""
    try:
        with Folder.at(Path(asked.path).parent) as folder:
            os.close(folder.create(name := str(asked.probe)))
            folder.unlink(name)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def problem_with(report: Mapping[str, Any], question: Question) -> tuple[str, str | None] | None:
    """Say what is wrong with a worker, after its answer, with a hint; None if nothing is."""
    who = f"the worker on {report['host']}"
    folder = Path(question.path).parent
    if report["version"] != __version__:
        return f"{who} has gradtool {report['version']}, this is {__version__}", "install the same version there"
    if not report["sees"]:
        return f"{who} does not see {question.path}", "mount the same file system there, at the same path"
    if any(report["refused"]):
        message, command, hint, hint_of_command = report["refused"]
        return say("{}: {}", who, Text(message, command)), Text(hint, hint_of_command) or None
    if question.probe is not None and report["user"] != os.geteuid():
        what = f"{who} runs as user {report['user']}, and this command as user {os.geteuid()}"
        return what, "start the workers as the user who runs the command"
    if report["error"]:
        return f"{who} cannot make files in {folder}: {report['error']}", "make it writable there"
    return None
