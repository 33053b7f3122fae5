"""Text, and for GitHub Actions an annotation for each error and warning, and a section on the page of the run."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any

from gradtool.errors import EXIT_OK, Problem, as_command, printable, shortened
from gradtool.ops.results import is_rows
from gradtool.report.fields import NONFINITE, as_short_text, as_text, data_of, kind_of, summary_of
from gradtool.report.messages import and_more, print_problems
from gradtool.report.text import show_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gradtool.report import Outcome

# GitHub shows ten errors and ten warnings of a step, and this many characters of each.
_ANNOTATIONS = 10
_ANNOTATION_CHARACTERS = 4000
# What the runner reads back (ActionCommand.cs of github.com/actions/runner).
_ESCAPED = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_IN_MESSAGES = str.maketrans(_ESCAPED)
_IN_PROPERTIES = str.maketrans(_ESCAPED | {":": "%3A", ",": "%2C"})
# Of all sections of a step together. GitHub shows none of them if they are longer.
_SECTION_BYTES = 1 << 20
# Room for the line that says how many rows are left out.
_NOTE_BYTES = 100
# Errors, and paths written, in a section; and the characters of an error.
_LINES = 20
_LINE_CHARACTERS = 2000


def show_annotations(outcome: Outcome) -> None:
    """Print the result as text, then the annotations; write the section."""
    show_text(outcome)
    failures = _append_section(outcome)
    annotations = [
        *_annotations(outcome.command, "error", outcome.problems, outcome.summary),
        *_annotations(outcome.command, "warning", [*outcome.warnings, *failures]),
    ]
    sys.stdout.write("".join(annotations))
    print_problems(failures, level="warning")


def _annotations(command: str, level: str, problems: Sequence[Problem], summary: str | None = None) -> Iterator[str]:
    """Yield as many annotations as GitHub shows; the last ones count those left out, and give the summary."""
    room = _ANNOTATIONS if summary is None else _ANNOTATIONS - 1
    shown = [problem.as_command() for problem in (problems if len(problems) <= room else problems[: room - 1])]
    # The summary has the hint that the problems share.
    shared_hint = None if summary is None or not shown else shown[-1].hint
    for problem in shown:
        text = _with_hint(problem.line, None if problem.hint == shared_hint else problem.hint)
        yield _annotation(level, f"gradtool {command} ({problem.code})", text, problem.file)
    if len(shown) < len(problems):
        yield _annotation(level, f"gradtool {command}", and_more(len(problems) - len(shown)))
    if summary is not None:
        yield _annotation(level, f"gradtool {command}", _with_hint(as_command(summary), shared_hint))


def _with_hint(message: str, hint: str | None) -> str:
    return f"{message}. {hint[0].upper()}{hint[1:]}" if hint else message


def _annotation(level: str, title: str, message: str, file: str | None = None) -> str:
    """Return a workflow command. The message names the file too, because the log shows nothing else."""
    properties = {"file": _in_workspace(file), "title": title} if file else {"title": title}
    fields = ",".join(f"{key}={printable(value).translate(_IN_PROPERTIES)}" for key, value in properties.items())
    message = printable(shortened(message, _ANNOTATION_CHARACTERS)).translate(_IN_MESSAGES)
    return f"::{level} {fields}::{message}\n"


def _in_workspace(file: str) -> str:
    """Return the path from the root of the repository, for a file in it; GitHub links no others."""
    workspace = os.environ.get("GITHUB_WORKSPACE")
    if not workspace:
        return file
    try:
        path = os.path.relpath(file, workspace)
    except OSError:  # The current folder is gone.
        return file
    return file if path == os.pardir or path.startswith(os.pardir + os.sep) else path


def _append_section(outcome: Outcome) -> list[Problem]:
    """Append a section in Markdown to $GITHUB_STEP_SUMMARY, if that is set; return a warning if that fails."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return []
    try:
        # Without blocking: the path may be that of a FIFO that nobody reads.
        with open(path, "ab", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK, 0o666)) as file:
            used = file.tell()
            section = _section(outcome, _SECTION_BYTES - used - 1)
            # What is there may end in the middle of a line.
            file.write(b"\n" + section if section and used else section)
    except OSError as error:
        return [Problem("step-summary", f"cannot write the step summary: {error.strerror or error}", path)]
    return [] if section else [Problem("step-summary", "the step summary is full; this call is missing from it", path)]


