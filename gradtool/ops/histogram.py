"""What the exponents of some values say: how many there are of each, and which storage types would hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.backends.storage import STORAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class ExponentCount:
    """How many values have an exponent e: 2^(e-1) <= |x| < 2^e."""

    exponent: int
    count: int


@dataclass(frozen=True)
class StorageRange:
    """What storing all finite values in a type would do to them, as far as their exponents say.

    Between `overflow_at_least` and `overflow_at_most` values overflow. `to_subnormal` lie below the smallest normal
    number, and `to_zero` below half of the smallest number at all. Multiplied by 2^k, no value overflows for any k up
    to `max_scale_log2`, and none is below the smallest normal number from `min_scale_log2` on; None without values.
    """

    dtype: str
    overflow_at_least: int
    overflow_at_most: int
    to_subnormal: int
    to_zero: int
    min_scale_log2: int | None
    max_scale_log2: int | None


def histogram_rows(counts: Mapping[int, int]) -> tuple[ExponentCount, ...]:
    """A row for each exponent that occurs, the smallest first."""
    return tuple(ExponentCount(exponent, counts[exponent]) for exponent in sorted(counts))


def storage_ranges(counts: Mapping[int, int], largest: float) -> Iterator[StorageRange]:
    """A row for each storage type, from the counts of exponents and the largest finite magnitude."""
    for dtype, storage in STORAGE.items():
        room = _room(dtype, largest) if counts else 0
        over = sum(count for exponent, count in counts.items() if exponent > storage.top)
        yield StorageRange(
            dtype=dtype,
            overflow_at_least=max(over, int(room < 0)),
            overflow_at_most=over + counts.get(storage.top, 0) if room < 0 else 0,
            to_subnormal=sum(
                count for exponent, count in counts.items() if storage.least - 1 <= exponent < storage.normal
            ),
            to_zero=sum(count for exponent, count in counts.items() if exponent < storage.least - 1),
            min_scale_log2=storage.normal - min(counts) if counts else None,
            max_scale_log2=room if counts else None,
        )


def _room(dtype: str, largest: float) -> int:
    """The largest k for which largest·2^k, rounded to a type, does not overflow."""
    mantissa, exponent = math.frexp(largest)
    top = STORAGE[dtype].top
    overflows = not math.isfinite(STORAGE[dtype].rounded(math.ldexp(mantissa, top)))
    return top - exponent - overflows
