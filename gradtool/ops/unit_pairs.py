"""Units of gradients beside those of their parameters: those that lie in a block, or one wherever it lies.

A unit is what belongs to one output: a row of a linear layer's weight, a filter of a convolution. Frameworks that store
outputs first (torch: OI, OIHW) have it at one index of the first axis. A tensor with at most one axis longer than 1, as
a bias or a scale, is a single unit.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool import tuning
from gradtool.backends import Stored
from gradtool.backends.storage import STORAGE
from gradtool.backends.units import norms_of, set_factors
from gradtool.ops.beside import read_one

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends import Factors, UnitCounts, UnitLimits
    from gradtool.engines import Worker
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block, Span


def units_of(one: Selected) -> tuple[int, int]:
    """How many units a tensor has, and how many consecutive elements each of them has."""
    shape, elements = one.tensor.shape, one.tensor.elements
    if not elements:
        return 0, 1
    count = shape[0] if sum(size > 1 for size in shape) > 1 else 1
    return count, elements // count


class Found(NamedTuple):
    """The factors of consecutive units of a tensor, what is counted of them, and the number of the first."""

    tensor: int
    first: int
    factors: Factors
    counts: UnitCounts


class UnitPairs(NamedTuple):
    """The tensors of gradients, those of the parameters in the same places, and what limits their units."""

    grads: Sequence[Selected]
    params: Sequence[Selected]
    limits: UnitLimits

    def part(self, numbers: Sequence[int]) -> Self:
        """The tensors of the given numbers alone."""
        grads, params = ([side[number] for number in numbers] for side in (self.grads, self.params))
        return self._replace(grads=grads, params=params)

    def size(self, span: Span) -> int:
        """The elements of a unit of the tensor that a span is of."""
        return units_of(self.grads[span.tensor])[1]

    def in_block(self, block: Block, worker: Worker) -> Iterator[Found]:
        """The factors of the units that lie in a block, which was read, from end to end; valid until the next block."""
        whole = {span.tensor: units for span in block.spans if (units := self._units_in(span))}
        if not whole:
            return
        ours = worker.channel.memory("block", block.end - block.begin)
        theirs, addends = read_one({one: self.params[one] for one in whole}, self.grads, block, worker.channel)
        room = worker.channel.memory("factors of units", 8 * sum(map(len, whole.values()))).cast("d")
        for span, addend in zip((span for span in block.spans if span.tensor in whole), addends, strict=True):
            units, size = whole[span.tensor], self.size(span)
            start, count = units.start * size - span.start, len(units) * size
            grads = _stored(ours, span.dtype, span.offset, start, count)
            params = _stored(theirs, addend.dtype, addend.offset, start, count)
            factors, room = room[: len(units)], room[len(units) :]
            counts = worker.backend.unit_factors(grads, params, size, self.limits, factors)
            yield Found(span.tensor, units.start, factors, counts)

    def of_unit(self, tensor: int, unit: int, worker: Worker) -> Found:
        """The factor of one unit, which is read; a part at a time, if it is longer than a patch."""
        sides = {"grads": self.grads[tensor], "params": self.params[tensor]}
        size, dtype, backend = units_of(sides["grads"])[1], sides["grads"].tensor.dtype, worker.backend
        factors = memoryview(bytearray(8)).cast("d")
        if size <= tuning.PATCH_ELEMENTS:
            grads, params = (
                Stored(_in_file(one, use, worker, unit * size, size), one.tensor.dtype) for use, one in sides.items()
            )
            return Found(tensor, unit, factors, backend.unit_factors(grads, params, size, self.limits, factors))
        ours, theirs = (
            norms_of(partial(_in_file, one, use, worker), one.tensor.dtype, range(unit, unit + 1), size, backend)
            for use, one in sides.items()
        )
        return Found(tensor, unit, factors, set_factors(ours, theirs, self.limits, dtype, factors))

    def _units_in(self, span: Span) -> range:
        """The units of which all elements are in a span."""
        size = self.size(span)
        return range(-(-span.start // size), (span.start + span.elements) // size)


def _stored(view: memoryview, dtype: str, offset: int, start: int, count: int) -> Stored:
    """Elements from one on of those that begin at byte `offset` of a view."""
    itemsize = STORAGE[dtype].itemsize
    begin = offset + start * itemsize
    return Stored(view[begin : begin + count * itemsize], dtype)


def _in_file(one: Selected, use: str, worker: Worker, start: int, elements: int) -> memoryview:
    itemsize = STORAGE[one.tensor.dtype].itemsize
    view = worker.channel.memory(use, elements * itemsize)
    worker.channel.read(one.shard, one.tensor.begin + start * itemsize, view)
    return view
