"""What tells the tensors of two gradient sets apart, collected block by block."""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.engines.tally import Column, Tally
from gradtool.ops.diff.figures import Figures
from gradtool.reduction import TILE, TileSums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.backends.protocol import BlockDifferences
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block

# The maxima of `BlockDifferences`, in order.
MAXIMA = MAX_ABS, MAX_REL, ULPS = "max_abs", "max_rel", "ulps"
_SUMS, _EXPONENTS = 4, 3


class Counts(NamedTuple):
    """How many elements, in the order of `BlockDifferences.counts`."""

    differing: int
    differing_bits: int
    not_close: int
    nonfinite_a: int
    nonfinite_b: int
    nonfinite_both: int


# The index of the first element that has a maximum.
_PLACE = "place_of_{}"
_COLUMNS = {name: Column("Q" if name == ULPS else "d", "max", place=_PLACE.format(name)) for name in MAXIMA}
_COLUMNS |= {_PLACE.format(name): Column("q", "place") for name in MAXIMA}
_COLUMNS |= {name: Column("q", "sum") for name in Counts._fields}


class Comparison(Tally):
    """The differences of some tensors; the tile sums are those of (a-b)², a², b² and ab.

    They have the exponents of the sums themselves, which for squares are twice those of tiles.
    """

    def __init__(self, targets: Sequence[Selected]) -> None:
        sums = [TileSums(1.0, signed=which == _SUMS - 1, finite=True) for which in range(_SUMS)]
        super().__init__(_COLUMNS, sums, [1] * len(targets))

    def add(self, block: Block, found: BlockDifferences) -> None:
        """Add what a backend found in the tiles of a block."""
        places = [
            (span.tensor, start)
            for span in block.spans
            for start in range(span.start, span.start + span.elements, TILE)
        ]
        rows = dict(zip(MAXIMA, found.maxima, strict=True))
        rows |= {_PLACE.format(name): found.places[which :: len(MAXIMA)] for which, name in enumerate(MAXIMA)}
        rows |= {name: found.counts[which :: len(Counts._fields)] for which, name in enumerate(Counts._fields)}
        of_gaps, of_a, of_b = (found.exponents[which::_EXPONENTS] for which in range(_EXPONENTS))
        pairs = (of_gaps, of_gaps), (of_a, of_a), (of_b, of_b), (of_a, of_b)
        numbers = [number for number, _ in places]
        sums = [(numbers, found.sums[which::_SUMS], map(add, *pair)) for which, pair in enumerate(pairs)]
        self.merge(places, rows, sums)

    def figures(self) -> Figures:
        """Those of all tensors, as one vector."""
        return Figures.of(self.tile_sums)

    def figures_of(self, number: int) -> Figures:
        """Those of one tensor."""
        return Figures.of([sums.between(number, number + 1) for sums in self.tile_sums])

    def maximum(self, which: str, number: int) -> tuple[Any, int]:
        """Return a maximum of a tensor, and the index of the first element that has it."""
        return getattr(self, which)[number], getattr(self, _PLACE.format(which))[number]

    def all_counts(self) -> Counts:
        """Those of all tensors."""
        return Counts(*(sum(getattr(self, name)) for name in Counts._fields))

    def counts_of(self, number: int) -> Counts:
        """Those of one tensor."""
        return Counts(*(getattr(self, name)[number] for name in Counts._fields))
