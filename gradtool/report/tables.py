"""A result on a terminal. No name, number or path is broken: paths are shortened in the middle, columns left out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradtool.errors import number_of, size_of
from gradtool.ops.results import is_rows
from gradtool.report.columns import BARS, colour_of, fit, fit_blocks, needed, needed_by
from gradtool.report.fields import as_cell, as_text, data_of, summary_of
from gradtool.report.histogram import norm_bars, show_histogram, storage_columns
from gradtool.report.messages import without_commands
from gradtool.report.paths import middle, shortened_paths
from gradtool.report.verdict import TOLD, places_of, verdict_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.ops.results import AnyResult
    from gradtool.report.columns import Columns
    from gradtool.report.delimited import Table as ChosenTable

    Row = dict[str, Any]
    # By words that are printed.
    Colours = dict[str, str]

# Narrower terminals get rows as blocks of lines.
_TABLE_COLUMNS = 60
# The length of the bars beside norms.
_BAR = 8
_TEXTS = (
    "name", "file", "group", "digest", "dtype", "outcome", "key", "value", "stored as", "loss scale", "screened",
    "rule", "reason", "severity", "code", "message", "remedy", "why", "version", BARS,
)  # fmt: skip
# Labels of fields in prose, which is broken between words where other values are shortened.
_PROSE = ("backend", "system", "cpu backend", "cpu features", "gpu", "gpu driver", "settings")
# The paths written that are listed; lines off a terminal and JSON list all.
_PATHS = 3
# Nothing of a dry run, which `wrote` says.
_WRITTEN = ("dry_run", "already_done", "files_written", "bytes_written")
# The rate of shorter work says nothing.
_MEASURABLE_SECONDS = 0.1
_PHASES = ("total", "read", "compute", "write", "commit")
# The fields that share a line with others.
_GROUPED = {
    "nan", "inf", "zeros", "files", "tensors", "elements", "bytes", "backend", "backend_why", "threads", "seconds",
    *(f"{phase}_{unit}" for phase in _PHASES for unit in ("seconds", "gb_per_s")),
}  # fmt: skip


def show_tables(command: str, result: AnyResult, *, verbose: bool) -> None:
    """Print the fields of the result of a command, then its rows."""
    console = Console(highlight=False, markup=False, emoji=False)
    data = data_of(result)
    labels = list(_labelled(summary_of(result, data, verbose=verbose), data))
    indent = max(len(label) for label, *_ in labels) + 2
    with console.capture() as capture:
        for number, words in enumerate(verdict_of(data)):
            for line in _packed(words, console.width, separator=" "):
                console.print(Text(line, style="not bold" if number else "bold"), soft_wrap=True)
        for label, items, colours in labels:
            _show_items(console, label, items, colours, indent)
        for key in filter(is_rows, data):
            # Errors and warnings say in words what findings are, and the verdict what tolerances are.
            if data[key] and key not in {"per_finding", "per_difference", "per_screened", "per_tolerance"}:
                _show_rows(console, command, key, data)
    sys.stdout.write(without_commands(capture.get()))


def show_table(result: AnyResult, table: ChosenTable) -> None:
    """Print only the chosen table, with all of its columns; without room for them, blocks."""
    console = Console(highlight=False, markup=False, emoji=False)
    rows = list(table.values(result))
    columns = {key: [as_cell(key, row[number]) for row in rows] for number, key in enumerate(table.columns)}
    with console.capture() as capture:
        if needed(columns) <= console.width:
            _show_table(console, columns, [])
        else:
            _show_blocks(console, columns)
    sys.stdout.write(without_commands(capture.get()))


def _labelled(fields: Row, data: Row) -> Iterator[tuple[str, list[str], Colours]]:
    """Yield labels with texts, and colours for some of these; counts, and the times of the phases, share a line."""
    why = " (already done)" if data.get("already_done") else " (dry run)" if data.get("dry_run") else ""
    if "wrote" in data:
        paths = [as_text(path) for path in data["wrote"]]
        more = [f"and {len(paths) - _PATHS:,} more"] if len(paths) > _PATHS else []
        yield "wrote", [*paths[:_PATHS], *more] or [f"nothing{why}"], {}
    for label, items in places_of(data):
        yield label, items, {}
    for key, value in fields.items():
        if key not in _GROUPED | TOLD and not (key in _WRITTEN and why):
            text = as_cell(key, value)
            yield key.replace("_", " "), [text], {text: colour_of(key, text)}
    if "nan" in fields:
        texts = {key: f"{fields[key]:,} {noun}" for key, noun in (("nan", "NaN"), ("inf", "Inf"))}
        colours = {text: colour_of(key, f"{fields[key]}") for key, text in texts.items()}
        yield "values", [*texts.values(), number_of(fields["zeros"], "zero")], colours
    if "files" in fields:
        counts = [number_of(fields[f"{noun}s"], noun) for noun in ("file", "tensor", "element")]
        yield "read", [*counts, size_of(fields["bytes"])], {}
    if "timings" in data:
        yield "time", _times(data["timings"], _PHASES if "read_seconds" in fields else ("total",)), {}
        if "backend" in fields:
            backend = f"{fields['backend']} ({fields['backend_why']})"
            yield "backend", [backend, number_of(fields["threads"], "thread")], {}


def _times(timings: Row, phases: Sequence[str]) -> list[str]:
    """Return the time of each phase that took any, and its rate if it took long enough to have one."""
    times = []
    for phase in phases:
        seconds, speed = timings[f"{phase}_seconds"], timings.get(f"{phase}_gb_per_s")
        rate = f" ({size_of(speed * 1e9)}/s)" if speed and seconds >= _MEASURABLE_SECONDS else ""
        times += [f"{phase} {seconds:.3f} s{rate}"] if seconds > 0 else []
    return times


def _show_items(console: Console, label: str, items: Sequence[str], colours: Colours, indent: int) -> None:
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
    text = Text(heading, style="bold").append(lines, style="not bold")
    console.print(_coloured(text, colours), soft_wrap=True)


def _coloured(text: Text, colours: Colours) -> Text:
    """Colour the words of a text that have a colour."""
    for words, colour in colours.items():
        if colour:
            text.highlight_words([words], colour)
    return text


def _packed(items: Sequence[str], width: int, *, separator: str) -> list[str]:
    """Return lines of as many items as there is room for; an item that is too long for a line is shortened."""
    lines = [""]
    for number, item in enumerate(items):
        tail = separator.rstrip() if number < len(items) - 1 else ""
        text = middle(item, width - len(tail)) + tail
        gap = " " * (len(separator) - len(separator.rstrip())) if lines[-1] else ""
        if lines[-1] and cell_len(lines[-1] + gap + text) > width:
            lines.append(text)
        else:
            lines[-1] += gap + text
    return lines


def _show_note(console: Console, items: Sequence[str]) -> None:
    for line in _packed(items, console.width, separator=", "):
        console.print(Text(line, style="dim"), soft_wrap=True)


def _show_rows(console: Console, command: str, key: str, data: Row) -> None:
    """Print the rows of a field as a histogram or a table, with the histograms of the rows."""
    rows: Sequence[Row] = data[key]
    if data.get("histogram"):
        console.print()
    if key == "histogram":
        show_histogram(console, rows)
        return
    if key == "per_dtype" and "histogram" in data:
        _show_columns(console, storage_columns(rows), command)
        texts = "keeps all values normal", "least for so many values", "least for 99.99 % of it"
        notes = [f"{key}: {text}" for key, text in zip(("loss scale", "99.9 %", "norm^2"), texts, strict=True)]
        _show_note(console, [*notes, '"up to": only avoids overflow'])
        return
    histograms = [row.pop("histogram", None) for row in rows]
    _show_columns(console, _columns_of(rows, files=data.get("files")), command)
    for row, histogram in zip(rows, histograms, strict=True):
        if histogram:
            console.print(Text(f"\n{as_text(row.get('name', row['file']))}", style="bold"), soft_wrap=True)
            show_histogram(console, histogram)


def _columns_of(rows: Sequence[Row], *, files: int | None) -> Columns:
    """Return the texts of each column, names first; without the file, if only one was read.

    Several norms to compare have bars beside them.
    """
    names = [key for key in ("name", "file") if key in rows[0]]
    if len(names) > 1 and files == 1:
        names.remove("file")
    columns = {}
    for key in (*names, *(key for key in rows[0] if key not in {"name", "file"})):
        columns[key] = [as_cell(key, row[key]) for row in rows]
        if key == "norm" and len(rows) > 1:
            columns[BARS] = norm_bars([float(row[key] or 0) for row in rows], _BAR)
    return columns


def _show_columns(console: Console, columns: Columns, command: str) -> None:
    """Print a table of the columns that there is room for, and name the others; without room for one, blocks."""
    fitting = fit(columns, command, console.width)
    if console.width < _TABLE_COLUMNS or needed(fitting.columns) > console.width:
        fitting = fit_blocks(columns)
        _show_blocks(console, fitting.columns)
    else:
        _show_table(console, fitting.columns, [colour_of("taken", text) for text in columns.get("taken", ())])
    same = fitting.same
    if "file" in same:
        same |= {"file": shortened_paths([same["file"]], console.width - len("in all rows: file ,"))[0]}
    told = [f"{key.replace('_', ' ')} {text}" for key, text in same.items()]
    left_out = [key.replace("_", " ") for key in fitting.left_out]
    for title, items in (("in all rows", told), ("not shown (see --json)", left_out)):
        if items:
            _show_note(console, [f"{title}: {items[0]}", *items[1:]])


def _show_table(console: Console, columns: Columns, row_colours: Sequence[str]) -> None:
    """Print a table; paths get the room that is left."""
    if columns.get("file"):
        room = console.width - needed(columns) + needed_by("file", columns["file"])
        columns = columns | {"file": shortened_paths(columns["file"], room)}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for key in columns:
        table.add_column(key.replace("_", " "), justify="left" if key in _TEXTS else "right", no_wrap=True)
    for number, row in enumerate(zip(*columns.values(), strict=True)):
        cells = [Text(text, colour_of(key, text)) for key, text in zip(columns, row, strict=True)]
        table.add_row(*cells, style=row_colours[number] if row_colours else "")
    console.print(table)


def _show_blocks(console: Console, columns: Columns) -> None:
    """Print rows where there is no room for a table: a line with the name, and below it the other fields."""
    if "file" in columns:
        columns = columns | {"file": shortened_paths(columns["file"], console.width)}
    for row in zip(*columns.values(), strict=True):
        values = dict(zip(columns, row, strict=True))
        for key in ("name", "group", "rule", "stored as"):
            if key in values:
                console.print(Text(values.pop(key), style="bold"), soft_wrap=True)
        if "file" in values:
            console.print(middle(values.pop("file"), console.width), soft_wrap=True)
        if values.get(BARS):
            values["norm"] += f" {values[BARS]}"
        fields = {key: f"{key.replace('_', ' ')} {text}" for key, text in values.items() if key != BARS}
        colours = {text: colour_of(key, values[key]) for key, text in fields.items()}
        for line in _packed(list(fields.values()), console.width - 2, separator="  ") if fields else ():
            console.print(_coloured(Text(f"  {line}"), colours), soft_wrap=True)
