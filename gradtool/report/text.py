"""A result as text: as tables on a terminal, else as lines of tab-separated fields, for grep and awk."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gradtool.errors import printable
from gradtool.ops.results import is_rows
from gradtool.report.fields import as_text, data_of, kind_of, summary_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradtool.ops.results import AnyResult
    from gradtool.report import Outcome


def show_text(outcome: Outcome) -> None:
    """Print the result, if there is one and it is wanted; errors are on stderr."""
    if outcome.result is None or outcome.quiet:
        return
    if sys.stdout.isatty():
        from gradtool.report.tables import show_table, show_tables  # imports rich

        if outcome.table is None:
            show_tables(outcome.command, outcome.result, verbose=outcome.verbose)
        else:
            show_table(outcome.result, outcome.table)
    else:
        # In one write, so that `| head -1` does not close the pipe in the middle.
        lines = _lines_of(outcome.result, verbose=outcome.verbose)
        sys.stdout.write("".join("\t".join(fields) + "\n" for fields in lines))


def _lines_of(result: AnyResult, *, verbose: bool) -> Iterator[list[str]]:
    """Yield a line for each path written and each field, name first; and for each row, kind first and names last.

    Rows of a row follow it, with its names.
    """
    data = data_of(result)
    for path in data.get("wrote", ()):
        yield ["wrote", printable(path)]
    for key, value in summary_of(result, data, verbose=verbose).items():
        yield [key, as_text(value)]
    for key in filter(is_rows, data):
        for row in data[key]:
            names = [as_text(row.pop(name)) for name in ("name", "file") if name in row]
            inner = {kind: row.pop(kind) for kind in list(row) if is_rows(kind)}
            yield [kind_of(key), *map(as_text, row.values()), *names]
            for kind, inner_rows in inner.items():
                yield from ([kind, *map(as_text, inner_row.values()), *names] for inner_row in inner_rows)
