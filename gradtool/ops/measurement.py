"""The sums and facts of some tensors, and the norms that follow from them."""

from __future__ import annotations

import math
import threading
from array import array
from copy import copy
from itertools import chain, repeat
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from gradtool.arrays import float64s, int64s
from gradtool.reduction import TileSums, tile_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradtool.backends import BlockSums, NormSpec
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block

# One value for each tensor.
_FACTS = ("max_abs", "nan", "inf", "zeros", "first_nonfinite", "new_zeros", "new_subnormals")


class Norms(NamedTuple):
    """The norm of all tensors as one vector, and of each of them and of each group if asked for."""

    whole: float
    tensors: list[float]
    groups: list[float]


class Measurement:
    """Sums and facts of some tensors, filled block by block from any thread."""

    SENT: ClassVar = ("sums", *_FACTS)
    SIGNED: ClassVar = ("first_nonfinite", "new_subnormals")

    def __init__(self, selected: Sequence[Selected], spec: NormSpec) -> None:
        self.spec = spec
        self.sums = TileSums(spec.order)
        self.max_abs = float64s(len(selected))
        self.nan, self.inf, self.zeros, self.new_zeros, self.new_subnormals = (int64s(len(selected)) for _ in range(5))
        self.first_nonfinite = array("q", [-1]) * len(selected)
        self._lock = threading.Lock()

    def add(self, block: Block, found: BlockSums) -> None:
        """Add what a backend found in the pieces of a block."""
        if not block.spans:
            return
        numbers = chain.from_iterable(repeat(span.tensor, tile_count(span.elements)) for span in block.spans)
        with self._lock:
            self.sums.extend(numbers, found.sums, found.exponents)
            self._add_facts([(span.tensor, span.start) for span in block.spans], found)

    def condensed(self) -> Measurement:
        """The same norms and facts from fewer values, to be sent."""
        self.sums.condense()
        return self

    def put(self, places: Sequence[tuple[int, int]], other: Measurement) -> None:
        """Add what was found in parts of tensors; for each the number of its tensor, and the element it begins at.

        Raises:
            ValueError: it is not about these parts.
        """
        if type(other) is not Measurement or other.spec != self.spec or len(other.max_abs) != len(places):
            raise ValueError("a measurement of other tensors")
        other.sums.require_valid(len(places))
        sums = other.sums.renumbered({position: number for position, (number, _) in enumerate(places)})
        with self._lock:
            self.sums.extend(sums.numbers, sums.sums, sums.exponents)
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
        copied, replaced = copy(self), dict(enumerate(numbers))
        others = set(range(len(self.max_abs))) - set(numbers)
        copied.sums, sums = self.sums.renumbered({number: number for number in others}), other.sums.renumbered(replaced)
        copied.sums.extend(sums.numbers, sums.sums, sums.exponents)
        for name in _FACTS:
            facts = getattr(self, name)[:]
            for theirs, ours in replaced.items():
                facts[ours] = getattr(other, name)[theirs]
            setattr(copied, name, facts)
        return copied

    def part(self, numbers: Sequence[int]) -> Measurement:
        """A measurement of the tensors of the given numbers alone."""
        copied = copy(self)
        copied.sums = self.sums.renumbered({theirs: ours for ours, theirs in enumerate(numbers)})
        for name in _FACTS:
            setattr(copied, name, array(getattr(self, name).typecode, map(getattr(self, name).__getitem__, numbers)))
        return copied

    def between(self, first: int, end: int) -> Measurement:
        """A measurement of consecutive tensors: those with the numbers from `first` up to `end`."""
        copied = copy(self)
        vars(copied).update({name: getattr(self, name)[first:end] for name in _FACTS})
        copied.sums = self.sums.between(first, end)
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
            self._norm(every, self.sums, unscale),
            [self._norm([n], self.sums.between(n, n + 1), unscale) for n in every] if per_tensor else [],
            [self._norm(group, self.sums.renumbered({n: n for n in group}), unscale) for group in groups],
        )

    def _norm(self, numbers: Sequence[int], sums: TileSums, unscale: float) -> float:
        """The norm of some tensors, which have these sums."""
        if not math.isinf(self.spec.order):
            return sums.norm(unscale)
        if not self.spec.drop_nonfinite and any(self.nan[number] for number in numbers):
            return math.nan
        return max((self.max_abs[number] for number in numbers), default=0.0) / unscale
