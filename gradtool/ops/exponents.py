"""How many values of some tensors have which binary exponent, counted in the pass that measures them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from gradtool.backends.histogram import RANGES, bins_of
from gradtool.engines.tally import Column
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import ReadingPass, pieces_of

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from gradtool.backends import NormSpec
    from gradtool.engines.worker import Worker
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block


_COLUMNS = {"counts": Column("q", "bins"), "largest_finite": Column("d", "max")}


class Histograms(Measurement):
    """A measurement with a histogram of each tensor; `largest_finite` are magnitudes."""

    counts: array[int]
    largest_finite: array[float]

    def __init__(self, selected: Sequence[Selected], spec: NormSpec) -> None:
        bins = {dtype: bins_of(dtype) for dtype in RANGES}
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
