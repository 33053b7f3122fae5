"""Histograms and bars on a terminal."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    Row = dict[str, Any]

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LONGEST_BAR = 50


def show_histogram(console: Console, rows: Sequence[Row]) -> None:
    """Print a line for each exponent with a bar on a logarithmic scale; exponents that do not occur are skipped."""
    exponents, counts = [f"{row['exponent']}" for row in rows], [f"{row['count']:,}" for row in rows]
    widths = max(map(len, [*exponents, "e"])), max(map(len, [*counts, "count"]))
    room = min(_LONGEST_BAR, console.width - sum(widths) - 5)
    lines = ["exponent e: 2^(e-1) <= |x| < 2^e", f"{'e':>{widths[0]}}  {'count':>{widths[1]}}  bars on a log scale"]
    largest = math.log1p(max(row["count"] for row in rows))
    for number, row in enumerate(rows):
        if number and row["exponent"] != rows[number - 1]["exponent"] + 1:
            lines.append(f"{'⋮' if _has_blocks() else ':':>{widths[0]}}")
        line = f"{exponents[number]:>{widths[0]}}  {counts[number]:>{widths[1]}}"
        lines.append(f"{line}  {bar(math.log1p(row['count']) / largest, room)}")
    for line in lines:
        console.print(line, soft_wrap=True)


def storage_columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the columns of a table that says what each storage type would do to the values."""
    return {
        "stored as": [row["dtype"] for row in rows],
        "overflow": [_between(row["overflow_at_least"], row["overflow_at_most"]) for row in rows],
        "subnormal": [f"{row['to_subnormal']:,}" for row in rows],
        "zero": [f"{row['to_zero']:,}" for row in rows],
        "loss scale": [_scales(row["min_scale_log2"], row["max_scale_log2"]) for row in rows],
    }


def _between(least: int, largest: int) -> str:
    return f"{least:,}" if least == largest else f"{least:,} to {largest:,}"


def _scales(least: int | None, largest: int | None) -> str:
    """Name the scales at which no value overflows or becomes subnormal; or, if there are none, where none overflows."""
    if least is None or largest is None:
        return "any"
    return f"2^{least} to 2^{largest}" if least <= largest else f"up to 2^{largest}"


def bar(part: float, columns: int) -> str:
    """Return a bar of that part of the columns; none for NaN, and at least something for all above 0."""
    if not part > 0:
        return ""
    if not _has_blocks():
        return "#" * max(1, round(min(part, 1) * columns))
    eighths = max(1, round(min(part, 1) * columns * 8))
    return _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def norm_bars(norms: Sequence[float], columns: int) -> list[str]:
    """Return a bar for each norm; the largest finite one has the longest bar, as has Inf."""
    largest = max(filter(math.isfinite, norms), default=0.0)
    return [bar(1.0 if math.isinf(norm) else norm / largest if largest else 0.0, columns) for norm in norms]


def _has_blocks() -> bool:
    try:
        (_EIGHTHS + "⋮").encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
