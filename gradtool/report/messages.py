"""Errors and warnings on stderr: one line for each problem."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from gradtool.errors import shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.errors import Problem

# On stderr; JSON lists all.
_MAX_LINES = 20
# Characters; a path and a tensor's name may have 4,096 each.
_MAX_LINE = 20_000
_COLOURS = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m"}


def print_problems(problems: Sequence[Problem], summary: str | None = None, *, level: str = "error") -> None:
    """Print one line for each problem on stderr; on a terminal in colour, and wrapped between words."""
    lines = [one.line for one in problems[:_MAX_LINES]]
    if len(problems) > _MAX_LINES:
        lines.append(f"and {len(problems) - _MAX_LINES} more; --json names them all")
    lines += [summary] if summary else []
    if not lines:
        return
    head = f"gradtool: {level}: "
    texts = [printable(shortened(line, _MAX_LINE)) for line in lines]
    if sys.stderr is not None and sys.stderr.isatty():
        texts = [_wrapped(text, len(head)) for text in texts]
        if not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
            head = f"gradtool: {_COLOURS[level]}{level}:\x1b[0m "
    # In one write, so that lines of other processes do not get in between.
    sys.stderr.write("".join(f"{head}{text}\n" for text in texts))


def printable(text: str) -> str:
    """The text with all control characters, which a terminal might act on, escaped; and the second # of two.

    In the log of a CI job, `##[add-mask]x` or `##vso[...]x` anywhere in a line is a command to the runner. Those that
    begin a line, such as `::error::x`, are escaped as they are printed (`gradtool.streams`).
    """
    escaped = text if text.isprintable() else text.translate(_ESCAPES)
    return escaped.replace("##", "#\\x23")


class _Escapes(dict[int, str]):
    """What is printed for each character, computed on first use."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = character if character.isprintable() else character.encode("unicode_escape").decode()
        return self[code]


_ESCAPES = _Escapes()


def _wrapped(text: str, taken: int) -> str:
    """The text in lines as wide as the terminal, broken only at spaces; the first begins behind `taken` columns."""
    import shutil
    import textwrap

    # A terminal puts the cursor on the next line when the last column is filled.
    width = shutil.get_terminal_size().columns - 1
    if width <= taken:
        return text
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=" " * taken,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    return "\n".join(lines)[taken:]
