"""What tells the tensors of two gradient sets apart, collected block by block."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradtool.ops.diff.figures import Figures
from gradtool.reduction import TILE, tile_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gradtool.backends import BlockDifferences
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block

# Beyond any index.
_NOWHERE = 1 << 62
MAX_ABS, MAX_REL, ULPS = range(3)


class Counts(NamedTuple):
    """How many elements, in the order of `BlockDifferences.counts`."""

    differing: int
    differing_bits: int
    not_close: int
    nonfinite_a: int
    nonfinite_b: int
    nonfinite_both: int


class Comparison:
    """The differences of some tensors, filled block by block from any thread; can be pickled."""

    def __init__(self, targets: Sequence[Selected]) -> None:
        tiles = [tile_count(one.tensor.elements) for one in targets]
        self._first_tile = np.concatenate([[0], np.cumsum(tiles, dtype=np.int64)])
        self.sums: NDArray[np.float64] = np.zeros((int(self._first_tile[-1]), 4))
        self.exponents: NDArray[np.int32] = np.zeros((len(self.sums), 3), np.int32)
        # The largest absolute and relative differences and distances of each tensor, and where they are.
        self.maxima: list[NDArray[Any]] = [np.zeros(len(tiles)), np.zeros(len(tiles)), np.zeros(len(tiles), np.uint64)]
        self.places: NDArray[np.int64] = np.zeros((len(tiles), 3), np.int64)
        self.counts: NDArray[np.int64] = np.zeros((len(tiles), 6), np.int64)
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def add(self, block: Block, found: BlockDifferences) -> None:
        """Add what a backend found in the pieces of a block."""
        if not block.spans:
            return
        tensors = np.array([span.tensor for span in block.spans])
        tiles = np.array([tile_count(span.elements) for span in block.spans])
        firsts = np.cumsum(tiles) - tiles
        # Where each tile begins in its tensor.
        starts = np.repeat([span.start for span in block.spans], tiles)
        starts += (np.arange(len(starts)) - np.repeat(firsts, tiles)) * TILE
        every = [
            _largest(values, found.places[:, which] + starts, firsts, tiles)
            for which, values in enumerate((found.max_abs, found.max_rel, found.ulps))
        ]
        counts = np.add.reduceat(found.counts, firsts)
        # The tiles of a block follow one another, as its spans do.
        first = int(self._first_tile[tensors[0]]) + block.spans[0].start // TILE
        with self._lock:
            self.sums[first : first + len(starts)] = found.sums
            self.exponents[first : first + len(starts)] = found.exponents
            self._take(tensors, every, counts)

    def merge(self, other: Comparison) -> None:
        """Add a comparison of the same tensors, of which each block is in one of the two only."""
        with self._lock:
            self.sums += other.sums
            self.exponents += other.exponents
            every = [(values, other.places[:, which]) for which, values in enumerate(other.maxima)]
            self._take(np.arange(len(self.counts)), every, other.counts)

    def condensed(self) -> Comparison:
        """The same: figures of several sums do not follow from fewer of them."""
        return self

    def put(self, places: Sequence[tuple[int, int]], other: Comparison) -> None:
        """Add what was found in whole tensors; for each its number, and 0.

        Raises:
            ValueError: it is not about these tensors.
        """
        numbers = np.array([number for number, _ in places], np.int64)
        own = np.diff(self._first_tile)
        if type(other) is not Comparison or own[numbers].tolist() != np.diff(other._first_tile).tolist():
            raise ValueError("a comparison of other tensors")
        with self._lock:
            for position, number in enumerate(numbers.tolist()):
                self.sums[self._tiles(number)] = other.sums[other._tiles(position)]
                self.exponents[self._tiles(number)] = other.exponents[other._tiles(position)]
            every = [(values, other.places[:, which]) for which, values in enumerate(other.maxima)]
            self._take(numbers, every, other.counts)

    def _take(
        self,
        tensors: NDArray[np.int64],
        every: Sequence[tuple[NDArray[Any], NDArray[np.int64]]],
        counts: NDArray[np.int64],
    ) -> None:
        """Take maxima with their places and counts of some tensors, each of them once."""
        for which, (values, places) in enumerate(every):
            known, at = self.maxima[which][tensors], self.places[tensors, which]
            is_new = (values > known) | ((values == known) & (values > 0) & (places < at))
            self.maxima[which][tensors] = np.where(is_new, values, known)
            self.places[tensors, which] = np.where(is_new, places, at)
        self.counts[tensors] += counts

    def figures(self) -> Figures:
        """Those of all tensors, as one vector."""
        return Figures.of(self.sums, self.exponents)

    def figures_of(self, number: int) -> Figures:
        """Those of one tensor."""
        return Figures.of(self.sums[self._tiles(number)], self.exponents[self._tiles(number)])

    def counts_of(self, number: int) -> Counts:
        """Those of one tensor."""
        return Counts(*self.counts[number].tolist())

    def _tiles(self, number: int) -> slice:
        return slice(int(self._first_tile[number]), int(self._first_tile[number + 1]))


def _largest(
    values: NDArray[Any], places: NDArray[np.int64], firsts: NDArray[np.int64], tiles: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Per tensor the largest of the values of its tiles, and the first place of it."""
    largest = np.maximum.reduceat(values, firsts)
    is_largest = values == np.repeat(largest, tiles)
    return largest, np.minimum.reduceat(np.where(is_largest, places, _NOWHERE), firsts)
