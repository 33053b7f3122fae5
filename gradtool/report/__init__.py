"""How a call is printed: each format is a module, with a function `show` that prints an `Outcome` on stdout."""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import UsageError, option, say
from gradtool.validators import one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.errors import Problem
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


def checked_format(given: str | None, *, json: bool) -> str:
    """Return the format asked for by `--format` or `--json`, by default that of GRADTOOL_FORMAT or "text".

    Raises:
        UsageError: there is no such format, or the two options contradict each other.
    """
    source = _VARIABLE if given is None else option("format")
    name = one_of(source, (os.environ.get(_VARIABLE) or "text") if given is None else given, _MODULES)
    if json and given is not None and name != "json":
        message = say("{} contradicts {}", option("json", True), option("format", name))
        raise UsageError(message, hint="remove one of them")
    return "json" if json else name


def requested_format(arguments: Sequence[str]) -> str:
    """Return the format that a command line asks for, which may be wrong otherwise, or end before it is parsed."""
    line = "\0".join(["", *arguments, ""]).partition("\0--\0")[0] + "\0"
    formats = ["json"] if "\0--json\0" in line else re.findall("\0--format[=\0]([^\0]+)", line)
    return (formats[-1] if formats else os.environ.get(_VARIABLE) or "text").lower()
