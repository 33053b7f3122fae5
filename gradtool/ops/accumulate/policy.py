"""What accumulating does: the options that decide it."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.backends.protocol import NormSpec, Trim
from gradtool.errors import BadInputError, UsageError
from gradtool.ops.measurement import SMALLEST_NORMAL, clip_coef
from gradtool.ops.totals import checked_key
from gradtool.reduction import total

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.accumulate.match import Contribution
    from gradtool.ops.measurement import Measurement
    from gradtool.options import AccumulateOptions


UNDERFLOWS = f"is out of range for float64 (from {SMALLEST_NORMAL:.3g}); nothing written"


class Policy(NamedTuple):
    """The options that decide what is written: to a buffer or, if it `is_new`, to a set that holds the sum alone."""

    is_new: bool
    overwrite: bool
    weights: Sequence[float] | None
    weight_key: str | None
    mean: bool
    # None for sums and means.
    trim: Trim | None
    missing: str
    dtype: str | None
    shard_like: str | None
    max_shard_size: int | None
    max_norm: float | None
    clip_each: float | None
    norm_type: float
    eps: float
    nonfinite: str
    per_gradient: bool

    @classmethod
    def of(cls, options: AccumulateOptions) -> Self:
        """The policy of complete options; raises `UsageError` where these contradict each other."""
        shard_like, shard_size = options.shard_like, options.max_shard_size
        policy = cls(
            is_new=options.into is None,
            overwrite=options.overwrite,
            weights=options.weight or None,
            weight_key=checked_key(options.weight_key),
            mean=options.mean or options.reduce == "mean",
            trim=_trim(options.reduce, finite=options.nonfinite != "propagate"),
            missing=options.missing,
            dtype=options.dtype,
            shard_like=None if shard_like is None else os.fspath(shard_like),
            max_shard_size=None if shard_size is None else int(shard_size),
            max_norm=options.max_norm,
            clip_each=options.clip_each,
            norm_type=options.norm_type,
            eps=options.eps,
            nonfinite=options.nonfinite,
            per_gradient=options.per_gradient,
        )
        if policy.weights is not None and policy.weight_key is not None:
            raise UsageError("--weight and --weight-key exclude each other")
        if options.mean and options.reduce not in (None, "mean"):
            raise UsageError(f"--mean is --reduce mean; leave it out for --reduce {options.reduce}")
        if policy.trim is not None and (policy.weights is not None or policy.weight_key is not None):
            raise UsageError(
                "--weight and --weight-key are for sums and means; a median or trimmed mean has no weights"
            )
        is_sharded = policy.shard_like is not None or policy.max_shard_size is not None
        if policy.is_new and options.output is None and options.output_dir is None:
            raise UsageError("give --into BUFFER or --output FILE")
        if policy.is_new and policy.overwrite:
            raise UsageError(
                "--overwrite drops what --into BUFFER holds; leave it out, as --output replaces FILE anyway"
            )
        if not policy.is_new and (policy.dtype is not None or is_sharded):
            raise UsageError("--dtype, --shard-like and --max-shard-size are about a new set; leave out --into")
        if is_sharded and options.output_dir is None:
            raise UsageError("--shard-like and --max-shard-size make a folder of files; use --output-dir")
        if policy.shard_like is not None and policy.max_shard_size is not None:
            raise UsageError("--shard-like and --max-shard-size exclude each other")
        clips = policy.max_norm is not None or policy.clip_each is not None
        if not clips and not options.is_default("eps"):
            raise UsageError("--eps is about --max-norm and --clip-each; give one of these")
        return policy

    @property
    def spec(self) -> NormSpec:
        """The norm that is measured."""
        return NormSpec(self.norm_type)

    @property
    def keeps(self) -> bool:
        """Whether the old content of the buffer is part of the sum."""
        return not (self.overwrite or self.is_new)

    @property
    def counts_zeros(self) -> bool:
        """Whether a tensor that a gradient lacks counts as zeros."""
        return self.missing == "zero"

    @property
    def screens(self) -> bool:
        """Whether each gradient is measured by itself before it is added."""
        return self.clip_each is not None or self.nonfinite == "skip" or self.per_gradient

    def coef(self, limit: float | None, norm: float) -> float:
        """What clips a norm to a limit; 1 where there is nothing to clip. NaN goes through."""
        coef = clip_coef(limit, norm, self.eps)
        return 1.0 if coef >= 1 else coef

    def sum_coef(self, sums: Measurement, norm: float) -> float:
        """What clips the float64 sums, of the given norm; raises `BadInputError` where they cannot be clipped."""
        if sums.is_finite and math.isinf(norm) and self.max_norm != math.inf:
            raise BadInputError("the norm of the sum overflows float64 and cannot be clipped; nothing written")
        coef = self.coef(self.max_norm, norm)
        if 0 < coef < SMALLEST_NORMAL:
            raise BadInputError(f"the coefficient {coef!r} {UNDERFLOWS}. Use a larger --max-norm")
        return coef

    def each_coef(self, one: Contribution, found: Measurement, norm: float) -> float:
        """What clips a gradient of the given norm; raises `BadInputError` where it cannot be clipped."""
        if self.clip_each is not None and self.clip_each < math.inf and found.is_finite and math.isinf(norm):
            raise BadInputError("norm overflows float64 and cannot be clipped; nothing written", file=one.path)
        coef = self.coef(self.clip_each, norm)
        weighted = abs(one._replace(coef=coef).factor)
        # A weight alone is taken as it is given.
        if 0 < coef < SMALLEST_NORMAL or (0 < coef < 1 and one.weight and weighted < SMALLEST_NORMAL):
            smaller = coef if coef < SMALLEST_NORMAL else weighted
            raise BadInputError(f"the coefficient {smaller!r} {UNDERFLOWS}. Use a larger --clip-each", file=one.path)
        return coef

    def weight_sum(self, weights: Sequence[float]) -> float:
        """What the weights add up to; raises `BadInputError` where nothing can be divided by it that must be."""
        sum_ = added_up(weights)
        if self.mean and sum_ == 0:
            raise BadInputError("the weights add up to 0; there is no mean", code="weight")
        return sum_


def _trim(reduce: str | None, *, finite: bool) -> Trim | None:
    """What is dropped before the mean of values; None for sums, and for means of all."""
    if reduce in (None, "sum", "mean"):
        return None
    return Trim(int(reduce.removeprefix("trimmed=")) if reduce != "median" else None, finite)


def added_up(weights: Sequence[float]) -> float:
    """What weights add up to; raises `BadInputError` if that overflows."""
    sum_ = total(weights)
    if math.isinf(sum_):
        raise BadInputError("the sum of the weights overflows float64", code="weight")
    return sum_
