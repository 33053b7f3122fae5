"""Clips units of tensors: the passes that find what each unit is multiplied by, and multiply it.

There may be half as many units as elements, so their factors are not kept: the second pass computes those of the units
in a block again. It cannot do so for a unit that lies in two blocks, one of which may be overwritten already. Blocks
begin with tiles, so the first pass keeps the factor of the unit that each tile begins with.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gradtool.backends import Units
from gradtool.backends.storage import STORAGE
from gradtool.engines import OnBlock
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import TensorPass, by_shard, pieces_of
from gradtool.ops.unit_norms import units_of
from gradtool.reduction import TILE, tile_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gradtool.backends import Backend, NormSpec
    from gradtool.engines import Worker
    from gradtool.ops.unit_norms import Norms, UnitNorms
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination

    Floats = NDArray[np.float64]


class Limits(NamedTuple):
    """The norm |G| of a unit is limited to ratio · max(|W|, eps); |W| is the norm of its parameters.

    Gradients are divided by `unscale` first.
    """

    ratio: float
    eps: float
    unscale: float

    def factors(self, norms: Norms) -> Floats:
        """What stored units with these norms are multiplied by; a norm that is NaN makes its factor NaN."""
        limits, grads = self.ratio * np.maximum(norms.params, self.eps), norms.grads
        if self.unscale != 1:
            grads = grads / self.unscale
        coefs = np.where(grads <= limits, 1.0, limits / grads)
        return coefs if self.unscale == 1 else coefs / self.unscale


class Compared:
    """What a comparison has found: the sums of gradients, and the factors of their units; filled from any thread.

    `heads` has, by tensor, the factor of the unit that each tile begins with. `clipped` counts the units above their
    limit, and `changed` are the tensors with a factor other than 1. `suspects` are those with a norm of parameters that
    is not finite. `out_of_range` has for each tensor the first unit whose factor is beyond the range of its type, and
    that factor.
    """

    def __init__(self, selected: Sequence[Selected], spec: NormSpec, limits: Limits) -> None:
        self.measurement = Measurement(selected, spec)
        self.heads = [np.ones(tile_count(one.tensor.elements)) for one in selected]
        self.clipped = 0
        self.changed: set[int] = set()
        self.suspects: set[int] = set()
        self.out_of_range: dict[int, tuple[int, float]] = {}
        self._selected, self._limits = selected, limits
        self._lock = threading.Lock()

    def add(self, norms: Norms) -> None:
        """Add consecutive units."""
        number, first, factors = norms.tensor, norms.first, self._limits.factors(norms)
        size, work = units_of(self._selected[number])[1], STORAGE[self._selected[number].tensor.dtype].work
        tiles = np.arange(-(-first * size // TILE), -(-(first + len(factors)) * size // TILE))
        self.heads[number][tiles] = factors[tiles * TILE // size - first]
        rounded, limits = factors.astype(work), np.finfo(work)
        beyond: Sequence[int] = ()
        # Not where one is NaN.
        if not limits.tiny <= rounded.min() <= rounded.max() <= limits.max:
            beyond = np.flatnonzero((np.abs(rounded) < limits.tiny) & (factors != 0) | np.isinf(rounded)).tolist()
        unclipped = np.array(1 / self._limits.unscale).astype(work)
        with self._lock:
            self.clipped += int(np.count_nonzero(rounded != unclipped))
            if (rounded != 1).any():
                self.changed.add(number)
            if not norms.params.max() < np.inf:
                self.suspects.add(number)
            if beyond:
                place = first + beyond[0], float(factors[beyond[0]])
                self.out_of_range[number] = min(place, self.out_of_range.get(number, place))


class CompareUnits(NamedTuple):
    """Measures gradients, and finds the factors of their units."""

    norms: UnitNorms
    limits: Limits
    spec: NormSpec

    @property
    def title(self) -> str:
        """As a progress bar shows it."""
        return "comparing"

    def empty(self) -> Compared:
        """Of all units."""
        return Compared(self.norms.grads, self.spec, self.limits)

    def nbytes(self, destination: Destination) -> int:
        """Bytes of gradients and parameters."""
        return destination.nbytes([*self.norms.grads, *self.norms.params])

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[OnBlock]:
        """One for each block."""
        blocks = destination.blocks(by_shard(self.norms.grads), TILE, backend.block_bytes)
        return (OnBlock(self._compare, one) for one in blocks)

    def _compare(self, block: Block, worker: Worker, found: Compared) -> None:
        """Compare the units that begin in a block; the last one may go on behind it."""
        sums = worker.backend.tile_sums(worker.load(block), pieces_of(block), self.spec)
        norms = list(self.norms.of_block(block, worker))
        for span in block.spans:
            last, rest = divmod(span.start + span.elements, self.norms.size(span))
            if rest and last * self.norms.size(span) >= span.start:
                norms.append(self.norms.of_unit(span.tensor, last, worker))
        # Nothing is added before all is known: a device that has no room gets the block in halves.
        found.measurement.add(block, sums)
        for one in norms:
            found.add(one)


@dataclass(frozen=True, eq=False, repr=False)
class ScaleUnits(TensorPass):
    """Multiplies each unit by its factor, and measures what is written; `heads` are those of `Compared`."""

    title = "clipping"

    norms: UnitNorms
    limits: Limits
    heads: Sequence[Floats] = field(repr=False)

    def nbytes(self, destination: Destination) -> int:
        """Bytes of the files, or of the gradients, and of the parameters."""
        return super().nbytes(destination) + sum(one.tensor.nbytes for one in self.norms.params)

    def work(self, block: Block, worker: Worker, found: Measurement) -> None:
        """Rewrite a block."""
        data = worker.load(block)
        if block.spans:
            units, factors = self._factors(block, worker)
            found.add(block, worker.backend.scale_units(data, pieces_of(block), units, factors, self.spec))
        worker.store(block, data)

    def _factors(self, block: Block, worker: Worker) -> tuple[list[Units], Floats]:
        """The units that a block has a part of, and the factors of all of them, one span after another."""
        units, count = {}, 0
        for span in block.spans:
            size = self.norms.size(span)
            first, phase = divmod(span.start, size)
            units[span.tensor] = Units(size, phase, count)
            count += -(-(span.start + span.elements) // size) - first
        factors = np.frombuffer(worker.channel.memory("factors", 8 * count), np.float64)
        at = {span.tensor: units[span.tensor].first - span.start // units[span.tensor].size for span in block.spans}
        for span in block.spans:
            # The last unit may go on behind the span, and the first may have begun before it.
            heads, end = self.heads[span.tensor], span.start + span.elements
            if end // TILE < len(heads):
                factors[at[span.tensor] + (end - 1) // units[span.tensor].size] = heads[end // TILE]
            factors[units[span.tensor].first] = heads[span.start // TILE]
        for one in self.norms.of_block(block, worker):
            begin = at[one.tensor] + one.first
            factors[begin : begin + len(one.grads)] = self.limits.factors(one)
        return list(units.values()), factors
