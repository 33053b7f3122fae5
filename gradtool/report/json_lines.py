"""A call as JSON lines: one object for each row, then one for all else."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gradtool.report.facts import facts_data_of, kind_of, plain, rows_of
from gradtool.report.json_object import dumped, envelope_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradtool.report import Outcome

# Written at once, so that many short lines are not as many calls of the system, and `| head -1` rarely breaks the pipe.
_CHARACTERS = 1 << 16


def show(outcome: Outcome) -> None:
    """Print the lines. No more than some of them are in memory."""
    text = ""
    for line in _lines_of(outcome):
        text += line + "\n"
        if len(text) >= _CHARACTERS:
            sys.stdout.write(text)
            text = ""
    sys.stdout.write(text)


def _lines_of(outcome: Outcome) -> Iterator[str]:
    """A line for each row, with its kind as `type`; last the one of the type "result", as `--format json` has it."""
    rows = {} if outcome.result is None else rows_of(outcome.result)
    for key, several in rows.items():
        for row in several:
            yield dumped({"type": kind_of(key)} | plain(row))
    data = {} if outcome.result is None else facts_data_of(outcome.result)
    yield dumped({"type": "result"} | envelope_of(outcome, data))
