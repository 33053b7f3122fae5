"""Results as tables, lines or JSON, errors, and the progress bar; alone in importing rich, and only for a terminal."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gradtool._version import __version__
from gradtool.errors import EXIT_FOUND, EXIT_OK, Problem, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console
    from rich.progress import Progress

    from gradtool.ops.results import CallFacts
    from gradtool.ops.session import Timings

SCHEMA = 1
# Shorter work gets no progress bar.
PATIENCE_SECONDS = 0.5
_REFRESH_SECONDS = 0.1
# On stderr; JSON lists all.
_MAX_PROBLEM_LINES = 20
# Characters; a path and a tensor's name may have 4,096 each.
_MAX_PROBLEM_LINE = 20_000
_STATUS = {EXIT_OK: "ok", EXIT_FOUND: "found"}
# The facts about the call that every result has, in the order of the output.
_CALL = ("files", "tensors", "elements", "bytes", "backend", "backend_why", "threads", "seconds", "timings")
# Facts that share one line of a table.
_FOUND = ("nan", "inf", "zeros")


def show(command: str, result: CallFacts, problems: Sequence[Problem], *, as_json: bool) -> None:
    """Print a result on stdout as JSON, as tables on a terminal, or else as lines of tab-separated fields."""
    if as_json:
        print_json(command, EXIT_FOUND if problems else EXIT_OK, _data(result), problems)
    elif sys.stdout.isatty():
        _show_tables(result)
    else:
        # In one write, so that `| head -1` does not close the pipe in the middle.
        sys.stdout.write("".join("\t".join(fields) + "\n" for fields in _lines(result)))


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
        "errors": [_known(asdict(one)) for one in problems],
    }
    sys.stdout.write(json.dumps(envelope, allow_nan=False) + "\n")


def print_problems(problems: Sequence[Problem], summary: str | None = None, *, level: str = "error") -> None:
    """Print one line for each problem on stderr."""
    lines = [one.line for one in problems[:_MAX_PROBLEM_LINES]]
    if len(problems) > _MAX_PROBLEM_LINES:
        lines.append(f"and {len(problems) - _MAX_PROBLEM_LINES} more; --json names them all")
    lines += [summary] if summary else []
    # In one write, so that lines of other processes do not get in between.
    sys.stderr.write("".join(f"gradtool: {level}: {printable(shortened(line, _MAX_PROBLEM_LINE))}\n" for line in lines))


def printable(text: str) -> str:
    """The text with all control characters, which a terminal might act on, escaped."""
    return text if text.isprintable() else text.translate(_ESCAPES)


class _Escapes(dict[int, str]):
    """What is printed for each character, computed on first use."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = character if character.isprintable() else character.encode("unicode_escape").decode()
        return self[code]


_ESCAPES = _Escapes()


@contextlib.contextmanager
def progress(label: str, *, wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar with GB/s on stderr, if that is a terminal; it appears only if the work takes long enough."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    bar: Progress | None = None
    due = time.perf_counter() + PATIENCE_SECONDS
    with contextlib.ExitStack() as stack:

        def advance(done: int, whole: int) -> None:
            nonlocal bar, due
            now = time.perf_counter()
            is_due = now > due
            if is_due:
                bar, due = bar or stack.enter_context(_bar(label)), now + _REFRESH_SECONDS
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done, total=whole, refresh=is_due)

        yield advance


def _bar(label: str) -> Progress:
    from rich import progress as bars  # slow to import
    from rich.console import Console

    columns = bars.TextColumn(label), bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn()
    left, console = bars.TimeRemainingColumn(), Console(stderr=True)
    # Without a refreshing thread of its own, which the system may refuse.
    bar = bars.Progress(*columns, left, console=console, transient=True, auto_refresh=False)
    bar.add_task(label)
    return bar


def _data(result: CallFacts) -> dict[str, Any]:
    """The fields of a result for JSON: its own facts, those of the call, its rows."""
    data = asdict(result)
    data.pop("problems", None)
    if "warnings" in data:
        data["warnings"] = [_known(one) for one in data["warnings"]]
    call = [key for key in _CALL if key in data]
    if "timings" in data:
        data["timings"] = dict(_timings(result.timings, result.seconds))
    own = [key for key in data if key not in _CALL and not _is_rows(key)]
    ordered = {key: data[key] for key in (*own, *call, *filter(_is_rows, data))}
    exact: dict[str, Any] = _exact(ordered)
    return exact


