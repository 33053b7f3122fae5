"""What tells the tensors of two gradient sets apart, collected block by block."""

from __future__ import annotations

import math
import threading
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from gradtool.arrays import float64s, int32s, int64s, uint64s
from gradtool.ops.diff.figures import Figures
from gradtool.reduction import TILE, tile_count

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from gradtool.backends import BlockDifferences
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block

# The maxima, and how many there are of what `BlockDifferences` has.
MAX_ABS, MAX_REL, ULPS = range(3)
_MAXIMA, _SUMS, _EXPONENTS, _COUNTS = 3, 4, 3, 6


class Counts(NamedTuple):
    """How many elements, in the order of `BlockDifferences.counts`."""

    differing: int
    differing_bits: int
    not_close: int
    nonfinite_a: int
    nonfinite_b: int
    nonfinite_both: int


class Comparison:
    """The differences of some tensors, filled block by block from any thread."""

    SENT: ClassVar = ("sums", "exponents", "maxima", "places", "counts")

    def __init__(self, targets: Sequence[Selected]) -> None:
        self._first_tile = [0, *accumulate(tile_count(one.tensor.elements) for one in targets)]
        tiles, count = self._first_tile[-1], len(targets)
        self.sums, self.exponents = float64s(_SUMS * tiles), int32s(_EXPONENTS * tiles)
        # As in `BlockDifferences`, but of each tensor, and with the place in it.
        self.maxima: list[array[Any]] = [float64s(count), float64s(count), uint64s(count)]
        self.places, self.counts = int64s(_MAXIMA * count), int64s(_COUNTS * count)
        self._lock = threading.Lock()

    def add(self, block: Block, found: BlockDifferences) -> None:
        """Add what a backend found in the pieces of a block."""
        if not block.spans:
            return
        starts = [
            (span.tensor, start)
            for span in block.spans
            for start in range(span.start, span.start + span.elements, TILE)
        ]
        # The tiles of a block follow one another, as its spans do.
        first = self._first_tile[block.spans[0].tensor] + block.spans[0].start // TILE
        end = first + len(starts)
        with self._lock:
            self.sums[_SUMS * first : _SUMS * end] = found.sums
            self.exponents[_EXPONENTS * first : _EXPONENTS * end] = found.exponents
            for tile, (number, start) in enumerate(starts):
                self._take(number, start, found, tile)

    def condensed(self) -> Comparison:
        """The same: figures of several sums do not follow from fewer of them."""
        return self

    def put(self, places: Sequence[tuple[int, int]], other: Comparison) -> None:
        """Add what was found in whole tensors; for each its number, and 0.

        Raises:
            ValueError: it is not about these tensors.
        """
        own = [self._first_tile[number + 1] - self._first_tile[number] for number, _ in places]
        if type(other) is not Comparison or own != [end - begin for begin, end in pairwise(other._first_tile)]:
            raise ValueError("a comparison of other tensors")
        squares = [other.sums[which::_SUMS] for which in range(_SUMS - 1)]
        if not all(map(math.isfinite, other.sums)) or any(one < 0 for values in squares for one in values):
            raise ValueError("sums that are not finite, or negative where they are of squares")
        with self._lock:
            for position, (number, _) in enumerate(places):
                self.sums[self._tiles(number, _SUMS)] = other.sums[other._tiles(position, _SUMS)]
                self.exponents[self._tiles(number, _EXPONENTS)] = other.exponents[other._tiles(position, _EXPONENTS)]
                self._take(number, 0, other, position)

    def _take(self, number: int, start: int, found: BlockDifferences | Comparison, at: int) -> None:
        """Take the maxima, their places and the counts of a part of a tensor that begins at element `start`."""
        for which, values in enumerate(found.maxima):
            value, place = values[at], start + found.places[_MAXIMA * at + which]
            known, there = self.maxima[which][number], _MAXIMA * number + which
            if value > known or (value == known > 0 and place < self.places[there]):
                self.maxima[which][number], self.places[there] = value, place
        for which in range(_COUNTS):
            self.counts[_COUNTS * number + which] += found.counts[_COUNTS * at + which]

    def figures(self) -> Figures:
        """Those of all tensors, as one vector."""
        return Figures.of(self.sums, self.exponents)

    def figures_of(self, number: int) -> Figures:
        """Those of one tensor."""
        return Figures.of(self.sums[self._tiles(number, _SUMS)], self.exponents[self._tiles(number, _EXPONENTS)])

    def place_of(self, number: int, which: int) -> int:
        """The index of a maximum in its tensor."""
        return self.places[_MAXIMA * number + which]

    def all_counts(self) -> Counts:
        """Those of all tensors."""
        return Counts(*(sum(self.counts[which::_COUNTS]) for which in range(_COUNTS)))

    def counts_of(self, number: int) -> Counts:
        """Those of one tensor."""
        return Counts(*self.counts[_COUNTS * number : _COUNTS * (number + 1)])

    def _tiles(self, number: int, each: int) -> slice:
        """Where the tiles of a tensor are, with so many values each."""
        return slice(each * self._first_tile[number], each * self._first_tile[number + 1])
