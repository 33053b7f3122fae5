"""A call as one JSON object, on failure too."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from gradtool._version import __version__
from gradtool.errors import EXIT_FOUND, EXIT_OK
from gradtool.report.facts import data_of, plain

if TYPE_CHECKING:
    from gradtool.report import Outcome

SCHEMA = 1
_STATUS = {EXIT_OK: "ok", EXIT_FOUND: "found"}


def show(outcome: Outcome) -> None:
    """Print the one JSON object of a call."""
    data = {} if outcome.result is None else data_of(outcome.result)
    sys.stdout.write(dumped(envelope_of(outcome, data)) + "\n")


def envelope_of(outcome: Outcome, data: dict[str, Any]) -> dict[str, Any]:
    """What a call says of itself, around its data."""
    return {
        "gradtool": __version__,
        "schema": SCHEMA,
        "command": outcome.command,
        "status": _STATUS.get(outcome.exit_code, "error"),
        "exit_code": outcome.exit_code,
        "data": data,
        "errors": plain(outcome.problems),
    }


def dumped(value: dict[str, Any]) -> str:
    """An object as a line of plain ASCII, which no runner of CI jobs takes for a command (see `printable`)."""
    # Only strings have it, and read back the same.
    return json.dumps(value, allow_nan=False).replace("##", "#\\u0023")
