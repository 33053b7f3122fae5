"""The limit of AutoClip: a percentile of the norms so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        norms = sorted(self.after(state, norm).norms[-self.window :])
        if not norms:
            return math.inf
        place = (len(norms) - 1) * (self.percentile / 100)
        lower, part = math.floor(place), place - math.floor(place)
        below, above = norms[lower], norms[min(lower + 1, len(norms) - 1)]
        # From the nearer of the two, as numpy does it.
        near = below + (above - below) * part
        return near if part < 0.5 else above - (above - below) * (1 - part)  # noqa: PLR2004

    def after(self, state: State, norm: float) -> State:
        """The state once that norm has been seen; a norm that is not finite leaves it as it is."""
        return state.seen(norms=(*state.norms, norm)[-self.window :]) if math.isfinite(norm) else state
