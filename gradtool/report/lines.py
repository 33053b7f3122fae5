"""A result as lines of tab-separated fields, for grep and awk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradtool.report.facts import data_of, facts_of, field, is_rows, kind_of
from gradtool.report.messages import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradtool.report.facts import Result


def lines_of(result: Result, *, verbose: bool) -> Iterator[list[str]]:
    """One line for each path written and each fact, name first; and for each row, kind first and names last.

    Rows of a row follow it, with its names.
    """
    data = data_of(result)
    for path in data.get("wrote", ()):
        yield ["wrote", printable(path)]
    for key, value in facts_of(result, data, verbose=verbose).items():
        yield [key, field(value)]
    for key in filter(is_rows, data):
        for row in data[key]:
            names = [field(row.pop(name)) for name in ("name", "file") if name in row]
            inner = {one: row.pop(one) for one in list(row) if is_rows(one)}
            yield [kind_of(key), *map(field, row.values()), *names]
            for kind, own in inner.items():
                yield from ([kind, *map(field, one.values()), *names] for one in own)
