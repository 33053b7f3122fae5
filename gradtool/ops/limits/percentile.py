"""The limit of AutoClip: a percentile of the norms so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gradtool.ops.limits.state import State

# So many norms take 200 kB in a state.
WINDOW = 10_000


@dataclass(frozen=True)
class Percentile:
    """AutoClip (Seetharaman, Wichern, Pardo and Le Roux 2020, arXiv 2007.14469).

    The limit is the percentile P of the last `window` norms, unclipped and this one included; between two norms it is
    interpolated linearly, as `numpy.percentile` does it.
    """

    percentile: float
    window: int

    name = "percentile"

    def limit(self, state: State, norm: float) -> float:
        """The maximum norm of a gradient of that norm; infinite where no norm is known."""
        norms = self.after(state, norm).norms[-self.window :]
        return float(np.percentile(norms, self.percentile)) if norms else math.inf

    def after(self, state: State, norm: float) -> State:
        """The state once that norm has been seen; a norm that is not finite leaves it as it is."""
        return state.seen(norms=(*state.norms, norm)[-self.window :]) if math.isfinite(norm) else state
