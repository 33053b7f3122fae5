"""The canonical sums: one order of additions, whatever the threads, the blocks and the files.

A tensor's elements, in C order, are cut into tiles of `TILE`. Within a tile, element i belongs to lane i mod `LANES`;
a lane adds its float64 terms in order of i, starting at +0; the lanes are folded pairwise, neighbours first. Every sum
above the tile is correctly rounded, so nothing that decides *which* tiles are summed together can change a bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

LANES = 2048
TILE = 65_536

# So many tile sums are worth more than one step; values that lie far apart are left to the last.
_MANY, _MAX_CUTS = 256, 6

# Below, a sum may have lost terms that underflowed; above, it may have lost its last bits, or be infinite.
_SAFE_SUMS = (2.0**-900, 2.0**1000)


def tile_count(elements: int) -> int:
    """How many tiles a tensor has."""
    return -(-elements // TILE)


def fold(lanes: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums of tiles, shape (k,), from their lanes, shape (k, LANES)."""
    while lanes.shape[1] > 1:
        lanes = lanes[:, 0::2] + lanes[:, 1::2]
    return lanes[:, 0]


def total(sums: Sequence[float] | NDArray[np.float64]) -> float:
    """The correctly rounded sum of non-negative tile sums; infinite where it is beyond float64."""
    try:
        return math.fsum(sums if len(sums) < _MANY else _condensed(sums))
    except OverflowError:
        return math.inf


def _condensed(sums: Sequence[float] | NDArray[np.float64]) -> list[float]:
    """A few numbers whose exact sum is that of many; `math.fsum` alone takes 30 ns for each of them.

    Again and again the leading bits of all values, as many as can be added without a rounding, are cut off and added
    (ExtractVector of S. M. Rump, T. Ogita and S. Oishi, "Accurate floating-point summation part I").
    """
    import numpy as np

    values, spare = np.asarray(sums, np.float64), len(sums).bit_length() + 1
    parts: list[float] = []
    for _ in range(_MAX_CUTS):
        largest = float(np.abs(values).max())
        if not 0 < largest < 2.0 ** (1022 - spare):
            break
        cutter = math.ldexp(1.0, math.frexp(largest)[1] + spare)
        leading = (values + cutter) - cutter
        parts.append(float(leading.sum()))
        values = values - leading
    rest: list[float] = values[values != 0].tolist()
    return parts + rest


def norm_of(total_sum: float, norm_type: float, divisor: float = 1.0, unscale: float = 1.0) -> float:
    """(Σ|x / unscale|^p)^(1/p), where the sum was taken over |x / divisor|^p; infinite where it is beyond float64."""
    try:
        root = math.sqrt(total_sum) if norm_type == 2 else total_sum ** (1.0 / norm_type)  # noqa: PLR2004
    except OverflowError:
        return math.inf
    return root / unscale * divisor


def rescue_divisor(total_sum: float, max_abs: float, norm_type: float) -> float:
    """What to divide finite inputs by before they are summed again; 1 when `total_sum` is good as it is.

    A sum of powers can overflow, or lose its terms to underflow, although every input is finite: F64 values of 1e200,
    or any value to a high enough power. Divided by (about) the largest magnitude, the same inputs sum to something
    between 1 and a small multiple of their number. For p = 1 and 2, whose bits are promised, the divisor is a power of
    two, which changes no bit of what does not underflow.
    """
    if max_abs == 0 or not math.isfinite(max_abs) or _SAFE_SUMS[0] <= total_sum <= _SAFE_SUMS[1]:
        return 1.0
    return math.ldexp(0.5, math.frexp(max_abs)[1]) if norm_type in (1, 2) else max_abs
