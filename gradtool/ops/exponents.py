"""How many values of some tensors have which binary exponent, counted in the pass that measures them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, cast

from gradtool.backends.histogram import RANGES, bins_of
from gradtool.engines import OnBlock, block_bytes
from gradtool.engines.tally import Column
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import Measure, pieces_of

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence

    from gradtool.backends import Backend, NormSpec
    from gradtool.engines import Part, Worker
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination


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


@dataclass(frozen=True)
class Profile:
    """Measures tensors, and counts their exponents while a block is still in the cache."""

    measure: Measure

    @property
    def title(self) -> str:
        """As a progress bar shows it."""
        return self.measure.title

    @property
    def selected(self) -> Sequence[Selected]:
        """The tensors."""
        return self.measure.selected

    def empty(self) -> Histograms:
        """Of all tensors, whatever the files."""
        return Histograms(self.selected, self.measure.spec)

    def nbytes(self, destination: Destination) -> int:
        """Bytes of the tensors."""
        return self.measure.nbytes(destination)

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[OnBlock]:
        """One for each block, as large as those of the measurement."""
        nbytes = block_bytes(backend, destination, self.measure.spec)
        return (OnBlock(self._work, one) for one in self.measure.blocks(destination, nbytes))

    def parts(self, destination: Destination) -> Iterator[Part]:
        """Those of the measurement."""
        return (part._replace(work=type(self)(cast("Measure", part.work))) for part in self.measure.parts(destination))

    def _work(self, block: Block, worker: Worker, found: Histograms) -> None:
        with worker.look(block, self.measure.spec) as data:
            sums, counts = worker.backend.profile(data, pieces_of(block), self.measure.spec)
        found.add(block, sums, counts=counts.counts, largest_finite=counts.largest)
