"""How a result is printed: as one JSON object, as tables on a terminal, or else as lines."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gradtool._version import __version__
from gradtool.errors import EXIT_FOUND, EXIT_OK
from gradtool.report.facts import data_of, known_of
from gradtool.report.lines import lines_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.errors import Problem
    from gradtool.report.facts import Result

SCHEMA = 1
_STATUS = {EXIT_OK: "ok", EXIT_FOUND: "found"}


def show(command: str, result: Result, problems: Sequence[Problem], *, as_json: bool, verbose: bool) -> None:
    """Print a result on stdout."""
    if as_json:
        print_json(command, EXIT_FOUND if problems else EXIT_OK, data_of(result), problems)
    elif sys.stdout.isatty():
        from gradtool.report.tables import show_tables  # imports rich

        show_tables(result, verbose=verbose)
    else:
        # In one write, so that `| head -1` does not close the pipe in the middle.
        sys.stdout.write("".join("\t".join(fields) + "\n" for fields in lines_of(result, verbose=verbose)))


def print_json(command: str, exit_code: int, data: dict[str, Any], problems: Sequence[Problem]) -> None:
    """Print the one JSON object of a call."""
    import json  # kept off the start-up path

    envelope = {
        "gradtool": __version__,
        "schema": SCHEMA,
        "command": command,
        "status": _STATUS.get(exit_code, "error"),
        "exit_code": exit_code,
        "data": data,
        "errors": [known_of(asdict(one)) for one in problems],
    }
    sys.stdout.write(json.dumps(envelope, allow_nan=False) + "\n")
