"""The canonical sums: one order of additions, whatever the threads, the blocks and the files.

A tensor's elements, in C order, are cut into tiles of `TILE`. Within a tile, element i belongs to lane i mod `LANES`;
a lane adds its float64 terms in order of i, starting at +0; the lanes are folded pairwise, neighbours first. Every sum
above the tile is correctly rounded, so nothing that decides *which* tiles are summed together can change a bit.

A sum of powers can overflow, or lose terms to underflow, although every input is finite. A tile whose sum is not in
range is summed again on inputs divided by 2^k, where its largest magnitude is m·2^k with 1 <= m < 2. The new sum stands
for sum·2^(k·order); k is the tile's exponent, which is 0 for all other tiles.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

from gradtool.arrays import np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LANES = 2048
TILE = 65_536

# Powers of larger orders leave float64 whatever 2^k the inputs are divided by. For them, the norm of a tile takes the
# place of its sum.
MAX_SUM_ORDER = 512.0

# Below, a tile's sum may have lost terms to underflow; above, it is infinite, or the sum of many tiles may be.
_LOWEST, _HIGHEST = 2.0**-900, 2.0**1000

# Values that lie far apart are left to the last step.
_MAX_CUTS = 6
# Up to this many are not worth the work.
_FEW = 8


def tile_count(elements: int) -> int:
    """How many tiles a tensor has."""
    return -(-elements // TILE)


def fold(lanes: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums of tiles, shape (k,), from their lanes, shape (k, LANES)."""
    while lanes.shape[1] > 1:
        lanes = lanes[:, 0::2] + lanes[:, 1::2]
    return lanes[:, 0]


def is_in_range(tile_sum: float) -> bool:
    """Whether a tile with this sum need not be summed again, if it is finite and not all zero; False for NaN."""
    return _LOWEST <= tile_sum <= _HIGHEST


def exponent_of(magnitude: float) -> int:
    """The k of a magnitude m·2^k with 1 <= m < 2."""
    return math.frexp(magnitude)[1] - 1


def total(sums: Sequence[float]) -> float:
    """The correctly rounded sum of non-negative tile sums; infinite where it is beyond float64."""
    try:
        return math.fsum(sums)
    except OverflowError:
        return math.inf


def _condensed(sums: NDArray[np.float64]) -> list[float]:
    """A few numbers whose exact sum is that of many.

    Again and again the leading bits of all values, as many as can be added without a rounding, are cut off and added
    (ExtractVector of S. M. Rump, T. Ogita and S. Oishi, "Accurate floating-point summation part I").
    """
    values, spare = sums, len(sums).bit_length() + 1
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


def condensed(sums: array[float], exponents: array[int], order: float) -> tuple[array[float], array[int]]:
    """As few sums as possible, with their exponents, that stand for the same norm to the last bit; never more.

    Where the norm does not follow from exact sums alone, they stay as they are.
    """
    if math.isinf(order):
        return sums[:0], exponents[:0]
    is_exact = order in (1, 2) or not any(exponents)
    if len(sums) <= _FEW or order > MAX_SUM_ORDER or not is_exact or not all(map(math.isfinite, sums)):
        return sums, exponents
    parts = [one for one in _by_exponent(np.asarray(sums), np.asarray(exponents)) if one[0]]
    if len(parts) >= len(sums):
        return sums, exponents
    return array("d", [part for part, _ in parts]), array("i", [exponent for _, exponent in parts])


def _by_exponent(sums: NDArray[np.float64], exponents: NDArray[np.int32]) -> list[tuple[float, int]]:
    """A few numbers with each of the exponents, whose exact sums are those of all that have it."""
    return [
        (part, exponent)
        for exponent in np.unique(exponents).tolist()
        for part in _condensed(sums[exponents == exponent])
    ]


def norm_of(sums: Sequence[float], exponents: Sequence[int], order: float, unscale: float = 1.0) -> float:
    """(Σ|x|^order)^(1/order) / unscale, from tile sums and their exponents; infinite where it is beyond float64."""
    if order > MAX_SUM_ORDER:
        return _norm_of_norms(sums, order) / unscale
    whole, exponent = _merged(sums, exponents, order)
    try:
        root = math.sqrt(whole) if order == 2 else whole ** (1.0 / order)  # noqa: PLR2004
        if not exponent:
            return root / unscale
        mantissa, shift = math.frexp(unscale)
        return math.ldexp(root / mantissa, exponent - shift)
    except OverflowError:
        return math.inf


def scaled_total(sums: Sequence[float], exponents: Sequence[int]) -> tuple[float, int]:
    """The correctly rounded sum of all sum·2^exponent, as m and k of m·2^k; 0.5 <= |m| < 1, or m is 0.

    The sums are finite, and may be negative.
    """
    if not any(exponents):
        try:
            return math.frexp(math.fsum(sums))
        except OverflowError:
            # 2^24 tiles or more, each of them in range.
            pass
    whole, unit = _whole(_by_exponent(np.asarray(sums), np.asarray(exponents)))
    length = abs(whole).bit_length()
    mantissa, carry = math.frexp(whole / (1 << length))
    return mantissa, carry + length + unit if whole else 0


def _merged(sums: Sequence[float], exponents: Sequence[int], order: float) -> tuple[float, int]:
    """The sum s of all tiles and an exponent k, which stand for s·2^(k·order)."""
    whole = total(sums)
    if math.isfinite(whole) and not any(exponents):
        return whole, 0
    if not all(map(math.isfinite, sums)):
        return whole, 0
    highest = max(exponent for one, exponent in zip(sums, exponents, strict=True) if one)
    if math.isinf(whole):
        # 2^24 tiles or more, each of them in range.
        highest += math.ceil(64 / order)
    found = _by_exponent(np.asarray(sums), np.asarray(exponents))
    parts = [(part, (exponent - highest) * order) for part, exponent in found]
    if order in (1, 2):
        return _exact_sum([(part, int(shift)) for part, shift in parts]), highest
    return math.fsum(part * 2.0**shift for part, shift in parts), highest


def _exact_sum(parts: Sequence[tuple[float, int]]) -> float:
    """The correctly rounded sum of part·2^shift; no shift is above 0."""
    whole, unit = _whole(parts)
    return whole / (1 << -unit)


def _whole(parts: Sequence[tuple[float, int]]) -> tuple[int, int]:
    """The exact sum of part·2^shift, as a whole number n and a k of n·2^k."""
    lowest = min((shift for _, shift in parts), default=0) - 1074
    whole = 0
    for part, shift in parts:
        numerator, denominator = part.as_integer_ratio()
        whole += (numerator << (shift - lowest)) // denominator
    return whole, lowest


def _norm_of_norms(norms: Sequence[float], order: float) -> float:
    """The norm of a vector, from those of its parts."""
    largest = math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)
    if not 0 < largest < math.inf:
        return largest
    return largest * math.pow(math.fsum((norm / largest) ** order for norm in norms), 1 / order)