def _section(outcome: Outcome, room: int) -> bytes:
    """Return the section, with as many rows as there is room for; empty if there is not even room for the fields."""
    result = outcome.result
    data = {} if result is None else data_of(result)
    ending = "ok" if outcome.exit_code == EXIT_OK else f"failed with exit code {outcome.exit_code}"
    lines = [f"### gradtool {_code(outcome.command)}: {ending}", ""]
    if result is not None:
        fields = [["wrote", _code(path)] for path in _first(data.get("wrote", ()))]
        fields += [
            [key, _cell(value, as_text)] for key, value in summary_of(result, data, verbose=outcome.verbose).items()
        ]
        lines += [*_head(["field", "value"]), *map(_row, fields), ""]
    errors, warnings = (
        [problem.as_command() for problem in problems] for problems in (outcome.problems, outcome.warnings)
    )
    messages = [f"error: {line}" for line in _first([problem.line for problem in errors])]
    messages += [] if outcome.summary is None else [f"error: {as_command(outcome.summary)}"]
    messages += [f"warning: {line}" for line in _first([problem.line for problem in warnings])]
    hints = dict.fromkeys(problem.hint for problem in (*errors, *warnings) if problem.hint)
    messages += [f"hint: {hint}" for hint in _first(list(hints))]
    section = _encoded([*lines, *_block(messages)])
    if len(section) + _NOTE_BYTES > room:
        return b""
    for key in filter(is_rows, data):
        section += _table(kind_of(key), data[key], room - len(section))
    return section


def _first(lines: Sequence[str]) -> list[str]:
    """Return the first lines, and a line that counts the others."""
    more = len(lines) - _LINES
    return list(lines) if more <= 0 else [*lines[:_LINES], and_more(more)]


def _table(kind: str, rows: Sequence[dict[str, Any]], room: int) -> bytes:
    """Return a table of the rows, names first; of as many as there is room for."""
    if not rows:
        return b""
    names = [key for key in ("name", "file") if key in rows[0]]
    # Rows within rows have no room in a cell.
    keys = [*names, *(key for key in rows[0] if key not in names and not is_rows(key))]
    table = bytearray(_encoded(_head([kind if key == "name" else key for key in keys])))
    if len(table) + _NOTE_BYTES > room:
        return b""
    for number, row in enumerate(rows):
        line = _encoded([_row(_cell(row[key], as_short_text) for key in keys)])
        if len(table) + len(line) + _NOTE_BYTES > room:
            return bytes(table) + _encoded(["", f"There is no room for {len(rows) - number:,} more rows.", ""])
        table += line
    return bytes(table) + b"\n"


def _head(titles: Sequence[str]) -> list[str]:
    return [_row(titles), _row("---" for _ in titles)]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any, formatted: Callable[[Any], str]) -> str:
    """Return a value as a cell. Text may come from a file, so nothing in it may be read as Markdown or HTML."""
    return _code(value) if isinstance(value, str) and value not in NONFINITE else formatted(value)


def _code(text: str) -> str:
    """Return text between more backticks than it has in a row. A pipe would end the cell of a table."""
    text = printable(text).replace("|", "\\|")
    if not text:
        return ""
    fence = _fence(text, 1)
    # Markdown drops a space at both ends.
    pad = " " if text.startswith(("`", " ")) or text.endswith(("`", " ")) else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _block(lines: Sequence[str]) -> list[str]:
    """Return lines as a block of code."""
    lines = [printable(shortened(line, _LINE_CHARACTERS)) for line in lines]
    fence = _fence("\n".join(lines), 3)
    return [f"{fence}text", *lines, fence, ""] if lines else []


def _fence(text: str, least: int) -> str:
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(least, longest + 1)


def _encoded(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
