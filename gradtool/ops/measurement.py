"""The sums and facts of some tensors, and the norms that follow from them."""

from __future__ import annotations

import math
import threading
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradtool.reduction import TILE, condensed, norm_of, tile_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gradtool.backends import BlockSums, NormSpec
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block

# One value for each tile, and one for each tensor.
_TILE_FIELDS = ("sums", "exponents")
_FACTS = ("max_abs", "nan", "inf", "zeros", "first_nonfinite")


class Norms(NamedTuple):
    """The norm of all tensors as one vector, and of each of them and of each group if asked for."""

    whole: float
    tensors: list[float]
    groups: list[float]


class Measurement:
    """Sums, exponents and facts of some tensors, filled block by block from any thread; can be pickled."""

    def __init__(self, selected: Sequence[Selected], spec: NormSpec) -> None:
        self.spec = spec
        tiles = [tile_count(one.tensor.elements) for one in selected]
        self._first_tile = np.concatenate([[0], np.cumsum(tiles, dtype=np.int64)])
        self.sums: NDArray[np.float64] = np.zeros(int(self._first_tile[-1]))
        self.exponents: NDArray[np.int32] = np.zeros(len(self.sums), np.int32)
        self.max_abs: NDArray[np.float64] = np.zeros(len(selected))
        self.nan, self.inf, self.zeros = (np.zeros(len(selected), np.int64) for _ in range(3))
        self.first_nonfinite: NDArray[np.int64] = np.full(len(selected), -1, np.int64)
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def add(self, block: Block, found: BlockSums) -> None:
        """Add what a backend found in the pieces of a block."""
        if not block.spans:
            return
        tensors = np.array([span.tensor for span in block.spans])
        # The tiles of a block follow one another, as its spans do.
        first = int(self._first_tile[tensors[0]]) + block.spans[0].start // TILE
        tiles = slice(first, first + len(found.sums))
        with self._lock:
            self.sums[tiles], self.exponents[tiles] = found.sums, found.exponents
            self._add_facts(tensors, [span.start for span in block.spans], found)

    def merge(self, other: Measurement) -> None:
        """Add a measurement of the same tensors, of which each block is in one of the two only."""
        with self._lock:
            self.sums += other.sums
            self.exponents += other.exponents
            self._add_facts(slice(None), 0, other)

    def condensed(self) -> Measurement:
        """The same norms and facts from fewer values, to be sent; only for `put`."""
        every = [self._tiles(number) for number in range(len(self.max_abs))]
        found = [condensed(self.sums[tiles], self.exponents[tiles], self.spec.order) for tiles in every]
        copied = copy(self)
        values = {
            "_first_tile": np.concatenate([[0], np.cumsum([len(sums) for sums, _ in found], dtype=np.int64)]),
            "sums": np.concatenate([np.zeros(0), *(sums for sums, _ in found)]),
            "exponents": np.concatenate([np.zeros(0, np.int32), *(exponents for _, exponents in found)]),
        }
        vars(copied).update(values)
        return copied

    def put(self, places: Sequence[tuple[int, int]], other: Measurement) -> None:
        """Add what was found in parts of tensors; for each the number of its tensor, and the element it begins at.

        Raises:
            ValueError: it is not about these parts.
        """
        if type(other) is not Measurement or other.spec != self.spec or len(other.max_abs) != len(places):
            raise ValueError("a measurement of other tensors")
        numbers, starts = np.array(places, np.int64).reshape(-1, 2).T
        with self._lock:
            for position, (number, start) in enumerate(places):
                values = other._tiles(position)
                first = int(self._first_tile[number]) + start // TILE
                tiles = slice(first, first + values.stop - values.start)
                if tiles.stop > self._first_tile[number + 1]:
                    raise ValueError("a measurement of more tiles")
                # The other tiles of a part that is condensed stay zero.
                self.sums[tiles], self.exponents[tiles] = other.sums[values], other.exponents[values]
            self._add_facts(numbers, starts, other)

    def _add_facts(
        self,
        tensors: NDArray[np.int64] | slice,
        starts: Sequence[int] | NDArray[np.int64] | int,
        found: BlockSums | Measurement,
    ) -> None:
        self.max_abs[tensors] = np.maximum(self.max_abs[tensors], found.max_abs)
        self.nan[tensors] += found.nan
        self.inf[tensors] += found.inf
        self.zeros[tensors] += found.zeros
        is_new = found.first_nonfinite >= 0
        if is_new.any():
            known, new = self.first_nonfinite[tensors], found.first_nonfinite + starts
            self.first_nonfinite[tensors] = np.where(is_new & ((known < 0) | (new < known)), new, known)

    def updated(self, numbers: Sequence[int], other: Measurement) -> Measurement:
        """A copy in which the tensors of the given numbers come from another measurement, of just these."""
        copied = copy(self)
        for name in _TILE_FIELDS:
            values = getattr(self, name).copy()
            for theirs, ours in enumerate(numbers):
                values[self._tiles(ours)] = getattr(other, name)[other._tiles(theirs)]
            setattr(copied, name, values)
        for name in _FACTS:
            values = getattr(self, name).copy()
            values[list(numbers)] = getattr(other, name)
            setattr(copied, name, values)
        return copied

    def part(self, selected: Sequence[Selected], numbers: Sequence[int]) -> Measurement:
        """A measurement of the tensors of the given numbers alone."""
        copied = Measurement(selected, self.spec)
        for name in _TILE_FIELDS:
            for ours, theirs in enumerate(numbers):
                getattr(copied, name)[copied._tiles(ours)] = getattr(self, name)[self._tiles(theirs)]
        for name in _FACTS:
            setattr(copied, name, getattr(self, name)[list(numbers)])
        return copied

    def between(self, first: int, end: int) -> Measurement:
        """A view of consecutive tensors: those with the numbers from `first` up to `end`."""
        view = copy(self)
        tiles = self._first_tile[first : end + 1]
        vars(view).update({name: getattr(self, name)[tiles[0] : tiles[-1]] for name in _TILE_FIELDS})
        vars(view).update({name: getattr(self, name)[first:end] for name in _FACTS}, _first_tile=tiles - tiles[0])
        return view

    @property
    def is_finite(self) -> bool:
        """Whether no NaN and no Inf was summed."""
        return self.spec.drop_nonfinite or not (self.nan.any() or self.inf.any())

    @property
    def largest(self) -> float:
        """max|g| over all tensors, without NaN."""
        return float(np.max(self.max_abs, initial=0.0))

    def norms(self, *, per_tensor: bool = False, groups: Sequence[Sequence[int]] = (), unscale: float = 1.0) -> Norms:
        """The norm of all tensors as one vector, with `per_tensor` of each of them, and of each group of numbers.

        All are divided by `unscale`.
        """
        numbers = range(len(self.max_abs)) if per_tensor else ()
        tensors = [self._norm(slice(number, number + 1), self._tiles(number), unscale) for number in numbers]
        grouped = [self._norm(np.array(group), self._tiles_of(group), unscale) for group in groups]
        return Norms(self._norm(slice(None), slice(None), unscale), tensors, grouped)

    def _norm(self, tensors: slice | NDArray[np.int64], tiles: slice | NDArray[np.int64], unscale: float) -> float:
        if not math.isinf(self.spec.order):
            return norm_of(self.sums[tiles], self.exponents[tiles], self.spec.order, unscale)
        if self.nan[tensors].any() and not self.spec.drop_nonfinite:
            return math.nan
        return float(np.max(self.max_abs[tensors], initial=0.0)) / unscale

    def _tiles(self, number: int) -> slice:
        return slice(int(self._first_tile[number]), int(self._first_tile[number + 1]))

    def _tiles_of(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        tiles = map(self._tiles, numbers)
        return np.concatenate([np.arange(one.start, one.stop) for one in tiles])
