"""How many values of some tensors have which binary exponent, counted in the pass that measures them."""

from __future__ import annotations

import threading
from array import array
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import add
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self, cast

from gradtool.arrays import float64s, int64s
from gradtool.backends.histogram import RANGES, bins_of
from gradtool.engines import OnBlock, block_bytes
from gradtool.ops.passes import Measure, pieces_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gradtool.backends import Backend, BlockHistogram
    from gradtool.engines import Part, Worker
    from gradtool.ops.measurement import Measurement
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination


class Histograms:
    """A histogram of each tensor, filled block by block from any thread.

    `largest` are the largest finite magnitudes.
    """

    SENT: ClassVar = ("counts", "largest")

    def __init__(self, selected: Sequence[Selected]) -> None:
        bins = {dtype: bins_of(dtype) for dtype in RANGES}
        # An empty tensor is in no block, and has no bins.
        self._bins = [bins[one.tensor.dtype] if one.tensor.elements else range(0) for one in selected]
        self._first = [0, *accumulate(map(len, self._bins))]
        self.counts, self.largest = int64s(self._first[-1]), float64s(len(selected))
        self._lock = threading.Lock()

    def add(self, block: Block, found: BlockHistogram) -> None:
        """Add what a backend counted in the pieces of a block."""
        if not block.spans:
            return
        # The bins of a block follow one another, as its spans do. Only the first and the last tensor may be in others.
        first, last = block.spans[0].tensor, block.spans[-1].tensor
        begin, inner, outer = self._first[first], self._first[first + 1], self._first[last]
        with self._lock:
            self._add(begin, found.counts[: inner - begin])
            if last != first:
                self.counts[inner:outer] = found.counts[inner - begin : outer - begin]
                self._add(outer, found.counts[outer - begin :])
            self._see(zip((span.tensor for span in block.spans), found.largest, strict=True))

    def put(self, places: Sequence[tuple[int, int]], other: Histograms) -> None:
        """Add the counts of parts of tensors; for each the number of its tensor, and the element it begins at.

        Raises:
            ValueError: it is not about these parts.
        """
        numbers = [number for number, _ in places]
        if type(other) is not Histograms or other._bins != [self._bins[number] for number in numbers]:
            raise ValueError("histograms of other tensors")
        if len(other.counts) != sum(map(len, other._bins)) or len(other.largest) != len(numbers):
            raise ValueError("histograms of other tensors")
        with self._lock:
            for position, number in enumerate(numbers):
                self._add(self._first[number], other.counts[other._first[position] : other._first[position + 1]])
            self._see(zip(numbers, other.largest, strict=True))

    def _add(self, begin: int, counts: array[int]) -> None:
        """Add counts to the bins from `begin` on."""
        known = slice(begin, begin + len(counts))
        self.counts[known] = array("q", map(add, self.counts[known], counts))

    def _see(self, largest: Iterable[tuple[int, float]]) -> None:
        """Take the largest magnitudes of tensors, each with its number."""
        for number, magnitude in largest:
            self.largest[number] = max(self.largest[number], magnitude)

    def between(self, first: int, end: int) -> dict[int, int]:
        """The exponents of consecutive tensors, those with the numbers from `first` up to `end`, and their counts."""
        total: dict[int, int] = {}
        for bins, alike in groupby(range(first, end), key=self._bins.__getitem__):
            numbers = list(alike)
            begin, stop = self._first[numbers[0]], self._first[numbers[-1] + 1]
            for at, exponent in enumerate(bins):
                total[exponent] = total.get(exponent, 0) + sum(self.counts[begin + at : stop : len(bins)])
        return {exponent: total[exponent] for exponent in sorted(total) if total[exponent]}


class Profiled(NamedTuple):
    """What was found in tensors, and their histograms."""

    measurement: Measurement
    histograms: Histograms

    def condensed(self) -> Self:
        """The same in fewer bytes, to be sent."""
        return self._replace(measurement=self.measurement.condensed())

    def put(self, places: Sequence[tuple[int, int]], other: Self) -> None:
        """Add what was found in a part of the pass with these places."""
        self.measurement.put(places, other.measurement)
        self.histograms.put(places, other.histograms)


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

    def empty(self) -> Profiled:
        """Of all tensors, whatever the files."""
        return Profiled(self.measure.empty(), Histograms(self.selected))

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

    def _work(self, block: Block, worker: Worker, found: Profiled) -> None:
        with worker.look(block, self.measure.spec) as data:
            sums, counts = worker.backend.profile(data, pieces_of(block), self.measure.spec)
        found.measurement.add(block, sums)
        found.histograms.add(block, counts)
