"""What clipping does to a value: the arguments that decide it, and the decision for each tensor."""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from gradtool.backends import NormSpec
from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.measurement import Measurement, Norms
    from gradtool.options import ClipOptions
    from gradtool.store.format.gradset import Selected


# Below, a float64 loses precision, and then is 0.
SMALLEST_NORMAL = sys.float_info.min


def clip_coef(limit: float | None, norm: float, eps: float) -> float:
    """The coefficient limit / (norm + eps), infinite where there is nothing to clip; NaN goes through.

    It is 0 for a limit of 0 or an infinite norm. A quotient that underflows is the smallest number above 0.
    """
    # An infinite limit changes nothing, not even where the norm is infinite too.
    if limit is None or math.isinf(limit) or norm + eps == 0:
        return math.inf
    is_zero = limit == 0 or math.isinf(norm)
    return limit / (norm + eps) or (0.0 if is_zero else math.ulp(0.0))


class Policy(NamedTuple):
    """The options that decide what becomes of a value."""

    max_norm: float | None
    max_value: float | None
    norm_type: float
    eps: float
    per_tensor: bool
    total_norm: float | None
    unscale: float
    nonfinite: str

    @classmethod
    def of(cls, chosen: ClipOptions) -> Self:
        """The policy of complete options; raises `UsageError` where these contradict each other."""
        policy = cls(
            max_norm=chosen["max_norm"],
            max_value=chosen["max_value"],
            norm_type=chosen["norm_type"],
            eps=chosen["eps"],
            per_tensor=chosen["per_tensor"],
            total_norm=chosen["total_norm"],
            unscale=chosen["unscale"],
            nonfinite=chosen["nonfinite"],
        )
        if (policy.max_norm is None) == (policy.max_value is None):
            raise UsageError("give either --max-norm or --max-value")
        if policy.max_value is not None and (policy.per_tensor or policy.total_norm is not None):
            raise UsageError("--max-value takes neither --per-tensor nor --total-norm: it knows no norm")
        if policy.per_tensor and policy.total_norm is not None:
            raise UsageError("--per-tensor and --total-norm exclude each other")
        return policy

    def coef(self, norm: float) -> float:
        """What clips a norm to the limit; 1 or more where there is nothing to clip."""
        return clip_coef(self.max_norm, norm, self.eps)

    def factor(self, coef: float) -> float:
        """What a value is multiplied by: the coefficient where it clips, over the loss scale. NaN goes through."""
        return (1.0 if coef >= 1 else coef) / self.unscale

    @property
    def spec(self) -> NormSpec:
        """The norm that is measured."""
        return NormSpec(self.norm_type, drop_nonfinite=self.nonfinite == "zero")

    @property
    def needs_norm(self) -> bool:
        """Whether a coefficient is made of the norm that is measured."""
        return self.max_norm is not None and self.max_norm < math.inf and self.total_norm is None

    @property
    def limit(self) -> float:
        """What a value is clamped to."""
        return math.inf if self.max_value is None else abs(self.max_value)


class Decision(NamedTuple):
    """What becomes of each tensor: its coefficient, its factor, and whether it is clipped and whether it changes.

    `coef` is the one coefficient of all, or None where there is no such thing.
    """

    coef: float | None
    coefs: list[float]
    factors: list[float]
    clipped: list[bool]
    changed: list[bool]


def decide(policy: Policy, selected: Sequence[Selected], before: Measurement, norms: Norms) -> Decision:
    """What becomes of each tensor, given what was measured in it and the unscaled norms."""
    coef = policy.coef(norms.whole if policy.total_norm is None else policy.total_norm)
    coefs = [policy.coef(one) for one in norms.tensors] if policy.per_tensor else [coef] * len(selected)
    factors = [policy.factor(one) for one in coefs]
    limits = {dtype: STORAGE[dtype].rounded(policy.limit) for dtype in {one.tensor.dtype for one in selected}}
    clipped, changed = [], []
    for number, (one, own, factor) in enumerate(zip(selected, coefs, factors, strict=True)):
        dtype = one.tensor.dtype
        rounded = _rounded(dtype, factor)
        if own and (own < SMALLEST_NORMAL or not _is_precise(dtype, factor)):
            raise _imprecise(one, own if own < SMALLEST_NORMAL else factor)
        clamps = float(before.max_abs[number]) / policy.unscale > limits[dtype]
        drops = policy.nonfinite == "zero" and bool(before.nan[number] or before.inf[number])
        # A coefficient so near to 1 that it rounds to 1 clips nothing.
        clipped.append(clamps or (not own >= 1 and _rounded(dtype, own) != 1))
        changed.append(one.tensor.elements > 0 and (rounded != 1 or clamps or drops))
    has_one = policy.max_norm is not None and not policy.per_tensor
    return Decision(coef if has_one else None, coefs, factors, clipped, changed)


@lru_cache(maxsize=64)
def _rounded(dtype: str, value: float) -> float:
    """A number in the type of the factors of a storage type; nearly always the same few for all tensors."""
    return float(STORAGE[dtype].work.type(value))


@lru_cache(maxsize=64)
def _is_precise(dtype: str, factor: float) -> bool:
    """Whether the type of the factors has a normal number for one that is not 0; True for NaN."""
    rounded = _rounded(dtype, factor)
    return not (rounded < np.finfo(STORAGE[dtype].work).tiny or math.isinf(rounded))


def _imprecise(one: Selected, factor: float) -> BadInputError:
    work = np.finfo(STORAGE[one.tensor.dtype].work)
    return BadInputError(
        f"the coefficient {factor!r} is out of range for {work.dtype} ({work.tiny:.3g} to {work.max:.3g}), its type "
        f"for {one.tensor.dtype}; nothing written. Clip in several steps",
        file=one.shard.path,
        tensor=one.tensor.name,
    )
