"""The look of help, and the topics of `gradtool help TOPIC`; imports nothing heavy."""

from __future__ import annotations

import pkgutil
import re
import shutil
import sys

from gradtool.report.messages import is_coloured

DOCS = "https://github.com/gradtool/gradtool/tree/main/docs"
# Each is a page of Markdown in gradtool/topics, from which docs/cli.md is made too.
TOPICS = ("convert", "in", "out", "exit-codes")
_WIDEST, _NARROWEST = 100, 32
_BOLD, _CYAN, _RESET = "\x1b[1m", "\x1b[36m", "\x1b[0m"


def width() -> int:
    """Return the number of columns for help: those of the terminal, up to a limit, without a margin."""
    # Typer itself would write lines of 50 columns on any narrower terminal.
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns)) - 2


def heading(text: str) -> str:
    """Return a heading, bold on a terminal."""
    return f"{_BOLD}{text}{_RESET}" if is_coloured(sys.stdout) else text


def literal(text: str) -> str:
    """Return what is typed, in colour on a terminal."""
    return f"{_CYAN}{text}{_RESET}" if is_coloured(sys.stdout) else text


def markdown_of(topic: str) -> str:
    """Return the page of a topic."""
    return (pkgutil.get_data("gradtool", f"topics/{topic}.md") or b"").decode()


def text_of(topic: str) -> str:
    """Return the page of a topic as text that fits the terminal. Code is not wrapped, so that it can be copied."""
    paragraphs = []
    for number, part in enumerate(re.split(r"```(?:sh)?\n", markdown_of(topic))):
        if number % 2:
            paragraphs.append("\n".join(map(literal, part.splitlines())))
        else:
            paragraphs += map(_paragraph, part.strip().split("\n\n"))
    return "\n\n".join([*filter(None, paragraphs), f"Documentation: {DOCS}"])


def _paragraph(text: str) -> str:
    """Return a heading, a list or running text in lines that fit."""
    import textwrap

    if text.startswith("#"):
        return heading(text.lstrip("# "))
    # The lines of a list that are indented continue its entries.
    parts = text.replace("`", "").replace("\n  ", " ").split("\n") if text.startswith("- ") else [text.replace("`", "")]
    indent = "  " if text.startswith("- ") else ""
    wrap = textwrap.TextWrapper(width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.fill(part) for part in parts)
