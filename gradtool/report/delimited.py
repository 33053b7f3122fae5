"""A table with a header line: which rows and columns of a result it has, and its lines as TSV and CSV."""

from __future__ import annotations

import json
import pkgutil
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.declare import declared_of
from gradtool.errors import UsageError, option, say
from gradtool.ops.results import is_rows, ordered
from gradtool.report.fields import as_json, as_text, data_of, kind_of
from gradtool.report.messages import without_commands

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.declare import Options
    from gradtool.ops.results import AnyResult
    from gradtool.report import Outcome

# The options that request rows. Other operations, which lack such an option, always have them.
_REQUESTS = {
    "per_tensor": ("per_tensor", "top"), "per_gradient": ("per_gradient",), "per_file": ("by_file",),
    "per_group": ("group",), "histogram": ("histogram",), "per_dtype": ("histogram",),
}  # fmt: skip
# Of the rows that an operation always has, those that it is called for.
_MAIN = ("per_tensor", "per_finding", "per_layer", "per_run")
# What the schema says about a float, and about the sizes of a shape.
_FLOAT, _SIZE = "#/$defs/float", {"type": "integer"}
_COLUMNS = option("columns")
# In place of a field with rows.
_RESULT = "result"


class Table(NamedTuple):
    """The columns of a table, and the field of the result that has its rows, or "result", which is a row itself.

    `requests` are the options that request the rows, and `is_there` says whether the call has one of them.
    """

    rows: str
    columns: Sequence[str]
    requests: Sequence[str] = ()
    is_there: bool = True

    def values(self, result: AnyResult) -> Iterator[list[Any]]:
        """Yield the values of each row, as JSON has them. Few rows are in memory at a time."""
        if self.rows == _RESULT:
            data = data_of(result, with_rows=False)
            yield [data[key] for key in self.columns]
        else:
            for row in getattr(result, self.rows):
                yield [as_json(getattr(row, key)) for key in self.columns]


def show_tsv(outcome: Outcome) -> None:
    """Print the table as lines of tab-separated values. No value contains a tab or a newline."""
    sys.stdout.writelines(without_commands("\t".join(cells) + "\n") for cells in _rows_of(outcome))


def show_csv(outcome: Outcome) -> None:
    """Print the table as lines of comma-separated values, quoted where necessary."""
    import csv

    class Line:
        write = staticmethod(without_commands)

    sys.stdout.writelines(map(csv.writer(Line, lineterminator="\n").writerow, _rows_of(outcome)))


def _rows_of(outcome: Outcome) -> Iterator[Sequence[str]]:
    """Yield the header and the cells of each row, if there is a result and it is wanted; errors are on stderr."""
    if outcome.result is not None and outcome.table is not None and not outcome.quiet:
        yield outcome.table.columns
        for values in outcome.table.values(outcome.result):
            yield [_cell(value) for value in values]


def _cell(value: Any) -> str:
    """Return a value as JSON has it, but nothing for null, and a shape with x between its sizes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else as_text(value)


def choose_table(result: type[AnyResult], options: Options, columns: Sequence[str]) -> Table:
    """Return the table of a call: the rows that it requests, else the result itself; all columns, or these.

    Columns that these rows lack select the first other table that has all of them.

    Raises:
        UsageError: no table has the columns, or several that were requested have them.
    """
    declared = _tables_of(result, options)
    tables = [table for table in declared if table.is_there and set(columns) <= set(table.columns)]
    if not tables:
        raise _no_table(declared, columns)
    if len({table.requests for table in tables if table.requests}) > 1:
        kinds = ", ".join(kind_of(table.rows) for table in tables if table.requests)
        message = f"rows of several kinds are requested ({kinds}), but a table has rows of only one kind"
        raise UsageError(message, hint=say("request one kind, or name columns that only it has with {}", _COLUMNS))
    return tables[0]._replace(columns=columns or tables[0].columns)


def _tables_of(result: type[AnyResult], options: Options) -> list[Table]:
    """Return all tables that a result may have, from what its schema declares: the one that is asked for first."""
    classes = json.loads(pkgutil.get_data("gradtool", "schema.json") or b"")["$defs"]
    properties = classes[result.__name__]["properties"]
    first: list[Table] = []
    others: list[Table] = []
    for field in filter(is_rows, properties):
        row = properties[field]["items"]
        name = row.get("anyOf", [row])[0]["$ref"].rpartition("/")[2]
        requests = tuple(name for name in _REQUESTS.get(field, ()) if name in declared_of(type(options)))
        is_there = not requests or not all(map(options.is_default, requests))
        table = Table(field, _columns_of(classes[name]["properties"]), requests, is_there)
        (first if requests or field in _MAIN else others).append(table)
    return [*first, Table(_RESULT, ordered(_columns_of(properties), result.headline)), *others]


def _columns_of(properties: dict[str, Any]) -> list[str]:
    """Return the properties that fit into a cell; only JSON lines have a type."""
    return [name for name, schema in properties.items() if name != "type" and _is_cell(schema)]


def _is_cell(schema: dict[str, Any]) -> bool:
    """Check whether a value fits into a cell: objects do not, nor do lists, except for a shape."""
    kinds = schema.get("anyOf", [schema])
    return all(kind.get("$ref", _FLOAT) == _FLOAT and kind.get("items", _SIZE) == _SIZE for kind in kinds)


def _no_table(tables: Sequence[Table], columns: Sequence[str]) -> UsageError:
    """Return the error for columns that no table of a call has; the hint names those that there are."""
    import difflib

    present = [table for table in tables if table.is_there]
    known = dict.fromkeys(name for table in present for name in table.columns)
    hint = "columns of " + "; ".join(f"{kind_of(table.rows)}: {', '.join(table.columns)}" for table in present)
    unknown = next((name for name in columns if name not in known), None)
    if unknown is None:
        return UsageError(say("{}: no table has all of {}", _COLUMNS, ", ".join(columns)), hint=hint)
    longer = [name for name in known if unknown in name.split("_")]
    if close := longer[:3] or difflib.get_close_matches(unknown, known):
        hint = f"did you mean {' or '.join(close)}? {hint[0].upper()}{hint[1:]}"
    if missing := next((table for table in tables if unknown in table.columns), None):
        hint = say("{} adds it; {}", option(missing.requests[0]), hint)
    return UsageError(say("{}: there is no column {!r}", _COLUMNS, unknown), hint=hint)
