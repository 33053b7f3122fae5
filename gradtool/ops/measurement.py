"""The sums and facts of some tensors, and the norms that follow from them."""

from __future__ import annotations

import math
import threading
from array import array
from copy import copy
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from gradtool.arrays import float64s, int32s, int64s
from gradtool.reduction import TILE, condensed, norm_of, tile_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradtool.backends import BlockSums, NormSpec
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block

# One value for each tile, and one for each tensor.
_TILE_FIELDS = ("sums", "exponents")
_FACTS = ("max_abs", "nan", "inf", "zeros", "first_nonfinite", "new_zeros", "new_subnormals")


class Norms(NamedTuple):
    """The norm of all tensors as one vector, and of each of them and of each group if asked for."""

    whole: float
    tensors: list[float]
    groups: list[float]


class Measurement:
    """Sums, exponents and facts of some tensors, filled block by block from any thread."""

    SENT: ClassVar = (*_TILE_FIELDS, *_FACTS, "_first_tile")
    CONDENSED: ClassVar = _TILE_FIELDS

    def __init__(self, selected: Sequence[Selected], spec: NormSpec) -> None:
        self.spec = spec
        self._first_tile = [0, *accumulate(tile_count(one.tensor.elements) for one in selected)]
        self.sums, self.exponents = float64s(self._first_tile[-1]), int32s(self._first_tile[-1])
        self.max_abs = float64s(len(selected))
        self.nan, self.inf, self.zeros, self.new_zeros, self.new_subnormals = (int64s(len(selected)) for _ in range(5))
        self.first_nonfinite = array("q", [-1]) * len(selected)
        self._lock = threading.Lock()

    def add(self, block: Block, found: BlockSums) -> None:
        """Add what a backend found in the pieces of a block."""
        if not block.spans:
            return
        # The tiles of a block follow one another, as its spans do.
        first = self._first_tile[block.spans[0].tensor] + block.spans[0].start // TILE
        tiles = slice(first, first + len(found.sums))
        with self._lock:
            self.sums[tiles], self.exponents[tiles] = found.sums, found.exponents
            self._add_facts([(span.tensor, span.start) for span in block.spans], found)

    def condensed(self) -> Measurement:
        """The same norms and facts from fewer values, to be sent; only for `put`."""
        every = [self._tiles(number) for number in range(len(self.max_abs))]
        found = [condensed(self.sums[tiles], self.exponents[tiles], self.spec.order) for tiles in every]
        copied = copy(self)
        copied.sums = array("d", (one for sums, _ in found for one in sums))
        copied.exponents = array("i", (one for _, exponents in found for one in exponents))
        vars(copied).update(_first_tile=[0, *accumulate(len(sums) for sums, _ in found)])
        return copied

    def put(self, places: Sequence[tuple[int, int]], other: Measurement) -> None:
        """Add what was found in parts of tensors; for each the number of its tensor, and the element it begins at.

        Raises:
            ValueError: it is not about these parts.
        """
        if type(other) is not Measurement or other.spec != self.spec or len(other.max_abs) != len(places):
            raise ValueError("a measurement of other tensors")
        bounds = other._first_tile
        if bounds[0] or bounds != sorted(bounds) or {len(other.sums), len(other.exponents)} != {bounds[-1]}:
            raise ValueError("a measurement of other tiles")
        if any(one < 0 for one in other.sums):
            raise ValueError("a sum of powers that is negative")
        with self._lock:
            for position, (number, start) in enumerate(places):
                values = other._tiles(position)
                first = self._first_tile[number] + start // TILE
                tiles = slice(first, first + values.stop - values.start)
                if tiles.stop > self._first_tile[number + 1]:
                    raise ValueError("a measurement of more tiles")
                # The other tiles of a part that is condensed stay zero.
                self.sums[tiles], self.exponents[tiles] = other.sums[values], other.exponents[values]
            self._add_facts(places, other)

    def _add_facts(self, places: Iterable[tuple[int, int]], found: BlockSums | Measurement) -> None:
        """Add the facts of parts of tensors, each with the number of its tensor and the element it begins at."""
        facts = zip(places, *(getattr(found, name) for name in _FACTS), strict=True)
        for (number, start), max_abs, nan, inf, zeros, first, new_zeros, new_subnormals in facts:
            self.max_abs[number] = max(self.max_abs[number], max_abs)
            self.nan[number] += nan
            self.inf[number] += inf
            self.zeros[number] += zeros
            self.new_zeros[number] += new_zeros
            self.new_subnormals[number] += new_subnormals
            known = self.first_nonfinite[number]
            if first >= 0 and (known < 0 or start + first < known):
                self.first_nonfinite[number] = start + first

    def updated(self, numbers: Sequence[int], other: Measurement) -> Measurement:
        """A copy in which the tensors of the given numbers come from another measurement, of just these."""
        copied = copy(self)
        vars(copied).update({name: getattr(self, name)[:] for name in (*_TILE_FIELDS, *_FACTS)})
        for theirs, ours in enumerate(numbers):
            copied.take(ours, other, theirs)
        return copied

    def part(self, selected: Sequence[Selected], numbers: Sequence[int]) -> Measurement:
        """A measurement of the tensors of the given numbers alone."""
        copied = Measurement(selected, self.spec)
        for ours, theirs in enumerate(numbers):
            copied.take(ours, self, theirs)
        return copied

    def take(self, number: int, other: Measurement, theirs: int) -> None:
        """Take what is known of a tensor from another measurement, in which it has the number `theirs`."""
        for name in _TILE_FIELDS:
            getattr(self, name)[self._tiles(number)] = getattr(other, name)[other._tiles(theirs)]
        for name in _FACTS:
            getattr(self, name)[number] = getattr(other, name)[theirs]

    def between(self, first: int, end: int) -> Measurement:
        """A measurement of consecutive tensors: those with the numbers from `first` up to `end`."""
        copied = copy(self)
        begin, *ends = self._first_tile[first : end + 1]
        tiles = slice(begin, ends[-1] if ends else begin)
        vars(copied).update({name: getattr(self, name)[tiles] for name in _TILE_FIELDS})
        vars(copied).update({name: getattr(self, name)[first:end] for name in _FACTS})
        vars(copied).update(_first_tile=[0, *(one - begin for one in ends)])
        return copied

    @property
    def is_finite(self) -> bool:
        """Whether no NaN and no Inf was summed."""
        return self.spec.drop_nonfinite or not (any(self.nan) or any(self.inf))

    @property
    def stored_zeros(self) -> int:
        """The number of zeros, without NaN and Inf that count as zero because they are dropped."""
        dropped = sum(self.nan) + sum(self.inf) if self.spec.drop_nonfinite else 0
        return sum(self.zeros) - dropped

    @property
    def largest(self) -> float:
        """max|g| over all tensors, without NaN."""
        return max(self.max_abs, default=0.0)

    def norms(self, *, per_tensor: bool = False, groups: Sequence[Sequence[int]] = (), unscale: float = 1.0) -> Norms:
        """The norm of all tensors as one vector, with `per_tensor` of each of them, and of each group of numbers.

        All are divided by `unscale`.
        """
        every = range(len(self.max_abs))
        return Norms(
            self._norm(every, self.sums, self.exponents, unscale),
            [self._norm_of([number], unscale) for number in every] if per_tensor else [],
            [self._norm_of(group, unscale) for group in groups],
        )

    def _norm_of(self, numbers: Sequence[int], unscale: float) -> float:
        """The norm of some tensors."""
        sums, exponents = array("d"), array("i")
        for number in numbers:
            sums.extend(self.sums[self._tiles(number)])
            exponents.extend(self.exponents[self._tiles(number)])
        return self._norm(numbers, sums, exponents, unscale)

    def _norm(self, numbers: Sequence[int], sums: array[float], exponents: array[int], unscale: float) -> float:
        if not math.isinf(self.spec.order):
            return norm_of(sums, exponents, self.spec.order, unscale)
        if not self.spec.drop_nonfinite and any(self.nan[number] for number in numbers):
            return math.nan
        return max((self.max_abs[number] for number in numbers), default=0.0) / unscale

    def _tiles(self, number: int) -> slice:
        return slice(self._first_tile[number], self._first_tile[number + 1])
