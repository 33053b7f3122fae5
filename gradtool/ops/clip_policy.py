"""What clipping does to a value: the arguments that decide it, and the decision for each tensor."""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool import validators
from gradtool.arrays import np
from gradtool.backends.protocol import NormSpec
from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError, Problem, UsageError
from gradtool.ops.limits import rule_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.groups import Group
    from gradtool.ops.limits import Rule
    from gradtool.ops.measurement import Measurement, Norms
    from gradtool.options import ClipOptions
    from gradtool.store.format.gradset import Selected


# Below, a float64 loses precision, and then is 0; and a float32.
SMALLEST_NORMAL, _SMALLEST_NORMAL32 = sys.float_info.min, 2.0**-126


def is_limit(limit: float | None) -> bool:
    """Whether there is a norm that is above a limit."""
    return limit is not None and limit < math.inf


def clip_coef(limit: float | None, norm: float, eps: float) -> float:
    """The coefficient limit / (norm + eps), infinite where there is nothing to clip; NaN goes through.

    It is 0 for a limit of 0 or an infinite norm. A quotient that underflows is the smallest number above 0.
    """
    # An infinite limit changes nothing, not even where the norm is infinite too.
    if limit is None or math.isinf(limit) or norm + eps == 0:
        return math.inf
    is_zero = limit == 0 or math.isinf(norm)
    return limit / (norm + eps) or (0.0 if is_zero else math.ulp(0.0))


class GroupLimit(NamedTuple):
    """The maximum norm of the tensors whose names match a regular expression."""

    pattern: str
    max_norm: float

    @classmethod
    def of(cls, text: str) -> Self:
        """What REGEX:C says, split at the last colon; raises `UsageError` for anything else."""
        pattern, colon, limit = text.rpartition(":")
        if not (colon and pattern):
            raise UsageError(f"--group must be REGEX:C, such as '^lm_head:0.5', not {text!r}")
        option = f"the C of --group {text!r}"
        max_norm = validators.number(option, limit)
        if not validators.NOT_NEGATIVE.holds(max_norm):
            raise UsageError(f"{option} must be {validators.NOT_NEGATIVE.words}, not {max_norm!r}")
        return cls(pattern, max_norm)


class Policy(NamedTuple):
    """The options that decide what becomes of a value."""

    max_norm: float | None
    groups: Sequence[GroupLimit]
    rule: Rule | None
    skip_above: float | None
    max_value: float | None
    norm_type: float
    eps: float
    per_tensor: bool
    total_norm: float | None
    unscale: float
    nonfinite: str

    @classmethod
    def of(cls, options: ClipOptions) -> Self:
        """The policy of complete options; raises `UsageError` where these contradict each other."""
        policy = cls(
            max_norm=options.max_norm,
            groups=[GroupLimit.of(one) for one in options.group],
            rule=rule_of(options),
            skip_above=options.skip_above,
            max_value=options.max_value,
            norm_type=options.norm_type,
            eps=options.eps,
            per_tensor=options.per_tensor,
            total_norm=options.total_norm,
            unscale=options.unscale,
            nonfinite=options.nonfinite,
        )
        limits_norm = policy.max_norm is not None or bool(policy.groups) or policy.rule is not None
        if limits_norm == (policy.max_value is not None):
            raise UsageError("give one of --max-norm, --max-value, --group, --limit and --agc")
        own = {
            "--per-tensor": policy.per_tensor,
            "--group": policy.groups,
            "--total-norm": policy.total_norm is not None,
        }
        given = [option for option, is_given in own.items() if is_given]
        unused = given if options.is_default("eps") else [*given, "--eps"]
        if policy.max_value is not None and unused:
            raise UsageError(f"--max-value does not take {unused[0]}: it uses no norm")
        if len(given) > 1:
            raise UsageError(f"{given[0]} and {given[1]} exclude each other")
        if policy.rule is not None and (policy.per_tensor or policy.groups):
            raise UsageError(f"--limit is that of all tensors as one vector; leave out {given[0]}")
        return policy

    def with_limit(self, limit: float | None) -> Self:
        """The same with the maximum norm that a rule has found, None for no limit, if that is the smaller one."""
        known = [one for one in (limit, self.max_norm) if one is not None]
        return self._replace(max_norm=min(known, default=math.inf))

    def problems(self, norm: float) -> list[Problem]:
        """One if the norm is above that of a gradient which is skipped; so is NaN."""
        limit = self.skip_above
        if limit is None or norm <= limit:
            return []
        what = "is NaN, which is not within" if math.isnan(norm) else f"{norm!r} is above"
        return [Problem("above-limit", f"the norm {what} the limit {limit!r} of --skip-above; nothing written")]

    @property
    def limits(self) -> list[float | None]:
        """The maximum norm of each group, and last of all other tensors."""
        return [*(group.max_norm for group in self.groups), self.max_norm]

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
        return self.total_norm is None and (self.rule is not None or any(is_limit(one) for one in self.limits))

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


