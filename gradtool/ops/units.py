"""Units of tensors, which have norms of their own: what each is multiplied by, and the pass that multiplies them.

A unit is what belongs to one output: a row of a linear layer's weight, a filter of a convolution. Frameworks that store
outputs first (torch: OI, OIHW) have it at one index of the first axis. A tensor with at most one axis longer than 1, as
a bias or a scale, is a single unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from gradtool import tuning
from gradtool.backends import Units
from gradtool.backends.storage import STORAGE
from gradtool.ops.passes import TensorPass, pieces_of
from gradtool.reduction import exponent_of, is_in_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from gradtool.backends import Backend
    from gradtool.engines import Worker
    from gradtool.ops.measurement import Measurement
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination

    Floats = NDArray[np.float64]


def units_of(one: Selected) -> tuple[int, int]:
    """How many units a tensor has, and how many consecutive elements each of them has."""
    shape, elements = one.tensor.shape, one.tensor.elements
    if not elements:
        return 0, 1
    count = shape[0] if sum(size > 1 for size in shape) > 1 else 1
    return count, elements // count


class Coefs:
    """The coefficient of each unit, by tensor, and the numbers of parameters whose norms are not finite."""

    def __init__(self, grads: Sequence[Selected]) -> None:
        self.tensors: list[Floats] = [np.ones(units_of(one)[0]) for one in grads]
        self.suspects: set[int] = set()

    def merge(self, other: Self) -> None:
        """Add the coefficients of other units; those that are not known yet are 1."""
        for coefs, found in zip(self.tensors, other.tensors, strict=True):
            np.multiply(coefs, found, out=coefs)
        self.suspects |= other.suspects


class CompareUnits(NamedTuple):
    """Finds the coefficients of units: ratio · max(|W|, eps) / |G| where |G| is larger than that, and else 1.

    |W| and |G| are 2-norms of a unit of the parameters and of the gradient, which is divided by `unscale`.
    """

    grads: Sequence[Selected]
    params: Sequence[Selected]
    ratio: float
    eps: float
    unscale: float

    @property
    def title(self) -> str:
        """As a progress bar shows it."""
        return "comparing"

    def empty(self) -> Coefs:
        """Of all units."""
        return Coefs(self.grads)

    def nbytes(self, destination: Destination) -> int:  # noqa: ARG002 - nothing is written
        """Bytes of gradients and parameters."""
        return sum(one.tensor.nbytes for one in (*self.grads, *self.params))

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[Callable[[Worker, Coefs], None]]:  # noqa: ARG002
        """One for each group of units of a tensor that are a patch together."""
        for number, one in enumerate(self.grads):
            count, size = units_of(one)
            height = max(1, min(tuning.UNITS_AT_ONCE, tuning.PATCH_ELEMENTS // size))
            for first in range(0, count, height):
                yield partial(self._compare, number, first, min(height, count - first))

    def _compare(self, number: int, first: int, count: int, worker: Worker, found: Coefs) -> None:
        grads = _norms(self.grads[number], first, count, worker) / self.unscale
        params = _norms(self.params[number], first, count, worker)
        if not np.isfinite(params).all():
            found.suspects.add(number)
        limits = self.ratio * np.maximum(params, self.eps)
        # A norm that is NaN makes its coefficient NaN.
        found.tensors[number][first : first + count] = np.where(grads <= limits, 1.0, limits / grads)


def _norms(one: Selected, first: int, count: int, worker: Worker) -> Floats:
    """The norms of consecutive units; where a unit is longer than a patch, the sums of its parts are added in order."""
    size = units_of(one)[1]
    sums, zeros = np.zeros(count), np.zeros(count)
    for part, columns in _parts(size):
        values = _stored(one, first * size + part, count * columns, worker)
        # About 0, so that they are sums of squares.
        sums += worker.backend.row_sums(values, one.tensor.dtype, count, columns, zeros)
    norms: Floats = np.sqrt(sums)
    if one.tensor.dtype == "F64" and not (is_in_range(sums.min()) and is_in_range(sums.max())):
        for row in range(count):
            if not is_in_range(sums[row]):
                norms[row] = _scaled_norm(one, (first + row) * size, size, worker)
    return norms


def _scaled_norm(one: Selected, start: int, size: int, worker: Worker) -> float:
    """The norm of a unit of F64 whose squares overflow or underflow: they are divided by a power of two first."""

    def values() -> Iterator[Floats]:
        for part, columns in _parts(size):
            yield np.frombuffer(_stored(one, start + part, columns, worker), np.float64)

    largest = float(np.max([np.max(np.abs(part)) for part in values()]))
    if not 0 < largest < math.inf:
        return largest
    exponent, total = exponent_of(largest), 0.0
    for part in values():
        scaled = np.ldexp(part, -exponent)
        total += worker.backend.row_sums(scaled.data.cast("B"), "F64", 1, len(part), np.zeros(1))[0]
    return float(np.ldexp(math.sqrt(total), exponent))


def _parts(size: int) -> Iterator[tuple[int, int]]:
    """A unit in parts of a patch at most: where each begins, and its elements."""
    for start in range(0, size, tuning.PATCH_ELEMENTS):
        yield start, min(tuning.PATCH_ELEMENTS, size - start)


def _stored(one: Selected, start: int, elements: int, worker: Worker) -> memoryview:
    itemsize = STORAGE[one.tensor.dtype].itemsize
    view = worker.channel.memory("units", elements * itemsize)
    worker.channel.read(one.shard, one.tensor.begin + start * itemsize, view)
    return view


@dataclass(frozen=True)
class ScaleUnits(TensorPass):
    """Multiplies each unit of tensors by its factor, and measures what is written."""

    title = "clipping"

    factors: Sequence[Floats] = field(default_factory=list)

    def work(self, block: Block, worker: Worker, found: Measurement) -> None:
        """Rewrite a block."""
        data = worker.load(block)
        if block.spans:
            units = [
                Units(self.factors[span.tensor], units_of(self.selected[span.tensor])[1], span.start)
                for span in block.spans
            ]
            found.add(block, worker.backend.scale_units(data, pieces_of(block), units, self.spec))
        worker.store(block, data)
