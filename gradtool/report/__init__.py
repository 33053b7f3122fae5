"""How the outcome of a call is printed on stdout, in each output format."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import UsageError, option, say
from gradtool.validators import choice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.declare import Options
    from gradtool.errors import Problem
    from gradtool.ops.results import AnyResult
    from gradtool.options import DisplayOptions
    from gradtool.report.delimited import Table

# The module and the function of each format; imported only for that format.
_PRINTERS = {
    "text": ("text", "show_text"),
    "json": ("json_output", "show_object"),
    "jsonl": ("json_output", "show_lines"),
    "tsv": ("delimited", "show_tsv"),
    "csv": ("delimited", "show_csv"),
    "github": ("github", "show_annotations"),
}
# The formats that have one table.
_TABLES = ("tsv", "csv")
_VARIABLE = "GRADTOOL_FORMAT"


class Outcome(NamedTuple):
    """The end of a call: its result, or None after an error; its problems, and a summary of them.

    With a `table`, text has nothing else; TSV and CSV always have one.
    """

    command: str
    exit_code: int
    result: AnyResult | None
    problems: Sequence[Problem]
    summary: str | None = None
    quiet: bool = False
    verbose: bool = False
    table: Table | None = None

    @property
    def warnings(self) -> Sequence[Problem]:
        """The warnings of the result, unless only errors are wanted."""
        from gradtool.ops.results import flat  # not needed before there is a result

        return () if self.quiet or self.result is None else flat(self.result).get("warnings", ())


def show(form: str, outcome: Outcome) -> None:
    """Print the outcome of a call in a format; as text if there is no such format."""
    module, function = _PRINTERS.get(form, _PRINTERS["text"])
    getattr(import_module(f"gradtool.report.{module}"), function)(outcome)


def format_from(display: DisplayOptions) -> str:
    """Return the format that options ask for, by default that of GRADTOOL_FORMAT or "text".

    With columns, text is TSV, except on a terminal.

    Raises:
        UsageError: GRADTOOL_FORMAT names no format, or two options contradict each other.
    """
    if display.json and display.format not in {None, "json"}:
        message = say("{} cannot be combined with {}", option("json", True), option("format", display.format))
        raise UsageError(message, hint="remove one of them")
    name = display.format or choice(_VARIABLE, os.environ.get(_VARIABLE) or "text", _PRINTERS)
    name = "json" if display.json else name
    if not display.columns:
        return name
    if name not in {"text", *_TABLES}:
        message = say("{} cannot be combined with the format {}", option("columns"), name)
        raise UsageError(message, hint=say("use {}, or remove {}", option("format", "tsv"), option("columns")))
    return "tsv" if name == "text" and not sys.stdout.isatty() else name


def table_from(form: str, display: DisplayOptions, result: type[AnyResult], options: Options) -> Table | None:
    """Return the table to print for a call whose result is of this class, or None if the format has more than one.

    Raises:
        UsageError: the call has no such columns, or several tables.
    """
    if not (display.columns or form in _TABLES):
        return None
    from gradtool.report.delimited import choose_table  # reads the schema

    return choose_table(result, options, display.columns)


def requested_format(arguments: Sequence[str]) -> str:
    """Return the format that a command line asks for, even if the rest of it is wrong or is not parsed yet."""
    line = "\0".join(["", *arguments, ""]).partition("\0--\0")[0] + "\0"
    formats = ["json"] if "\0--json\0" in line else re.findall("\0--format[=\0]([^\0]+)", line)
    return (formats[-1] if formats else os.environ.get(_VARIABLE) or "text").lower()
