"""Bars of text, in eighths of a column where the terminal has the letters for it, and histograms made of them."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    Row = dict[str, Any]

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LONGEST = 50
# What the last column of `storage_columns` says.
STORAGE_NOTE = ("loss scale: keeps all values normal", '"up to": only avoids overflow')


def bar(part: float, columns: int) -> str:
    """A bar of that part of the columns; NaN has none, and all else above 0 is seen."""
    if not part > 0:
        return ""
    if not _has_blocks():
        return "#" * max(1, round(min(part, 1) * columns))
    eighths = max(1, round(min(part, 1) * columns * 8))
    return _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def norm_bars(rows: Sequence[Row], columns: int) -> list[str]:
    """A bar for the norm of each row; the longest is that of the largest finite one, and of what is infinite."""
    norms = [float(row["norm"]) for row in rows]
    largest = max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    return [bar(1.0 if math.isinf(norm) else norm / largest if largest else 0.0, columns) for norm in norms]


def show_histogram(console: Console, rows: Sequence[Row]) -> None:
    """Print a line for each exponent with a bar on a logarithmic scale; exponents that do not occur are skipped."""
    console.print("exponent e: 2^(e-1) <= |x| < 2^e", soft_wrap=True)
    for line in _lines(rows, console.width):
        console.print(line, soft_wrap=True)


def _lines(rows: Sequence[Row], columns: int) -> Iterator[str]:
    exponents, counts = [f"{row['exponent']}" for row in rows], [f"{row['count']:,}" for row in rows]
    widths = max(map(len, [*exponents, "e"])), max(map(len, [*counts, "count"]))
    room = min(_LONGEST, columns - sum(widths) - 5)
    yield f"{'e':>{widths[0]}}  {'count':>{widths[1]}}  bars on a log scale"
    most = math.log1p(max(row["count"] for row in rows))
    for number, row in enumerate(rows):
        if number and row["exponent"] != rows[number - 1]["exponent"] + 1:
            yield f"{'⋮' if _has_blocks() else ':':>{widths[0]}}"
        drawn = bar(math.log1p(row["count"]) / most, room)
        yield f"{exponents[number]:>{widths[0]}}  {counts[number]:>{widths[1]}}  {drawn}"


def storage_columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The columns of a table that says what each storage type would do to the values."""
    return {
        "stored as": [row["dtype"] for row in rows],
        "overflow": [_between(row["overflow_at_least"], row["overflow_at_most"]) for row in rows],
        "subnormal": [f"{row['to_subnormal']:,}" for row in rows],
        "zero": [f"{row['to_zero']:,}" for row in rows],
        "loss scale": [_scales(row["min_scale_log2"], row["max_scale_log2"]) for row in rows],
    }


def _between(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _scales(least: int | None, most: int | None) -> str:
    """The scales at which no value overflows or falls below the normal numbers; or only those where none overflows."""
    if least is None or most is None:
        return "any"
    return f"2^{least} to 2^{most}" if least <= most else f"up to 2^{most}"


def _has_blocks() -> bool:
    try:
        (_EIGHTHS + "⋮").encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
