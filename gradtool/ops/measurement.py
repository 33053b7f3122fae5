"""What was found in some tensors, and the norms that follow from it."""

from __future__ import annotations

import math
import threading
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gradtool.backends import BlockSums, NormSpec, Piece
from gradtool.reduction import TILE, norm_of, rescue_divisor, tile_count, total

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block

    # Measures the tensors of the given numbers once more, each divided by its divisor.
    Again = Callable[[Sequence[int], Sequence[float]], "Measurement"]

_FACTS = ("max_abs", "nan", "inf", "zeros", "first_nonfinite")


class Measurement:
    """The sums and facts of some tensors, filled block by block from any thread.

    `divisors` gives what each tensor's values are divided by before they are summed; 1 but in a rescue.
    """

    def __init__(self, selected: Sequence[Selected], spec: NormSpec, divisors: Sequence[float] | None = None) -> None:
        self.spec = spec
        self.divisors = divisors
        tiles = [tile_count(one.tensor.elements) for one in selected]
        self._first_tile = np.concatenate([[0], np.cumsum(tiles, dtype=np.int64)])
        self.sums: NDArray[np.float64] = np.zeros(int(self._first_tile[-1]))
        self.max_abs: NDArray[np.float64] = np.zeros(len(selected))
        self.nan, self.inf, self.zeros = (np.zeros(len(selected), np.int64) for _ in range(3))
        self.first_nonfinite: NDArray[np.int64] = np.full(len(selected), -1, np.int64)
        self._lock = threading.Lock()

    def pieces(self, block: Block) -> list[Piece]:
        """The spans of a block, as a backend wants them."""
        if self.divisors is None:
            return [Piece(span.dtype, span.offset, span.elements) for span in block.spans]
        return [Piece(span.dtype, span.offset, span.elements, self.divisors[span.tensor]) for span in block.spans]

    def add(self, block: Block, found: BlockSums) -> None:
        """Take in what a backend found in a block. Its tiles follow one another, as its spans do."""
        if not block.spans:
            return
        first = int(self._first_tile[block.spans[0].tensor]) + block.spans[0].start // TILE
        self.sums[first : first + len(found.sums)] = found.sums
        tensors = np.array([span.tensor for span in block.spans])
        with self._lock:
            self.max_abs[tensors] = np.maximum(self.max_abs[tensors], found.max_abs)
            self.nan[tensors] += found.nan
            self.inf[tensors] += found.inf
            self.zeros[tensors] += found.zeros
            for k in np.flatnonzero(found.first_nonfinite >= 0):
                span = block.spans[int(k)]
                index, known = span.start + int(found.first_nonfinite[k]), self.first_nonfinite[span.tensor]
                self.first_nonfinite[span.tensor] = index if known < 0 else min(index, known)

    def updated(self, numbers: Sequence[int], other: Measurement) -> Measurement:
        """A copy with the tensors of the given numbers taken from another measurement, which holds just them."""
        copied = copy(self)
        copied.sums = self.sums.copy()
        for theirs, ours in enumerate(numbers):
            copied.sums[self._tiles(ours)] = other.sums[other._tiles(theirs)]
        for fact in _FACTS:
            values = getattr(self, fact).copy()
            values[list(numbers)] = getattr(other, fact)
            setattr(copied, fact, values)
        return copied

    def part(self, selected: Sequence[Selected], numbers: Sequence[int]) -> Measurement:
        """What was found in the tensors of the given numbers alone."""
        copied = Measurement(selected, self.spec)
        for ours, theirs in enumerate(numbers):
            copied.sums[copied._tiles(ours)] = self.sums[self._tiles(theirs)]
        for fact in _FACTS:
            setattr(copied, fact, getattr(self, fact)[list(numbers)])
        return copied

    @property
    def is_finite(self) -> bool:
        """Whether no NaN and no Inf took part in the sums."""
        return self.spec.drop_nonfinite or not (self.nan.any() or self.inf.any())

    @property
    def largest(self) -> float:
        """max|g| over all tensors, NaN left out."""
        return float(np.max(self.max_abs)) if self.max_abs.size else 0.0

    def norm(self, divisor: float, unscale: float) -> float:
        """The norm of all tensors as one vector, over `unscale`; their sums were taken after dividing by `divisor`."""
        if math.isinf(self.spec.order):
            return self._maximum(self.nan.any(), self.largest) / unscale
        return norm_of(total(self.sums), self.spec.order, divisor, unscale)

    def tensor_norm(self, number: int, divisor: float, unscale: float) -> float:
        """The same of one tensor."""
        if math.isinf(self.spec.order):
            return self._maximum(self.nan[number] > 0, float(self.max_abs[number])) / unscale
        return norm_of(total(self.sums[self._tiles(number)]), self.spec.order, divisor, unscale)

    def divisor(self) -> float:
        """What all tensors must be divided by for their sum to be good; 1 if it is good as it is."""
        if math.isinf(self.spec.order) or not self.is_finite:
            return 1.0
        return rescue_divisor(total(self.sums), self.largest, self.spec.order)

    def tensor_divisor(self, number: int) -> float:
        """What one tensor must be divided by for its own sum to be good."""
        finite = self.spec.drop_nonfinite or not (self.nan[number] or self.inf[number])
        if math.isinf(self.spec.order) or not finite:
            return 1.0
        sum_ = total(self.sums[self._tiles(number)])
        return rescue_divisor(sum_, float(self.max_abs[number]), self.spec.order)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def merge(self, other: Measurement) -> None:
        """Take in other blocks of the same tensors."""
        self.sums += other.sums
        self.max_abs = np.maximum(self.max_abs, other.max_abs)
        self.nan += other.nan
        self.inf += other.inf
        self.zeros += other.zeros

    def norms(self, *, per_tensor: bool = False, unscale: float = 1.0) -> Norms:
        """The norms."""
        whole = self.norm(1.0, unscale)
        return Norms(whole, [self.tensor_norm(k, 1.0, unscale) for k in range(len(self.max_abs))] if per_tensor else [])

    def _maximum(self, has_nan: np.bool | bool, largest: float) -> float:
        return math.nan if has_nan and not self.spec.drop_nonfinite else largest

    def _tiles(self, number: int) -> slice:
        return slice(int(self._first_tile[number]), int(self._first_tile[number + 1]))


class Norms(NamedTuple):
    """The norm of all tensors as one vector, and of each of them where that was asked for."""

    whole: float
    tensors: list[float]


def norms_of(measurement: Measurement, again: Again, *, per_tensor: bool, unscale: float = 1.0) -> Norms:
    """The norms that a measurement amounts to, over `unscale`.

    Where a sum overflowed, or lost its terms to underflow, it is taken `again` on inputs that are divided first.
    """
    everything = range(len(measurement.max_abs))
    divisor = measurement.divisor()
    rescued = measurement if divisor == 1 else again(everything, [divisor] * len(everything))
    whole = rescued.norm(divisor, unscale)
    if not per_tensor:
        return Norms(whole, [])
    tensors = [measurement.tensor_norm(number, 1.0, unscale) for number in everything]
    divisors = {number: one for number in everything if (one := measurement.tensor_divisor(number)) != 1}
    if divisors:
        rescued = again(list(divisors), list(divisors.values()))
        for position, (number, one) in enumerate(divisors.items()):
            tensors[number] = rescued.tensor_norm(position, one, unscale)
    return Norms(whole, tensors)
