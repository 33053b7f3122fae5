"""How a call is printed: each format is a module, with a function `show` that prints an `Outcome` on stdout."""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import UsageError, option, say
from gradtool.validators import choice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.errors import Problem
    from gradtool.options import Display
    from gradtool.report.facts import Result

# The module of each format, imported only if that is requested.
_MODULES = {"text": "text", "json": "json_object", "jsonl": "json_lines", "github": "github"}
_VARIABLE = "GRADTOOL_FORMAT"


class Outcome(NamedTuple):
    """How a call ended: its result, or None if it stopped with an error; what is wrong, and what sums that up."""

    command: str
    exit_code: int
    result: Result | None
    problems: Sequence[Problem]
    summary: str | None = None
    quiet: bool = False
    verbose: bool = False

    @property
    def warnings(self) -> Sequence[Problem]:
        """The warnings of the result, if they are wanted."""
        from gradtool.report.facts import flat  # not needed before there is a result

        return () if self.quiet or self.result is None else flat(self.result).get("warnings", ())


def show(form: str, outcome: Outcome) -> None:
    """Print how a call ended, in the format of this name; as text for any other word."""
    import_module(f"gradtool.report.{_MODULES.get(form, 'text')}").show(outcome)


def format_from(display: Display) -> str:
    """Return the format that options ask for, by default that of GRADTOOL_FORMAT or "text".

    Raises:
        UsageError: GRADTOOL_FORMAT names no format, or two options contradict each other.
    """
    if display.json and display.format not in {None, "json"}:
        message = say("{} contradicts {}", option("json", True), option("format", display.format))
        raise UsageError(message, hint="remove one of them")
    name = display.format or choice(_VARIABLE, os.environ.get(_VARIABLE) or "text", _MODULES)
    return "json" if display.json else name


def requested_format(arguments: Sequence[str]) -> str:
    """Return the format that a command line asks for, which may be wrong otherwise, or end before it is parsed."""
    line = "\0".join(["", *arguments, ""]).partition("\0--\0")[0] + "\0"
    formats = ["json"] if "\0--json\0" in line else re.findall("\0--format[=\0]([^\0]+)", line)
    return (formats[-1] if formats else os.environ.get(_VARIABLE) or "text").lower()
