"""What clipping does to a value: the arguments that decide it, and the decision for each tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradtool.backends.storage import STORAGE
from gradtool.errors import UsageError
from gradtool.ops.norm import check_norm_type
from gradtool.reduction import largest_sum, rescue_exponent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gradtool.ops.passes import Measurement
    from gradtool.store.gradset import Selected

NONFINITE_POLICIES = ("error", "propagate", "zero")


@dataclass(frozen=True)
class Policy:
    """The arguments that decide what becomes of a value."""

    max_norm: float | None
    max_value: float | None
    norm_type: float
    eps: float
    per_tensor: bool
    total_norm: float | None
    unscale: float
    nonfinite: str

    def coef(self, norm: float) -> float:
        """max_norm / (norm + eps); 1 or more where there is nothing to clip."""
        if self.max_norm is None:
            return math.inf
        return self.max_norm / (norm + self.eps) if norm + self.eps else math.inf

    def factor(self, coef: float) -> float:
        """What a value is multiplied by: the coefficient where it clips, over the loss scale. NaN goes through."""
        return (1.0 if coef >= 1 else coef) / self.unscale

    @property
    def limit(self) -> float:
        """What a value is clamped to."""
        return math.inf if self.max_value is None else self.max_value

    def check(self) -> None:
        """Raise `UsageError` where the arguments make no sense."""
        check_norm_type(self.norm_type)
        if (self.max_norm is None) == (self.max_value is None):
            raise UsageError("give either --max-norm or --max-value")
        if self.max_value is not None and (self.per_tensor or self.total_norm is not None):
            raise UsageError("--max-value takes neither --per-tensor nor --total-norm: it knows no norm")
        if self.per_tensor and self.total_norm is not None:
            raise UsageError("--per-tensor and --total-norm exclude each other")
        for option, limit in (("--max-norm", self.max_norm), ("--max-value", self.max_value)):
            if limit is not None and not limit >= 0:
                raise UsageError(f"{option} must be 0 or more, not {limit!r}")
        for option, number in (("--eps", self.eps), ("--total-norm", self.total_norm)):
            if number is not None and not 0 <= number < math.inf:
                raise UsageError(f"{option} must be 0 or more and finite, not {number!r}")
        if not 0 < self.unscale < math.inf:
            raise UsageError(f"--unscale must be above 0 and finite, not {self.unscale!r}")
        if self.nonfinite not in NONFINITE_POLICIES:
            raise UsageError(f"--nonfinite must be one of {', '.join(NONFINITE_POLICIES)}, not {self.nonfinite!r}")


@dataclass(frozen=True)
class Decision:
    """What becomes of each tensor: its coefficient, its factor, and whether it is clipped and whether it changes."""

    coefs: list[float]
    factors: list[float]
    clipped: list[bool]
    changed: list[bool]

    @property
    def numbers(self) -> list[int]:
        """The tensors that change."""
        return [number for number, changes in enumerate(self.changed) if changes]


def decide(policy: Policy, selected: Sequence[Selected], before: Measurement, coefs: list[float]) -> Decision:
    """What becomes of each tensor, given what was measured in it and its coefficient."""
    factors = [policy.factor(coef) for coef in coefs]
    limits = {dtype: storage.rounded(policy.limit) for dtype, storage in STORAGE.items()}
    clipped, changed = [], []
    for number, (one, coef, factor) in enumerate(zip(selected, coefs, factors, strict=True)):
        dtype = one.tensor.dtype
        # A coefficient so near to 1 that it rounds to 1 changes nothing.
        with np.errstate(over="ignore"):
            scales = float(STORAGE[dtype].work.type(factor)) != 1
        clamps = float(before.max_abs[number]) / policy.unscale > limits[dtype]
        drops = policy.nonfinite == "zero" and bool(before.nan[number] or before.inf[number])
        clipped.append(clamps or (scales and not coef >= 1))
        changed.append(one.tensor.elements > 0 and (scales or clamps or drops))
    return Decision(coefs, factors, clipped, changed)


def exponents(
    policy: Policy, changed: Sequence[Selected], max_abs: NDArray[np.float64], factors: Sequence[float]
) -> list[int]:
    """The powers of two that keep the sums of the result from overflow and underflow; nearly always all 0."""
    if math.isinf(policy.norm_type) or not changed:
        return [0] * len(changed)
    largest = [min(float(one) * factor, policy.limit) for one, factor in zip(max_abs, factors, strict=True)]
    elements = [one.tensor.elements for one in changed]
    if not policy.per_tensor:
        largest, elements = [max(largest)], [sum(elements)]
    found = [
        rescue_exponent(largest_sum(count, one, policy.norm_type), one)
        for count, one in zip(elements, largest, strict=True)
    ]
    return found if policy.per_tensor else found * len(changed)