def keep(selected: Sequence[Selected]) -> Decision:
    """Nothing becomes of any tensor."""
    ones, no = [1.0] * len(selected), [False] * len(selected)
    return Decision(1.0, ones, ones, no, no)


def decide(
    policy: Policy, selected: Sequence[Selected], before: Measurement, norms: Norms, groups: Sequence[Group] = ()
) -> Decision:
    """What becomes of each tensor, given what was measured in it and the unscaled norms."""
    coef = policy.coef(norms.whole if policy.total_norm is None else policy.total_norm)
    coefs = [policy.coef(one) for one in norms.tensors] if policy.per_tensor else [coef] * len(selected)
    for group, limit, norm in zip(groups, policy.limits, norms.groups, strict=False):
        for number in group.numbers:
            coefs[number] = clip_coef(limit, norm, policy.eps)
    factors = [policy.factor(one) for one in coefs]
    limits = {dtype: STORAGE[dtype].rounded(policy.limit) for dtype in {one.tensor.dtype for one in selected}}
    clipped, changed = [], []
    for number, (one, own, factor) in enumerate(zip(selected, coefs, factors, strict=True)):
        dtype = one.tensor.dtype
        rounded = rounded_factor(dtype, factor)
        if own and (own < SMALLEST_NORMAL or not _is_precise(dtype, factor)):
            raise _imprecise(one, own if own < SMALLEST_NORMAL else factor)
        clamps = before.max_abs[number] / policy.unscale > limits[dtype]
        drops = policy.nonfinite == "zero" and bool(before.nan[number] or before.inf[number])
        # A coefficient so near to 1 that it rounds to 1 clips nothing.
        clipped.append(clamps or (not own >= 1 and rounded_factor(dtype, own) != 1))
        changed.append(one.tensor.elements > 0 and (rounded != 1 or clamps or drops))
    has_one = policy.max_norm is not None and not (policy.per_tensor or policy.groups)
    return Decision(coef if has_one else None, coefs, factors, clipped, changed)


@lru_cache(maxsize=64)
def rounded_factor(dtype: str, value: float) -> float:
    """A number in the type of the factors of a storage type; nearly always the same few for all tensors."""
    return STORAGE["F64" if dtype == "F64" else "F32"].rounded(value)


@lru_cache(maxsize=64)
def _is_precise(dtype: str, factor: float) -> bool:
    """Whether the type of the factors has a normal number for one that is not 0; True for NaN."""
    rounded = rounded_factor(dtype, factor)
    return not (rounded < (SMALLEST_NORMAL if dtype == "F64" else _SMALLEST_NORMAL32) or math.isinf(rounded))


def _imprecise(one: Selected, factor: float) -> BadInputError:
    work = np.finfo(STORAGE[one.tensor.dtype].work)
    return BadInputError(
        f"the coefficient {factor!r} is out of range for {work.dtype} ({work.tiny:.3g} to {work.max:.3g}), its type "
        f"for {one.tensor.dtype}; nothing written. Clip in several steps",
        file=one.shard.path,
        tensor=one.tensor.name,
    )
