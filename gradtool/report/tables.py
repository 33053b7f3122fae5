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
from gradtool.report.bars import STORAGE_NOTE, norm_bars, show_histogram, storage_columns
from gradtool.report.facts import TOLD, data_of, facts_of, field, is_rows, short
from gradtool.report.messages import without_commands

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.report.facts import Result

    Row = dict[str, Any]
    # The texts of a table, by the keys of its columns.
    Columns = dict[str, list[str]]

# Narrower terminals get rows as blocks of lines.
_TABLE_COLUMNS = 60
# A path is shortened to that. All else is as wide as its content.
_SHORTEST_PATH = 24
# The key of the column of bars, which needs no heading, and how long these are.
_BARS, _BAR = "", 8
# What is left out first where there is no room. The names and norms are not here, and always shown.
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
# Facts in words, by their labels: broken between words where others are shortened.
_IN_WORDS = ("backend", "system", "cpu backend", "cpu features", "gpu", "gpu driver", "settings")
# The paths written that are named; lines off a terminal and JSON name all.
_MOST_PATHS = 3


def show_tables(result: Result, *, verbose: bool) -> None:
    """Print the facts of a result, then its rows."""
    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        _show_result(console, result, verbose=verbose)
    sys.stdout.write(without_commands(capture.get()))


def _show_result(console: Console, result: Result, *, verbose: bool) -> None:
    data = data_of(result)
    labels = list(_labelled(facts_of(result, data, verbose=verbose), data))
    if "wrote" in data:
        labels.insert(0, ("wrote", _wrote(data)))
    taken = max(len(label) for label, _ in labels) + 2
    for label, items in labels:
        _show_items(console, label, items, taken)
    for key in filter(is_rows, data):
        if not data[key] or key in TOLD:
            continue
        if data.get("histogram"):
            console.print()
        if key == "histogram":
            show_histogram(console, data[key])
        elif key == "per_dtype" and "histogram" in data:
            _show_rows(console, storage_columns(data[key]))
            _show_note(console, STORAGE_NOTE)
        else:
            _show_measured(console, data[key])


def _show_measured(console: Console, rows: Sequence[Row]) -> None:
    """Rows with bars beside their norms, if there are several to compare; then the histogram of each."""
    histograms = [row.pop("histogram", None) for row in rows]
    columns = _columns_of(rows)
    if "norm" in columns and len(rows) > 1:
        columns = _beside("norm", columns, norm_bars(rows, _BAR))
    _show_rows(console, columns)
    for row, histogram in zip(rows, histograms, strict=True):
        if histogram:
            console.print(Text(f"\n{field(row.get('name', row['file']))}", style="bold"), soft_wrap=True)
            show_histogram(console, histogram)


def _show_rows(console: Console, columns: Columns) -> None:
    """A table, or where there is no room for one, a few lines a row."""
    if not (console.width >= _TABLE_COLUMNS and _show_table(console, columns)):
        _show_blocks(console, columns)


def _show_note(console: Console, items: Sequence[str]) -> None:
    for line in _packed(items, console.width, separator=", "):
        console.print(Text(line, style="dim"), soft_wrap=True)


def _show_items(console: Console, label: str, items: Sequence[str], taken: int) -> None:
    """A label and what belongs to it, beside it or, where that has no room there, below."""
    separator = ", "
    fits = all(cell_len(item) < console.width - taken for item in items)
    if not fits and label in _IN_WORDS:
        items, separator = ", ".join(items).split(" "), " "
        fits = all(cell_len(item) < console.width - taken for item in items)
    indent = taken if fits or label == "wrote" else 2
    lines = _packed(items, console.width - indent, separator=separator)
    text = Text(f"{label:{taken}}" if indent == taken else f"{label}\n  ", style="bold")
    console.print(text.append(("\n" + " " * indent).join(lines), style="not bold"), soft_wrap=True)


def _wrote(data: Row) -> list[str]:
    paths = [field(path) for path in data["wrote"]]
    if not paths:
        return ["nothing (dry run)" if data["dry_run"] else "nothing"]
    more = len(paths) - _MOST_PATHS
    return paths if more <= 0 else [*paths[:_MOST_PATHS], f"and {more:,} more"]


