"""A section in Markdown for the page of a GitHub Actions run: facts and rows as tables, errors as they are printed."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from gradtool.errors import EXIT_OK, Problem, as_command, shortened
from gradtool.report.facts import NONFINITE, data_of, facts_of, field, is_rows, kind_of, short
from gradtool.report.messages import and_more, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gradtool.report import Outcome

# Of all sections of a step together. GitHub shows none of them if they are longer.
_MOST_BYTES = 1 << 20
# For the line that says how many rows are left out.
_NOTE_BYTES = 100
# Of errors, and of paths that were written; and the characters of an error.
_MOST_LINES = 20
_MOST_CHARACTERS = 2000


def append(outcome: Outcome) -> list[Problem]:
    """Append a section about a call to $GITHUB_STEP_SUMMARY, if that is set; a warning if it cannot be done."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return []
    try:
        # Not to block: the path may be that of a FIFO that nobody reads.
        with open(path, "ab", opener=_opened) as file:
            taken = file.tell()
            section = _section(outcome, _MOST_BYTES - taken - 1)
            # What is there may end in the middle of a line.
            file.write(b"\n" + section if section and taken else section)
    except OSError as error:
        return [Problem("step-summary", f"cannot write the summary of the step: {error.strerror or error}", path)]
    if not section:
        return [Problem("step-summary", "the summary of the step is full; this call is not in it", path)]
    return []


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _section(outcome: Outcome, room: int) -> bytes:
    """The section, with as many rows as there is room for; empty if there is not even room for the rest."""
    result = outcome.result
    data = {} if result is None else data_of(result)
    ending = "ok" if outcome.exit_code == EXIT_OK else f"failed with exit code {outcome.exit_code}"
    lines = [f"### gradtool {_code(outcome.command)}: {ending}", ""]
    if result is not None:
        facts = [[key, _cell(value, field)] for key, value in facts_of(result, data, verbose=outcome.verbose).items()]
        wrote = [["wrote", _code(path)] for path in _first(data.get("wrote", ()))]
        lines += _table(["fact", "value"], [*wrote, *facts])
    said = [f"error: {line}" for line in _first([problem.as_command().line for problem in outcome.problems])]
    said += [] if outcome.summary is None else [f"error: {as_command(outcome.summary)}"]
    said += [f"warning: {line}" for line in _first([problem.as_command().line for problem in outcome.warnings])]
    hints = [problem.as_command().hint for problem in (*outcome.problems, *outcome.warnings)]
    said += [f"hint: {hint}" for hint in _first([hint for hint in dict.fromkeys(hints) if hint])]
    lines += _block(said)
    section = _encoded(lines)
    if len(section) + _NOTE_BYTES > room:
        return b""
    for key in filter(is_rows, data):
        section += _rows(kind_of(key), data[key], room - len(section))
    return section


def _first(lines: Sequence[str]) -> list[str]:
    """Some of the lines, and how many more there are."""
    more = len(lines) - _MOST_LINES
    return list(lines) if more <= 0 else [*lines[:_MOST_LINES], and_more(more)]


def _rows(kind: str, rows: Sequence[dict[str, Any]], room: int) -> bytes:
    """A table of the rows, names first; if there is no room for all, of as many as there is room for."""
    if not rows:
        return b""
    names = [key for key in ("name", "file") if key in rows[0]]
    # Rows within rows have no room in a cell.
    keys = [*names, *(key for key in rows[0] if key not in names and not is_rows(key))]
    text = bytearray(_encoded(_head([kind if key == "name" else key for key in keys])))
    if len(text) + _NOTE_BYTES > room:
        return b""
    for number, row in enumerate(rows):
        line = _encoded([_line(_cell(row[key], short) for key in keys)])
        if len(text) + len(line) + _NOTE_BYTES > room:
            return bytes(text) + _encoded(["", f"There is no room for {len(rows) - number:,} more rows.", ""])
        text += line
    return bytes(text) + b"\n"


def _table(titles: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    return [*_head(titles), *map(_line, rows), ""]


def _head(titles: Sequence[str]) -> list[str]:
    return [_line(titles), _line("---" for _ in titles)]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any, spelled: Callable[[Any], str]) -> str:
    """Text may come from a file, so nothing in it is Markdown or HTML; numbers are spelled by the function."""
    return _code(value) if isinstance(value, str) and value not in NONFINITE else spelled(value)


def _code(text: str) -> str:
    """Text between more backticks than it has in a row. In a table, GitHub takes a pipe as text after a backslash."""
    text = printable(text).replace("|", "\\|")
    if not text:
        return ""
    fence = _fence(text, 1)
    # Markdown takes off a space at both ends, where there is one.
    pad = " " if text.startswith(("`", " ")) or text.endswith(("`", " ")) else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _block(lines: Sequence[str]) -> list[str]:
    """Lines as a block of code."""
    lines = [printable(shortened(line, _MOST_CHARACTERS)) for line in lines]
    fence = _fence("\n".join(lines), 3)
    return [f"{fence}text", *lines, fence, ""] if lines else []


def _fence(text: str, least: int) -> str:
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(least, longest + 1)


def _encoded(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
