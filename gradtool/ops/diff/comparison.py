"""What tells the tensors of two gradient sets apart, collected block by block."""

from __future__ import annotations

import math
import threading
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from gradtool.arrays import float64s, int64s, uint64s
from gradtool.ops.diff.figures import Figures
from gradtool.reduction import TILE, TileSums

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from gradtool.backends import BlockDifferences
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block

# The maxima, and how many there are of what `BlockDifferences` has.
MAX_ABS, MAX_REL, ULPS = range(3)
_MAXIMA, _SUMS, _EXPONENTS, _COUNTS = 3, 4, 3, 6
# The sum of a·b, which may be negative, among the four.
_PRODUCTS = 3


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

    SENT: ClassVar = ("sums", "maxima", "places", "counts")

    def __init__(self, targets: Sequence[Selected]) -> None:
        count = len(targets)
        # Of (a-b)², a², b² and ab, each with the exponent of the sum itself: twice that of a tile, for squares.
        self.sums = [TileSums(1.0) for _ in range(_SUMS)]
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
        of_gaps, of_a, of_b = (found.exponents[which::_EXPONENTS] for which in range(_EXPONENTS))
        scales = [map(add, *pair) for pair in ((of_gaps, of_gaps), (of_a, of_a), (of_b, of_b), (of_a, of_b))]
        with self._lock:
            for which, (sums, exponents) in enumerate(zip(self.sums, scales, strict=True)):
                sums.extend((number for number, _ in starts), found.sums[which::_SUMS], exponents)
            for tile, (number, start) in enumerate(starts):
                self._take(number, start, found, tile)

    def condensed(self) -> Comparison:
        """The same from fewer values, to be sent."""
        for sums in self.sums:
            sums.condense()
        return self

    def put(self, places: Sequence[tuple[int, int]], other: Comparison) -> None:
        """Add what was found in whole tensors; for each its number, and 0.

        Raises:
            ValueError: it is not about these tensors.
        """
        if type(other) is not Comparison or len(other.maxima[MAX_ABS]) != len(places):
            raise ValueError("a comparison of other tensors")
        for which, sums in enumerate(other.sums):
            sums.require_valid(len(places), signed=which == _PRODUCTS)
            if not all(map(math.isfinite, sums.sums)):
                raise ValueError("a sum that is not finite")
        numbers = {position: number for position, (number, _) in enumerate(places)}
        added = [sums.renumbered(numbers) for sums in other.sums]
        with self._lock:
            for sums, more in zip(self.sums, added, strict=True):
                sums.extend(more.numbers, more.sums, more.exponents)
            for position, number in numbers.items():
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
        return Figures.of(self.sums)

    def figures_of(self, number: int) -> Figures:
        """Those of one tensor."""
        return Figures.of([sums.between(number, number + 1) for sums in self.sums])

    def place_of(self, number: int, which: int) -> int:
        """The index of a maximum in its tensor."""
        return self.places[_MAXIMA * number + which]

    def all_counts(self) -> Counts:
        """Those of all tensors."""
        return Counts(*(sum(self.counts[which::_COUNTS]) for which in range(_COUNTS)))

    def counts_of(self, number: int) -> Counts:
        """Those of one tensor."""
        return Counts(*self.counts[_COUNTS * number : _COUNTS * (number + 1)])