def _known(problem: dict[str, Any]) -> dict[str, Any]:
    """The fields of a problem that say something."""
    return {key: value for key, value in problem.items() if value is not None}


def _is_rows(key: str) -> bool:
    """Whether a field has one row for each tensor, layer, or whatever follows `per_`."""
    return key.startswith("per_")


def _timings(timings: Timings, total: float) -> list[tuple[str, float]]:
    moved = timings.read_bytes + timings.write_bytes
    phases = (
        ("read", timings.read, timings.read_bytes),
        ("compute", timings.compute, timings.read_bytes),
        ("write", timings.write, timings.write_bytes),
        ("commit", timings.commit, 0),
        ("total", total, moved),
    )
    rows = []
    for phase, seconds, nbytes in phases:
        rows.append((f"{phase}_seconds", seconds))
        if phase != "commit":
            rows.append((f"{phase}_gb_per_s", nbytes / seconds / 1e9 if seconds else 0.0))
    return rows


def _exact(value: Any) -> Any:
    """The value with NaN and Inf, which JSON does not have, as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(item) for item in value]
    return value


def _lines(result: CallFacts) -> Iterator[list[str]]:
    """One line for each fact, name first, and one for each row, kind first and names last."""
    data = _data(result)
    timings = data.pop("timings", {})
    data.pop("warnings", None)
    for key, value in (data | timings).items():
        if not _is_rows(key) and value is not None:
            yield [key, _field(value)]
    for key in filter(_is_rows, data):
        for row in data[key]:
            names = [row.pop(name) for name in ("name", "file") if name in row]
            yield [key.removeprefix("per_"), *(_field(value) for value in row.values()), *map(printable, names)]


def _field(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "x".join(map(str, value)) or "scalar"
    return repr(value) if isinstance(value, float) else printable(str(value))


def _show_tables(result: CallFacts) -> None:
    from rich.console import Console  # slow to import
    from rich.table import Table

    data = _data(result)
    console = Console(highlight=False, markup=False, emoji=False)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for label, value in _summary(data):
        facts.add_row(label, value)
    console.print(facts)
    for key in filter(_is_rows, data):
        _show_rows(console, data[key])


def _show_rows(console: Console, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    from rich.table import Table

    if len(rows) > 1 and len({row["file"] for row in rows}) == 1:
        rows = [{key: value for key, value in row.items() if key != "file"} for row in rows]
    table = Table()
    for key, value in rows[0].items():
        table.add_column(key.replace("_", " "), justify="left" if isinstance(value, str) else "right", overflow="fold")
    for row in rows:
        table.add_row(*(f"{v:.6g}" if isinstance(v, float) else _field(v) for v in row.values()))
    console.print(table)


def _summary(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The facts for a terminal: the operation's own, and the call in a few lines."""
    for key, value in data.items():
        if key not in (*_CALL, *_FOUND, "warnings") and not _is_rows(key) and value is not None:
            yield key.replace("_", " "), f"{value:,}" if type(value) is int else _field(value)
    if "nan" in data:
        yield "found", f"{data['nan']:,} NaN, {data['inf']:,} Inf, {data['zeros']:,} zeros"
    if "timings" not in data:
        return
    yield "scope", ", ".join(_count(data[f"{thing}s"], thing) for thing in ("file", "tensor", "element", "byte"))
    timings = data["timings"]
    phases = [
        f"{phase} {timings[f'{phase}_seconds']:.3f} s"
        + (f" ({timings[f'{phase}_gb_per_s']:.1f} GB/s)" if f"{phase}_gb_per_s" in timings else "")
        for phase in ("total", "read", "compute", "write", "commit")
        if timings[f"{phase}_seconds"] > 0
    ]
    yield "time", ", ".join(phases)
    yield "backend", f"{data['backend']} ({data['backend_why']}), {_count(data['threads'], 'thread')}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
