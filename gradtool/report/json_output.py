"""The outcome of a call as one JSON object, or as JSON lines; on failure too."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from gradtool._version import __version__
from gradtool.errors import EXIT_FOUND, EXIT_OK
from gradtool.ops.results import is_rows
from gradtool.report.fields import as_json, data_of, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradtool.report import Outcome

SCHEMA = 1
_STATUS = {EXIT_OK: "ok", EXIT_FOUND: "found"}


def show_object(outcome: Outcome) -> None:
    """Print one JSON object."""
    sys.stdout.write(_dumped(_envelope(outcome, with_rows=True)))


def show_lines(outcome: Outcome) -> None:
    """Print one JSON object for each row, then one for all else. Few of them are in memory at a time."""
    sys.stdout.writelines(_lines_of(outcome))


def _lines_of(outcome: Outcome) -> Iterator[str]:
    fields = {} if outcome.result is None else vars(outcome.result)
    for key in filter(is_rows, fields):
        for row in fields[key]:
            yield _dumped({"type": kind_of(key)} | as_json(row))
    yield _dumped({"type": "result"} | _envelope(outcome, with_rows=False))


def _envelope(outcome: Outcome, *, with_rows: bool) -> dict[str, Any]:
    return {
        "gradtool": __version__,
        "schema": SCHEMA,
        "command": outcome.command,
        "status": _STATUS.get(outcome.exit_code, "error"),
        "exit_code": outcome.exit_code,
        "data": {} if outcome.result is None else data_of(outcome.result, with_rows=with_rows),
        "errors": as_json(outcome.problems),
    }


def _dumped(value: dict[str, Any]) -> str:
    """Return an object as a line of plain ASCII, which no runner of CI jobs takes for a command (see `printable`)."""
    # Only strings contain ##, and the escape reads back the same.
    return json.dumps(value, allow_nan=False).replace("##", "#\\u0023") + "\n"
