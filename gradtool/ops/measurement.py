"""The sums and facts of some tensors, and the norms that follow from them."""

from __future__ import annotations

import math
import sys
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.backends.protocol import STATISTICS, Statistics
from gradtool.engines.tally import Column, Tally
from gradtool.reduction import TileSums, tile_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.backends.protocol import BlockSums, NormSpec
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block

# Below, a float64 loses precision, and then is 0.
SMALLEST_NORMAL = sys.float_info.min
COLUMNS = {name: Column(*statistic) for name, statistic in STATISTICS.items()}


class Norms(NamedTuple):
    """The norm of all tensors as one vector, and of each of them and of each group if asked for."""

    whole: float
    tensors: list[float]
    groups: list[float]


class Measurement(Statistics, Tally):
    """Sums and facts of some tensors, as `BlockSums` has them for parts of tensors; there may be more columns."""

    def __init__(
        self,
        selected: Sequence[Selected],
        spec: NormSpec,
        more: dict[str, Column] | None = None,
        widths: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            COLUMNS | (more or {}), [TileSums(spec.order)], [1] * len(selected) if widths is None else widths
        )
        self.spec = spec

    @property
    def sums(self) -> TileSums:
        """The sums of tiles."""
        return self.tile_sums[0]

    def add(self, block: Block, sums: BlockSums, **more: Any) -> None:
        """Add what a backend has summed in the pieces of a block, and a value a piece for each further column."""
        numbers = chain.from_iterable(repeat(span.tensor, tile_count(span.elements)) for span in block.spans)
        places = [(span.tensor, span.start) for span in block.spans]
        self.merge(places, vars(sums) | more, [(numbers, sums.sums, sums.exponents)])

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


def is_limit(limit: float | None) -> bool:
    """Check whether there is a norm that is above a limit."""
    return limit is not None and limit < math.inf


def clip_coef(limit: float | None, norm: float, eps: float) -> float:
    """Return the coefficient limit / (norm + eps), infinite where there is nothing to clip; NaN goes through.

    It is 0 for a limit of 0 or an infinite norm. A quotient that underflows is the smallest number above 0.
    """
    # An infinite limit changes nothing, not even where the norm is infinite too.
    if limit is None or not is_limit(limit) or norm + eps == 0:
        return math.inf
    is_zero = limit == 0 or math.isinf(norm)
    return limit / (norm + eps) or (0.0 if is_zero else math.ulp(0.0))
