"""A result on a terminal. No name, number or path is broken: paths are shortened in the middle, columns left out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradtool.errors import number_of
from gradtool.report.fields import as_short_text, as_text, data_of, is_rows, summary_of
from gradtool.report.histogram import norm_bars, show_histogram, storage_columns
from gradtool.report.messages import without_commands

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.report.fields import Result

    Row = dict[str, Any]
    # The texts of a table, by the keys of its columns.
    Columns = dict[str, list[str]]

# Narrower terminals get rows as blocks of lines.
_TABLE_COLUMNS = 60
# A path is shortened to this. All else is as wide as its content.
_SHORTEST_PATH = 24
# The key of the column of bars, which needs no heading, and their length.
_BARS, _BAR = "", 8
# The columns to leave out where there is no room, the first one first. Names and norms always have room.
_LEFT_OUT = (
    "differing_bits", "nonfinite_both", "not_close", "norm_a", "norm_b", "max_rel_diff_index", "max_ulp_index",
    "max_abs_diff_index", "max_rel_diff", "dtype_b", "dtype_a", "max_ulp", "differing", "max_abs_diff",
    "nonfinite_b", "nonfinite_a", "cosine",
    "gb_per_s", "seconds", "columns", "rows", "zeros", "elements", "tensors", "dtype", "shape", "files", "pid",
    "inf", "nan", _BARS, "file", "max_abs", "clipped", "taken", "weight", "coef",
)  # fmt: skip
_TEXTS = ("name", "file", "group", "dtype", "outcome", "key", "value", "stored as", "loss scale", _BARS)
# Between two columns.
_GAP = 3
# Labels of fields in prose, which is broken between words where other values are shortened.
_PROSE = ("backend", "system", "cpu backend", "cpu features", "gpu", "gpu driver", "settings")
# The paths written that are listed; lines off a terminal and JSON list all.
_PATHS = 3
_PHASES = ("total", "read", "compute", "write", "commit")
# The fields that share a line with others.
_GROUPED = {
    "nan", "inf", "zeros", "files", "tensors", "elements", "bytes", "backend", "backend_why", "threads", "seconds",
    *(f"{phase}_{unit}" for phase in _PHASES for unit in ("seconds", "gb_per_s")),
}  # fmt: skip


def show_tables(result: Result, *, verbose: bool) -> None:
    """Print the fields of a result, then its rows."""
    console = Console(highlight=False, markup=False, emoji=False)
    data = data_of(result)
    labels = list(_labelled(summary_of(result, data, verbose=verbose), data))
    indent = max(len(label) for label, _ in labels) + 2
    with console.capture() as capture:
        for label, items in labels:
            _show_items(console, label, items, indent)
        for key in filter(is_rows, data):
            # Errors and warnings say in words what findings are.
            if data[key] and key not in {"per_finding", "per_difference"}:
                _show_rows(console, key, data)
    sys.stdout.write(without_commands(capture.get()))


def _labelled(fields: Row, data: Row) -> Iterator[tuple[str, list[str]]]:
    """Yield labels with texts; counts, and the times of the phases, share a line."""
    if "wrote" in data:
        paths = [as_text(path) for path in data["wrote"]]
        more = [f"and {len(paths) - _PATHS:,} more"] if len(paths) > _PATHS else []
        yield "wrote", [*paths[:_PATHS], *more] or ["nothing (dry run)" if data["dry_run"] else "nothing"]
    for key, value in fields.items():
        if key not in _GROUPED:
            yield key.replace("_", " "), [f"{value:,}" if type(value) is int else as_text(value)]
    if "nan" in fields:
        yield "values", [f"{fields['nan']:,} NaN", f"{fields['inf']:,} Inf", number_of(fields["zeros"], "zero")]
    if "files" in fields:
        yield "read", [number_of(fields[f"{noun}s"], noun) for noun in ("file", "tensor", "element", "byte")]
    if "timings" not in data:
        return
    timings = data["timings"]
    times = []
    for phase in _PHASES if "read_seconds" in fields else ("total",):
        seconds, speed = timings[f"{phase}_seconds"], timings.get(f"{phase}_gb_per_s")
        if seconds > 0:
            times.append(f"{phase} {seconds:.3f} s" + ("" if speed is None else f" ({speed:.1f} GB/s)"))
    yield "time", times
    if "backend" in fields:
        yield "backend", [f"{fields['backend']} ({fields['backend_why']})", number_of(fields["threads"], "thread")]


def _show_items(console: Console, label: str, items: Sequence[str], indent: int) -> None:
    """Print a label with its texts beside it or, where one has no room there, below."""
    separator = ", "
    fits = all(cell_len(item) < console.width - indent for item in items)
    if not fits and label in _PROSE:
        items, separator = ", ".join(items).split(" "), " "
        fits = all(cell_len(item) < console.width - indent for item in items)
    heading = f"{label:{indent}}"
    if not fits and label != "wrote":
        heading, indent = f"{label}\n  ", 2
    lines = ("\n" + " " * indent).join(_packed(items, console.width - indent, separator=separator))
    console.print(Text(heading, style="bold").append(lines, style="not bold"), soft_wrap=True)


def _packed(items: Sequence[str], width: int, *, separator: str) -> list[str]:
    """Return lines of as many items as there is room for; an item that is too long for a line is shortened."""
    lines = [""]
    for number, item in enumerate(items):
        tail = separator.rstrip() if number < len(items) - 1 else ""
        text = _middle(item, width - len(tail)) + tail
        gap = " " * (len(separator) - len(separator.rstrip())) if lines[-1] else ""
        if lines[-1] and cell_len(lines[-1] + gap + text) > width:
            lines.append(text)
        else:
            lines[-1] += gap + text
    return lines


def _middle(text: str, width: int) -> str:
    """Leave out the middle of text that is wider; more remains of its end, which tells files apart."""
    if cell_len(text) <= width:
        return text
    tail = max(0, width - 1) * 2 // 3
    return chop_cells(text, width - 1 - tail)[0] + "…" + chop_cells(text[::-1], tail)[0][::-1]


def _show_note(console: Console, items: Sequence[str]) -> None:
    for line in _packed(items, console.width, separator=", "):
        console.print(Text(line, style="dim"), soft_wrap=True)


def _show_rows(console: Console, key: str, data: Row) -> None:
    """Print the rows of a field as a histogram or a table, with the histograms of the rows."""
    rows: Sequence[Row] = data[key]
    if data.get("histogram"):
        console.print()
    if key == "histogram":
        show_histogram(console, rows)
        return
    if key == "per_dtype" and "histogram" in data:
        _show_columns(console, storage_columns(rows))
        _show_note(console, ("loss scale: keeps all values normal", '"up to": only avoids overflow'))
        return
    histograms = [row.pop("histogram", None) for row in rows]
    _show_columns(console, _columns_of(rows))
    for row, histogram in zip(rows, histograms, strict=True):
        if histogram:
            console.print(Text(f"\n{as_text(row.get('name', row['file']))}", style="bold"), soft_wrap=True)
            show_histogram(console, histogram)


def _columns_of(rows: Sequence[Row]) -> Columns:
    """Return the texts of each column, names first; without the file, if several rows have the same one.

    Several norms to compare have bars beside them.
    """
    names = [key for key in ("name", "file") if key in rows[0]]
    if len(names) > 1 and len(rows) > 1 and len({row["file"] for row in rows}) == 1:
        names.remove("file")
    columns = {}
    for key in (*names, *(key for key in rows[0] if key not in {"name", "file"})):
        columns[key] = [as_short_text(row[key]) for row in rows]
        if key == "norm" and len(rows) > 1:
            columns[_BARS] = norm_bars([float(row[key]) for row in rows], _BAR)
    return columns


def _show_columns(console: Console, columns: Columns) -> None:
    """Print a table of the columns that there is room for, and name the others; without room for one, blocks."""
    fitting, left_out = dict(columns), []
    # Where rows have no other name, the file is it.
    droppable = [key for key in _LEFT_OUT if key in columns and (key != "file" or "name" in columns)]
    # Columns that say nothing go first.
    for key in sorted(droppable, key=lambda key: not set(columns[key]) <= {"0", "-"}):
        if _least_width(fitting) <= console.width:
            break
        del fitting[key]
        left_out += [key.replace("_", " ")] if key != _BARS else []
    room = console.width - _least_width(fitting)
    if console.width < _TABLE_COLUMNS or room < 0:
        _show_blocks(console, columns)
        return
    if "file" in fitting:
        fitting["file"] = [_middle(text, room + _least("file", fitting["file"])) for text in fitting["file"]]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for key in fitting:
        table.add_column(key.replace("_", " "), justify="left" if key in _TEXTS else "right", no_wrap=True)
    for cells in zip(*fitting.values(), strict=True):
        table.add_row(*cells)
    console.print(table)
    if left_out:
        _show_note(console, [f"not shown (see --json): {left_out[0]}", *left_out[1:]])


def _least_width(columns: Columns) -> int:
    """Return the columns of the terminal that a table takes, if paths are shortened as far as they may be."""
    return sum(_least(key, texts) for key, texts in columns.items()) + _GAP * (len(columns) - 1)


def _least(key: str, texts: Sequence[str]) -> int:
    width = max(map(cell_len, [key, *texts]))
    return min(width, _SHORTEST_PATH) if key == "file" else width


def _show_blocks(console: Console, columns: Columns) -> None:
    """Print rows where there is no room for a table: a line with the name, and below it the other fields."""
    for row in zip(*columns.values(), strict=True):
        values = dict(zip(columns, row, strict=True))
        for key in ("name", "group", "stored as"):
            if key in values:
                console.print(Text(values.pop(key), style="bold"), soft_wrap=True)
        if "file" in values:
            console.print(_middle(values.pop("file"), console.width), soft_wrap=True)
        if values.get(_BARS):
            values["norm"] += f" {values[_BARS]}"
        fields = [f"{key.replace('_', ' ')} {text}" for key, text in values.items() if key != _BARS]
        for line in _packed(fields, console.width - 2, separator="  "):
            console.print(f"  {line}", soft_wrap=True)
