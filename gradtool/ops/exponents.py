"""How many values of some tensors have which binary exponent, counted in the pass that measures them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from gradtool.arrays import np
from gradtool.backends.histogram import RANGES, bins_of
from gradtool.engines import OnBlock
from gradtool.ops.passes import Measure, pieces_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from gradtool.backends import Backend, BlockHistogram
    from gradtool.engines import Part, Worker
    from gradtool.ops.measurement import Measurement
    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.header import Shard
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination


class Histograms:
    """A histogram of each tensor, filled block by block from any thread; can be pickled.

    `largest` are the largest finite magnitudes.
    """

    def __init__(self, selected: Sequence[Selected]) -> None:
        bins = {dtype: bins_of(dtype) for dtype in RANGES}
        self._lowest = np.array([bins[one.tensor.dtype].start for one in selected], np.int64)
        # An empty tensor is in no block, and has no bins.
        self._bins = np.array([len(bins[one.tensor.dtype]) * (one.tensor.elements > 0) for one in selected], np.int64)
        self._ends = np.cumsum(self._bins)
        self.counts: NDArray[np.int64] = np.zeros(int(self._bins.sum()), np.int64)
        self.largest: NDArray[np.float64] = np.zeros(len(selected))
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # Most bins are empty, and are not sent.
        at = np.flatnonzero(self.counts)
        return {name: value for name, value in vars(self).items() if name != "_lock"} | {
            "counts": (len(self.counts), at, self.counts[at])
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        length, at, values = state["counts"]
        vars(self).update(state, counts=np.zeros(length, np.int64), _lock=threading.Lock())
        self.counts[at] = values

    def add(self, block: Block, found: BlockHistogram) -> None:
        """Add what a backend counted in the pieces of a block."""
        if not block.spans:
            return
        tensors = np.array([span.tensor for span in block.spans])
        # The bins of a block follow one another, as its spans do.
        begin = int(self._ends[tensors[0]] - self._bins[tensors[0]])
        with self._lock:
            self.counts[begin : begin + len(found.counts)] += found.counts
            self.largest[tensors] = np.maximum(self.largest[tensors], found.largest)

    def merge(self, other: Self) -> None:
        """Add the counts of other blocks of the same tensors."""
        with self._lock:
            self.counts += other.counts
            self.largest = np.maximum(self.largest, other.largest)

    def put(self, places: Sequence[tuple[int, int]], other: Histograms) -> None:
        """Add the counts of parts of tensors; for each the number of its tensor, and the element it begins at.

        Raises:
            ValueError: it is not about these parts.
        """
        numbers = np.array(places, np.int64).reshape(-1, 2)[:, 0]
        if type(other) is not Histograms or not np.array_equal(other._bins, self._bins[numbers]):
            raise ValueError("histograms of other tensors")
        if other.counts.shape != (other._bins.sum(),) or other.largest.shape != numbers.shape:
            raise ValueError("histograms of other tensors")
        with self._lock:
            for position, number in enumerate(numbers.tolist()):
                self._of(number)[:] += other._of(position)
            np.maximum.at(self.largest, numbers, other.largest)

    def between(self, first: int, end: int) -> dict[int, int]:
        """The exponents of consecutive tensors, those with the numbers from `first` up to `end`, and their counts."""
        all_bins = bins_of("F64")
        total = np.zeros(len(all_bins), np.int64)
        for number in range(first, end):
            at = int(self._lowest[number]) - all_bins.start
            total[at : at + int(self._bins[number])] += self._of(number)
        return {all_bins[at]: int(total[at]) for at in np.flatnonzero(total).tolist()}

    def _of(self, number: int) -> NDArray[np.int64]:
        end = int(self._ends[number])
        return self.counts[end - int(self._bins[number]) : end]


class Profiled(NamedTuple):
    """What was found in tensors, and their histograms."""

    measurement: Measurement
    histograms: Histograms

    def merge(self, other: Self) -> None:
        """Add what was found in another part of the pass."""
        self.measurement.merge(other.measurement)
        self.histograms.merge(other.histograms)

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

    def over(self, shards: Collection[Shard]) -> Self:
        """The part of the pass that is about those files."""
        return type(self)(self.measure.over(shards))

    def empty(self) -> Profiled:
        """Of all tensors, whatever the files."""
        return Profiled(self.measure.empty(), Histograms(self.selected))

    def nbytes(self, destination: Destination) -> int:
        """Bytes of the tensors."""
        return self.measure.nbytes(destination)

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[OnBlock]:
        """One for each block."""
        return (OnBlock(self._work, one) for one in self.measure.blocks(destination, backend.block_bytes))

    def parts(self, destination: Destination) -> Iterator[Part]:
        """Those of the measurement."""
        return (part._replace(work=type(self)(cast("Measure", part.work))) for part in self.measure.parts(destination))

    def _work(self, block: Block, worker: Worker, found: Profiled) -> None:
        data, pieces = worker.load(block), pieces_of(block)
        sums = worker.backend.tile_sums(data, pieces, self.measure.spec)
        counts = worker.backend.histogram(data, pieces)
        found.measurement.add(block, sums)
        found.histograms.add(block, counts)
