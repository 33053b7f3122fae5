"""A result as lines of tab-separated fields, for grep and awk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradtool.report.facts import data_of, facts_of, field, is_rows
from gradtool.report.messages import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradtool.report.facts import Result


def lines_of(result: Result, *, verbose: bool) -> Iterator[list[str]]:
    """One line for each path written and each fact, name first; and for each row, kind first and names last."""
    data = data_of(result)
    for path in data.get("wrote", ()):
        yield ["wrote", printable(path)]
    for key, value in facts_of(result, data, verbose=verbose).items():
        yield [key, field(value)]
    for key in filter(is_rows, data):
        for row in data[key]:
            names = [row.pop(name) for name in ("name", "file") if name in row]
            yield [key.removeprefix("per_"), *(field(value) for value in row.values()), *map(field, names)]
