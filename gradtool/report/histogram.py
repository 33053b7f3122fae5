"""Histograms and bars on a terminal."""

from __future__ import annotations

import math
import sys
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    Row = dict[str, Any]

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LONGEST_BAR = 50
# Of a histogram, so that it fits a screen.
_LINES = 24


def show_histogram(console: Console, rows: Sequence[Row]) -> None:
    """Print a line for each exponent with a bar on a logarithmic scale; exponents that do not occur are skipped.

    Where these are too many for a screen, the smallest values share a line, and the other exponents are put into bins.
    """
    counts = {row["exponent"]: row["count"] for row in rows}
    bound, bins, step = min(counts) - 1, counts, 1
    if _lines_of(counts, 1) > _LINES:
        bound = _tail_bound(counts)
        while _lines_of(bins := _folded(counts, bound, step), step) >= _LINES:
            step *= 2
    heading = "exponent e" if step == 1 else "exponents up to e"
    widths = max(len(f"{exponent}") for exponent in bins), max(5, *(len(f"{count:,}") for count in bins.values()))
    lines = [
        f"{heading}: 2^(e-{step}) <= |x| < 2^e",
        f"{'e':>{widths[0]}}  {'count':>{widths[1]}}  bars on a log scale",
    ]
    if below := sum(count for exponent, count in counts.items() if exponent <= bound):
        lines.append(f"below 2^{bound}: {below:,}")
    room = min(_LONGEST_BAR, console.width - sum(widths) - 5)
    largest, last = math.log1p(max(bins.values())), min(bins)
    for exponent, count in bins.items():
        if exponent > last + step:
            lines.append(f"{'⋮' if _has_blocks() else ':':>{widths[0]}}")
        last = exponent
        lines.append(f"{exponent:>{widths[0]}}  {count:>{widths[1]},}  {bar(math.log1p(count) / largest, room)}")
    for line in lines:
        console.print(line, soft_wrap=True)


def _lines_of(bins: Mapping[int, int], step: int) -> int:
    """Count the lines of bins of so many exponents, with those that stand for what is skipped."""
    return len(bins) + sum(after > exponent + step for exponent, after in pairwise(bins))


def _tail_bound(counts: Mapping[int, int]) -> int:
    """Return the largest exponent up to which there are at most 0.1 % of all values."""
    limit = sum(counts.values()) // 1000
    sums = zip(counts, accumulate(counts.values()), strict=True)
    return next(exponent for exponent, total in sums if total > limit) - 1


def _folded(counts: Mapping[int, int], bound: int, step: int) -> dict[int, int]:
    """Return the counts of bins of so many exponents above a bound, by the last exponent of each."""
    bins: dict[int, int] = {}
    for exponent, count in counts.items():
        if exponent > bound:
            last = exponent + (bound - exponent) % step
            bins[last] = bins.get(last, 0) + count
    return bins


def storage_columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the columns of a table that says what each storage type would do to the values."""
    return {
        "stored as": [row["dtype"] for row in rows],
        "overflow": [_between(row["overflow_at_least"], row["overflow_at_most"]) for row in rows],
        "subnormal": [f"{row['to_subnormal']:,}" for row in rows],
        "zero": [f"{row['to_zero']:,}" for row in rows],
        "loss scale": [_scales(row["min_scale_log2"], row["max_scale_log2"]) for row in rows],
        "99.9 %": [_scale_from(row["min_scale_values_log2"], row["max_scale_log2"]) for row in rows],
        "norm^2": [_scale_from(row["min_scale_norm_log2"], row["max_scale_log2"]) for row in rows],
    }


def _between(least: int, largest: int) -> str:
    return f"{least:,}" if least == largest else f"{least:,} to {largest:,}"


def _scales(least: int | None, largest: int | None) -> str:
    """Name the scales at which no value overflows or becomes subnormal; or, if there are none, where none overflows."""
    if least is None or largest is None:
        return "any"
    return f"2^{least} to 2^{largest}" if least <= largest else f"up to 2^{largest}"


def _scale_from(least: int | None, largest: int | None) -> str:
    """Name the smallest scale that is enough, if no value overflows with it."""
    if least is None or largest is None:
        return "any"
    return f"2^{least}" if least <= largest else "none"


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