def _labelled(facts: Row, data: Row) -> Iterator[tuple[str, list[str]]]:
    """The facts with labels; counts, and the times of the phases, share a line."""
    shared = {"nan", "inf", "zeros", "files", "tensors", "elements", "bytes", "backend", "backend_why", "threads"}
    phases = ("total", "read", "compute", "write", "commit")
    timed = {f"{phase}_{unit}" for phase in phases for unit in ("seconds", "gb_per_s")} | {"seconds"}
    for key, value in facts.items():
        if key not in shared | timed:
            yield key.replace("_", " "), [f"{value:,}" if type(value) is int else field(value)]
    if "nan" in facts:
        yield "found", [f"{facts['nan']:,} NaN", f"{facts['inf']:,} Inf", number_of(facts["zeros"], "zero")]
    if "files" in facts:
        yield "read", [number_of(facts[f"{thing}s"], thing) for thing in ("file", "tensor", "element", "byte")]
    if "timings" not in data:
        return
    timings = data["timings"]
    shown = phases if "read_seconds" in facts else ("total",)
    yield "time", [_time(phase, timings) for phase in shown if timings[f"{phase}_seconds"] > 0]
    if "backend" in facts:
        yield "backend", [f"{facts['backend']} ({facts['backend_why']})", number_of(facts["threads"], "thread")]


def _time(phase: str, timings: Row) -> str:
    speed = timings.get(f"{phase}_gb_per_s")
    return f"{phase} {timings[f'{phase}_seconds']:.3f} s" + ("" if speed is None else f" ({speed:.1f} GB/s)")


def _packed(items: Sequence[str], width: int, *, separator: str) -> list[str]:
    """Lines of as many items as there is room for; one that is too long for a line is shortened."""
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
    """The text, with its middle left out where it is wider; more is kept of its end, which tells files apart."""
    if cell_len(text) <= width:
        return text
    tail = max(0, width - 1) * 2 // 3
    return chop_cells(text, width - 1 - tail)[0] + "…" + chop_cells(text[::-1], tail)[0][::-1]


def _show_table(console: Console, columns: Columns) -> bool:
    """One line a row, if there is room. Columns that find none are left out, and named below."""
    fitting, left_out = dict(columns), []
    # Where rows have no other name, the file is it.
    droppable = [key for key in _LEFT_OUT if key != "file" or "name" in columns]
    for key in sorted(droppable, key=lambda key: not _says_nothing(columns.get(key))):
        if _least_width(fitting) <= console.width:
            break
        if fitting.pop(key, None) is not None and key != _BARS:
            left_out.append(key.replace("_", " "))
    if _least_width(fitting) > console.width:
        return False
    if "file" in fitting:
        room = console.width - _least_width(fitting) + _least(("file", fitting["file"]))
        fitting["file"] = [_middle(text, room) for text in fitting["file"]]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for key in fitting:
        table.add_column(key.replace("_", " "), justify="left" if key in _TEXTS else "right", no_wrap=True)
    for cells in zip(*fitting.values(), strict=True):
        table.add_row(*cells)
    console.print(table)
    if left_out:
        _show_note(console, [f"no room for {left_out[0]}", *left_out[1:], "which --json has"])
    return True


def _beside(key: str, columns: Columns, bars: Sequence[str]) -> Columns:
    """The columns with bars after one of them."""
    keys = list(columns)
    before = keys[: keys.index(key) + 1]
    return {one: columns[one] for one in before} | {_BARS: list(bars)} | columns


def _columns_of(rows: Sequence[Row]) -> Columns:
    """The texts of each column, names first; without the file, if that is one and the same for several rows."""
    names = [key for key in ("name", "file") if key in rows[0]]
    if len(names) > 1 and len(rows) > 1 and len({row["file"] for row in rows}) == 1:
        names.remove("file")
    keys = [*names, *(key for key in rows[0] if key not in {"name", "file"})]
    return {key: [short(row[key]) for row in rows] for key in keys}


def _says_nothing(texts: Sequence[str] | None) -> bool:
    return texts is not None and set(texts) <= {"0", "-"}


def _least_width(columns: Columns) -> int:
    """Columns of the terminal that a table takes, if paths are shortened as far as they may be."""
    return sum(map(_least, columns.items())) + _GAP * (len(columns) - 1)


def _least(column: tuple[str, Sequence[str]]) -> int:
    key, texts = column
    width = max(map(cell_len, [key, *texts]))
    return min(width, _SHORTEST_PATH) if key == "file" else width


def _show_blocks(console: Console, columns: Columns) -> None:
    """Rows where there is no room for a table: a line with the name, and below it the other fields."""
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
