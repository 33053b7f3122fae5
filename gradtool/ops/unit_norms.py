"""The norms of units of tensors: of those that lie in a block, or of one wherever it lies.

A unit is what belongs to one output: a row of a linear layer's weight, a filter of a convolution. Frameworks that store
outputs first (torch: OI, OIHW) have it at one index of the first axis. A tensor with at most one axis longer than 1, as
a bias or a scale, is a single unit.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from gradtool import tuning
from gradtool.backends.storage import STORAGE
from gradtool.ops.beside import read
from gradtool.reduction import exponent_of, is_in_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gradtool.backends import Backend
    from gradtool.engines import Worker
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block, Span

    Floats = NDArray[np.float64]
    # The stored values of so many elements of a tensor, from one on.
    Values = Callable[[int, int], memoryview]

# Centers of rows, whose sums are then sums of squares.
_ABOUT_ZERO = np.zeros(tuning.UNITS_AT_ONCE)


def units_of(one: Selected) -> tuple[int, int]:
    """How many units a tensor has, and how many consecutive elements each of them has."""
    shape, elements = one.tensor.shape, one.tensor.elements
    if not elements:
        return 0, 1
    count = shape[0] if sum(size > 1 for size in shape) > 1 else 1
    return count, elements // count


class Norms(NamedTuple):
    """The norms of consecutive units of a tensor and of their parameters; `first` is the number of the first unit."""

    tensor: int
    first: int
    grads: Floats
    params: Floats


class _Others(NamedTuple):
    """The parameters of some tensors, by number, as a source of what lies beside a block."""

    tensors: Mapping[int, Selected]
    factor: float = 1.0


class UnitNorms(NamedTuple):
    """The norms of units of gradients, and of those of the parameters in the same places."""

    grads: Sequence[Selected]
    params: Sequence[Selected]

    def part(self, numbers: Sequence[int]) -> Self:
        """Those of the tensors of the given numbers alone."""
        return type(self)([self.grads[number] for number in numbers], [self.params[number] for number in numbers])

    def size(self, span: Span) -> int:
        """The elements of a unit of the tensor that a span is of."""
        return units_of(self.grads[span.tensor])[1]

    def of_block(self, block: Block, worker: Worker) -> Iterator[Norms]:
        """Those of the units that lie in a block, which was read, from end to end."""
        whole = {span.tensor: units for span in block.spans if (units := self._units_in(span))}
        ours = worker.channel.memory("block", block.end - block.begin)
        source = _Others({number: self.params[number] for number in whole})
        for theirs, addends in read([source], self.grads, block, worker.channel, 0):
            # One source comes in one batch.
            spans = [span for span in block.spans if span.tensor in whole]
            for span, addend in zip(spans, addends, strict=True):
                units, size = whole[span.tensor], self.size(span)
                grads = _InMemory(ours, span.dtype, span.offset, span.start)
                params = _InMemory(theirs, addend.dtype, addend.offset, span.start)
                for at in range(0, len(units), tuning.UNITS_AT_ONCE):
                    some = units[at : at + tuning.UNITS_AT_ONCE]
                    yield Norms(
                        span.tensor,
                        some.start,
                        _norms(grads.elements, span.dtype, some, size, worker.backend),
                        _norms(params.elements, addend.dtype, some, size, worker.backend),
                    )

    def of_unit(self, tensor: int, unit: int, worker: Worker) -> Norms:
        """Those of one unit, which is read."""
        grads, params = (
            _norms(partial(_in_file, one, worker), one.tensor.dtype, range(unit, unit + 1), size, worker.backend)
            for one, size in ((side[tensor], units_of(side[tensor])[1]) for side in self)
        )
        return Norms(tensor, unit, grads, params)

    def _units_in(self, span: Span) -> range:
        """The units of which all elements are in a span."""
        size = self.size(span)
        return range(-(-span.start // size), (span.start + span.elements) // size)


class _InMemory(NamedTuple):
    """Part of a tensor, of which element number `begin` is at byte `offset` of a view."""

    view: memoryview
    dtype: str
    offset: int
    begin: int

    def elements(self, start: int, count: int) -> memoryview:
        """So many elements, from one on."""
        itemsize = STORAGE[self.dtype].itemsize
        at = self.offset + (start - self.begin) * itemsize
        return self.view[at : at + count * itemsize]


def _in_file(one: Selected, worker: Worker, start: int, elements: int) -> memoryview:
    itemsize = STORAGE[one.tensor.dtype].itemsize
    view = worker.channel.memory("unit", elements * itemsize)
    worker.channel.read(one.shard, one.tensor.begin + start * itemsize, view)
    return view


def _norms(values: Values, dtype: str, units: range, size: int, backend: Backend) -> Floats:
    """The norms of consecutive units; where one is longer than a patch, the sums of its parts are added in order."""
    if size > tuning.PATCH_ELEMENTS:
        sums = np.array([sum(_parts(values, dtype, unit * size, size, backend)) for unit in units])
    else:
        whole = values(units.start * size, len(units) * size)
        sums = backend.row_sums(whole, dtype, len(units), size, _ABOUT_ZERO[: len(units)])
    norms: Floats = np.sqrt(sums)
    if dtype == "F64" and not (is_in_range(sums.min()) and is_in_range(sums.max())):
        for row, unit in enumerate(units):
            if not is_in_range(sums[row]):
                norms[row] = _scaled_norm(values, unit * size, size, backend)
    return norms


def _parts(values: Values, dtype: str, start: int, size: int, backend: Backend) -> Iterator[float]:
    """The sums of squares of a unit, patch by patch."""
    for at in range(0, size, tuning.PATCH_ELEMENTS):
        columns = min(tuning.PATCH_ELEMENTS, size - at)
        yield float(backend.row_sums(values(start + at, columns), dtype, 1, columns, _ABOUT_ZERO[:1])[0])


def _scaled_norm(values: Values, start: int, size: int, backend: Backend) -> float:
    """The norm of a unit of F64 whose squares overflow or underflow: they are divided by a power of two first."""
    patch = tuning.PATCH_ELEMENTS
    bounds = [(start + at, min(patch, size - at)) for at in range(0, size, patch)]
    largest = float(np.max([np.max(np.abs(np.frombuffer(values(*part), np.float64))) for part in bounds]))
    if not 0 < largest < math.inf:
        return largest
    exponent = exponent_of(largest)

    def scaled(first: int, elements: int) -> memoryview:
        return np.ldexp(np.frombuffer(values(first, elements), np.float64), -exponent).data.cast("B")

    return float(np.ldexp(math.sqrt(sum(_parts(scaled, "F64", start, size, backend))), exponent))
