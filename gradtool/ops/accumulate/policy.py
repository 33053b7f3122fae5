"""What accumulating does: the options that decide it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.backends import Terms
from gradtool.errors import BadInputError, UsageError
from gradtool.ops.clip_policy import clip_coef
from gradtool.reduction import total

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Policy:
    """The options that decide what becomes of the buffer."""

    overwrite: bool
    weights: Sequence[float] | None
    weight_key: str | None
    mean: bool
    missing: str
    create: bool
    dtype: str | None
    max_norm: float | None
    clip_each: float | None
    norm_type: float
    eps: float
    nonfinite: str

    @property
    def terms(self) -> Terms:
        """What sums are taken over."""
        return Terms(self.norm_type)

    @property
    def keeps(self) -> bool:
        """Whether the old content of the buffer is part of the sum."""
        return not (self.overwrite or self.create)

    @property
    def screens(self) -> bool:
        """Whether the gradients must be looked at before they are added."""
        return self.clip_each is not None or self.nonfinite == "skip"

    def coef(self, limit: float | None, norm: float) -> float:
        """What clips a norm to a limit; 1 where there is nothing to clip. NaN goes through."""
        coef = clip_coef(limit, norm, self.eps)
        return 1.0 if coef >= 1 else coef

    def weight_sum(self, weights: Sequence[float]) -> float:
        """What the weights add up to; raises `BadInputError` where nothing can be divided by it that must be."""
        sum_ = total(weights)
        if math.isinf(sum_):
            raise BadInputError("the weights add up to more than float64 can hold", code="weight")
        if self.mean and sum_ == 0:
            raise BadInputError("the weights add up to 0, so there is no mean", code="weight")
        return sum_

    def check(self) -> None:
        """Raise `UsageError` where options contradict each other."""
        if self.weights is not None and self.weight_key is not None:
            raise UsageError("--weight and --weight-key exclude each other")
        if self.dtype is not None and not self.create:
            raise UsageError("--dtype is the type of a buffer that --create makes")
