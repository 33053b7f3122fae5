"""How a call is printed: each format is a module, with a function `show` that prints an `Outcome` on stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.errors import Problem
    from gradtool.report.facts import Result


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
    """Print how a call ended, in the format of this name; text for any other word."""
    # Each is only imported if it is asked for.
    if form == "json":
        from gradtool.report import json_object

        json_object.show(outcome)
    elif form == "jsonl":
        from gradtool.report import json_lines

        json_lines.show(outcome)
    elif form == "github":
        from gradtool.report import github

        github.show(outcome)
    else:
        from gradtool.report import text

        text.show(outcome)
