"""The limit of ZClip: norms far above their moving mean are pulled back towards it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.errors import BadInputError
from gradtool.ops.limits.state import LARGEST

if TYPE_CHECKING:
    from gradtool.ops.limits.state import State

# How much of the moving mean and variance one more norm leaves, and the norms that they begin with: those of the paper.
ALPHA = 0.97
WARMUP = 25


@dataclass(frozen=True)
class ZScore:
    """ZClip (Kumar, Owen, Chowdhury and Güra 2025, arXiv 2504.02507), with its reciprocal adjustment.

    With the moving mean and variance of the norms before this one, std² = variance and T the threshold:

        z = (norm - mean) / std
        limit = mean + T · (T / z) · std                    where z > T; else nothing is clipped

    Then, with A = 0.97, and seen the norm or, where it was clipped, the limit:

        mean ← A · mean + (1 - A) · seen
        variance ← A · variance + (1 - A) · (seen - mean)²        with the new mean

    The first `warmup` norms are not clipped; mean and variance begin as theirs. All is float64. Where std is 0, every
    norm above the mean has an infinite z, so that the limit is the mean.
    """

    threshold: float
    warmup: int

    name = "z"

    def limit(self, state: State, norm: float) -> float:
        """The maximum norm of a gradient of that norm; infinite where nothing is clipped."""
        if state.mean is None or state.variance is None:
            return math.inf
        distance, std = norm - state.mean, math.sqrt(state.variance)
        # NaN is not above the threshold.
        if not distance > self.threshold * std:
            return math.inf
        z = distance / std if std else math.inf
        return state.mean + self.threshold * (self.threshold / z) * std

    def after(self, state: State, norm: float) -> State:
        """The state once that norm has been seen; a norm that is not finite leaves it as it is."""
        if not math.isfinite(norm):
            return state
        if norm > LARGEST:
            raise BadInputError(
                f"the norm {norm!r} is too large for --limit z, which takes its square; nothing written"
            )
        if state.mean is not None and state.variance is not None:
            seen = min(norm, self.limit(state, norm))
            mean = ALPHA * state.mean + (1 - ALPHA) * seen
            variance = ALPHA * state.variance + (1 - ALPHA) * (seen - mean) ** 2
            return state.seen(mean=mean, variance=variance)
        norms = (*state.norms, norm)
        if len(norms) < self.warmup:
            return state.seen(norms=norms)
        mean = math.fsum(norms) / len(norms)
        variance = math.fsum((one - mean) ** 2 for one in norms) / len(norms)
        return state.seen(norms=(), mean=mean, variance=variance)
