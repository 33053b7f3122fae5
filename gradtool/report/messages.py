"""Errors and warnings on stderr: a line for each problem, and a hint below it."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

from gradtool.errors import as_command, option, printable, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

    from gradtool.errors import Problem

# Problems printed on stderr; JSON lists all.
_MAX_LINES = 20
# Characters; a path and a tensor's name may have 4,096 each.
_MAX_LINE = 20_000
# What a runner takes for a command: `::` at the beginning of a line, after no more than blanks, borders and escape
# sequences; `##[` and `##vso[` anywhere. The last character of a match is escaped.
_COMMAND = re.compile(r"(?:^|(?<=[\r\n]))(?:\x1b\[[0-9;?]*[A-Za-z]|[^\w\r\n\x1b])*?::|##(?=\w*\[)")
_COLOURS = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "note": "\x1b[1m", "hint": "\x1b[1;36m"}


def print_problems(problems: Sequence[Problem], summary: str | None = None, *, level: str = "error") -> None:
    """Print a line for each problem on stderr, and its hint below; on a terminal in colour, wrapped between words."""
    shown = [problem.as_command() for problem in problems[:_MAX_LINES]]
    entries = [(problem.line, problem.hint) for problem in shown]
    if len(problems) > _MAX_LINES:
        entries.append((and_more(len(problems) - _MAX_LINES), entries[-1][1]))
    if summary:
        entries.append((as_command(summary), shown[-1].hint if shown else None))
    if entries:
        # In one write, so that lines of other processes do not get in between.
        sys.stderr.write(without_commands("".join(_lines(entries, level))))


def _lines(entries: Sequence[tuple[str, str | None]], level: str) -> Iterator[str]:
    """Yield the lines. A hint that several problems in a row share follows the last of them."""
    is_terminal, in_colour = sys.stderr is not None and sys.stderr.isatty(), is_coloured(sys.stderr)
    for number, (line, hint) in enumerate(entries):
        is_last = number + 1 == len(entries) or entries[number + 1][1] != hint
        for label, text in ((level, line), ("hint", hint if is_last else None)):
            if text is None:
                continue
            begin = "  " if label == "hint" else "gradtool: "
            message = printable(shortened(text, _MAX_LINE))
            if is_terminal:
                message = _wrapped(message, len(f"{begin}{label}: "))
            yield begin + (f"{_COLOURS[label]}{label}:\x1b[0m" if in_colour else f"{label}:") + f" {message}\n"


def is_coloured(stream: TextIO | None) -> bool:
    """Check whether a stream is a terminal that shows colours."""
    is_terminal = stream is not None and stream.isatty()
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def and_more(count: int) -> str:
    """Return the line that stands for errors, warnings or paths that are not printed."""
    return f"and {count:,} more; {option('json').command} lists them all"


def without_commands(text: str) -> str:
    """Escape commands to a runner of CI jobs, in lines that may begin with text out of a file."""
    return _COMMAND.sub(lambda match: f"{match[0][:-1]}\\x{ord(match[0][-1]):x}", text)


def _wrapped(text: str, indent: int) -> str:
    """Return text in lines as wide as the terminal, broken only at spaces; the first begins after `indent` columns."""
    import shutil
    import textwrap

    # A terminal puts the cursor on the next line when the last column is filled.
    width = shutil.get_terminal_size().columns - 1
    if width <= indent:
        return text
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)[indent:]
