"""Clips units of tensors: the passes that find what each unit is multiplied by, and multiply it.

There may be half as many units as elements, so their factors are not kept: the second pass computes those of the units
in a block again. It cannot do so for a unit that lies in two blocks, one of which may be overwritten already. Blocks
begin with tiles, so the first pass keeps the factor of the unit that each tile begins with.
"""

from __future__ import annotations

import threading
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gradtool.arrays import float64s
from gradtool.backends import Units
from gradtool.engines import OnBlock
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import Scaling, by_shard, pieces_of
from gradtool.ops.unit_pairs import units_of
from gradtool.reduction import TILE, tile_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends import Backend, BlockSums, Data, Factors, NormSpec, Piece
    from gradtool.engines import Worker
    from gradtool.ops.unit_pairs import Found, UnitPairs
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination


class Compared:
    """What a comparison has found: the sums of gradients, and the factors of their units; filled from any thread.

    `heads` has, by tensor, the factor of the unit that each tile begins with. `clipped` counts the units above their
    limit, and `changed` are the tensors with a factor other than 1. `suspects` are those with a norm of parameters that
    is not finite. `out_of_range` has for each tensor the first unit whose factor is beyond the range of its type, and
    that factor.
    """

    def __init__(self, selected: Sequence[Selected], spec: NormSpec) -> None:
        self.measurement = Measurement(selected, spec)
        self.heads = [float64s(tile_count(one.tensor.elements)) for one in selected]
        self.clipped = 0
        self.changed: set[int] = set()
        self.suspects: set[int] = set()
        self.out_of_range: dict[int, tuple[int, float]] = {}
        self._sizes = [units_of(one)[1] for one in selected]
        self._lock = threading.Lock()

    def add(self, found: Found) -> None:
        """Add consecutive units."""
        number, first, factors, counts = found
        size = self._sizes[number]
        for tile in range(-(-first * size // TILE), -(-(first + len(factors)) * size // TILE)):
            self.heads[number][tile] = factors[tile * TILE // size - first]
        with self._lock:
            self.clipped += counts.clipped
            if counts.changed:
                self.changed.add(number)
            if counts.nonfinite:
                self.suspects.add(number)
            if counts.beyond >= 0:
                place = first + counts.beyond, factors[counts.beyond]
                self.out_of_range[number] = min(place, self.out_of_range.get(number, place))


class CompareUnits(NamedTuple):
    """Measures gradients, and finds the factors of their units."""

    pairs: UnitPairs
    spec: NormSpec

    @property
    def title(self) -> str:
        """As a progress bar shows it."""
        return "comparing"

    def empty(self) -> Compared:
        """Of all units."""
        return Compared(self.pairs.grads, self.spec)

    def nbytes(self, destination: Destination) -> int:
        """Bytes of gradients and parameters."""
        return destination.nbytes([*self.pairs.grads, *self.pairs.params])

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[OnBlock]:
        """One for each block."""
        blocks = destination.blocks(by_shard(self.pairs.grads), TILE, backend.block_bytes)
        return (OnBlock(self._compare, one) for one in blocks)

    def _compare(self, block: Block, worker: Worker, found: Compared) -> None:
        """Compare the units that begin in a block; the last one may go on behind it."""
        sums = worker.backend.tile_sums(worker.load(block), pieces_of(block), self.spec)
        units = list(self.pairs.in_block(block, worker))
        for span in block.spans:
            last, rest = divmod(span.start + span.elements, self.pairs.size(span))
            if rest and last * self.pairs.size(span) >= span.start:
                units.append(self.pairs.of_unit(span.tensor, last, worker))
        # Nothing is added before all is known: a device that has no room gets the block in halves.
        found.measurement.add(block, sums)
        for one in units:
            found.add(one)


@dataclass(frozen=True, eq=False, repr=False)
class ScaleUnits(Scaling):
    """Multiplies each unit by its factor, and measures what is written; `heads` are those of `Compared`."""

    pairs: UnitPairs
    heads: Sequence[array[float]]

    def nbytes(self, destination: Destination) -> int:
        """Bytes of the files, or of the gradients, and of the parameters."""
        return super().nbytes(destination) + sum(one.tensor.nbytes for one in self.pairs.params)

    def scale(self, data: Data, pieces: Sequence[Piece], block: Block, worker: Worker) -> BlockSums:
        """Multiply each unit by its factor, which has the type that the stored values call for."""
        units, factors = self._factors(block, worker)
        ends = [*(one.first for one in units[1:]), len(factors)]
        for span, piece, one, end in zip(block.spans, pieces, units, ends, strict=True):
            if span.dtype != piece.dtype:
                factors[one.first : end] = array("d", array("f", factors[one.first : end]))
        return worker.backend.scale_units(data, pieces, units, factors, self.spec)

    def _factors(self, block: Block, worker: Worker) -> tuple[list[Units], Factors]:
        """The units that a block has a part of, and the factors of all of them, one span after another."""
        units, count = {}, 0
        for span in block.spans:
            size = self.pairs.size(span)
            first, phase = divmod(span.start, size)
            units[span.tensor] = Units(size, phase, count)
            count += -(-(span.start + span.elements) // size) - first
        factors = worker.channel.memory("factors", 8 * count).cast("d")
        at = {span.tensor: units[span.tensor].first - span.start // units[span.tensor].size for span in block.spans}
        for span in block.spans:
            # The last unit may go on behind the span, and the first may have begun before it.
            heads, end = self.heads[span.tensor], span.start + span.elements
            if end // TILE < len(heads):
                factors[at[span.tensor] + (end - 1) // units[span.tensor].size] = heads[end // TILE]
            factors[units[span.tensor].first] = heads[span.start // TILE]
        for found in self.pairs.in_block(block, worker):
            begin = at[found.tensor] + found.first
            factors[begin : begin + len(found.factors)] = found.factors
        return list(units.values()), factors
