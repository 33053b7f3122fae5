"""A result as text: as tables on a terminal, or else as lines. Errors are on stderr, whatever the format."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradtool.report import Outcome


def show(outcome: Outcome) -> None:
    """Print the result, if there is one and it is wanted."""
    if outcome.result is None or outcome.quiet:
        return
    if sys.stdout.isatty():
        from gradtool.report.tables import show_tables  # imports rich

        show_tables(outcome.result, verbose=outcome.verbose)
    else:
        from gradtool.report.lines import lines_of

        # In one write, so that `| head -1` does not close the pipe in the middle.
        lines = lines_of(outcome.result, verbose=outcome.verbose)
        sys.stdout.write("".join("\t".join(fields) + "\n" for fields in lines))
