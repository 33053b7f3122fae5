"""How many values of some tensors have which binary exponent, and which storage types would hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from gradtool.backends.storage import STORAGE
from gradtool.engines.tally import Column
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import ReadingPass, pieces_of

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Mapping, Sequence

    from gradtool.backends.protocol import NormSpec
    from gradtool.engines.worker import Worker
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block

_COLUMNS = {"counts": Column("q", "bins"), "largest_finite": Column("d", "max")}


class Histograms(Measurement):
    """A measurement with a histogram of each tensor; `largest_finite` are magnitudes."""

    counts: array[int]
    largest_finite: array[float]

    def __init__(self, selected: Sequence[Selected], spec: NormSpec) -> None:
        bins = {dtype: storage.bins for dtype, storage in STORAGE.items()}
        # An empty tensor is in no block, and has no bins.
        self._bins = [bins[one.tensor.dtype] if one.tensor.elements else range(0) for one in selected]
        super().__init__(selected, spec, _COLUMNS, [len(own) for own in self._bins])

    def exponents(self, first: int, end: int) -> dict[int, int]:
        """The exponents of consecutive tensors, those with the numbers from `first` up to `end`, and their counts."""
        total: dict[int, int] = {}
        for bins, alike in groupby(range(first, end), key=self._bins.__getitem__):
            numbers = list(alike)
            begin, stop = self._bounds[numbers[0]], self._bounds[numbers[-1] + 1]
            for at, exponent in enumerate(bins):
                total[exponent] = total.get(exponent, 0) + sum(self.counts[begin + at : stop : len(bins)])
        return {exponent: total[exponent] for exponent in sorted(total) if total[exponent]}


@dataclass(frozen=True, eq=False, repr=False)
class Profile(ReadingPass[Histograms]):
    """Measures tensors, and counts their exponents while a block is still in the cache."""

    title: ClassVar = "measuring"

    def tally(self) -> Histograms:
        """Begin with nothing."""
        return Histograms(self.selected, self.spec)

    def work(self, block: Block, worker: Worker, tally: Histograms) -> None:
        """Sum a block, and count its exponents."""
        with worker.view(block, self.spec) as data:
            sums, counts = worker.backend.profile(data, pieces_of(block), self.spec)
        tally.add(block, sums, counts=counts.counts, largest_finite=counts.largest)


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
