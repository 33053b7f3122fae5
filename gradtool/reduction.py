"""The canonical sums: a single order of additions, whatever the threads, the blocks and the files.

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
from bisect import bisect_left
from itertools import compress
from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

Key = TypeVar("Key")

LANES = 2048
TILE = 65_536

# Powers of larger orders leave float64 whatever 2^k the inputs are divided by. For them, the norm of a tile takes the
# place of its sum.
MAX_SUM_ORDER = 512.0

# Below, a tile's sum may have lost terms to underflow; above, it is infinite, or the sum of many tiles may be.
_LOWEST, _HIGHEST = 2.0**-900, 2.0**1000

# The number of tile sums above which they are condensed; higher for orders above `MAX_SUM_ORDER`, because that rounds.
_MAX_SUMS, _MAX_NORMS = 1 << 13, 1 << 20


def tile_count(elements: int) -> int:
    """Count the tiles of a tensor."""
    return -(-elements // TILE)


def fold(lanes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of tiles, shape (k,), from their lanes, shape (k, LANES)."""
    while lanes.shape[1] > 1:
        lanes = lanes[:, 0::2] + lanes[:, 1::2]
    return lanes[:, 0]


def is_in_range(tile_sum: float) -> bool:
    """Check that a tile with this sum, finite and not all zero, need not be summed again; False for NaN."""
    return _LOWEST <= tile_sum <= _HIGHEST


def exponent_of(magnitude: float) -> int:
    """Return the k of a magnitude m·2^k with 1 <= m < 2."""
    return math.frexp(magnitude)[1] - 1


def total(sums: Sequence[float]) -> float:
    """Return the correctly rounded sum of non-negative tile sums; infinite where it is beyond float64."""
    try:
        return math.fsum(sums)
    except OverflowError:
        return math.inf


def _parts(values: list[float]) -> list[float]:
    """Return a few numbers that have the exact sum of many, and do not depend on their order; NaN or Inf alone."""
    parts: list[float] = []
    try:
        while (remainder := math.fsum([*values, *(-part for part in parts)])) and math.isfinite(remainder):
            parts.append(remainder)
    except OverflowError:
        # 2^24 tiles or more, each of them in range.
        half = len(values) // 2
        return [*_parts(values[:half]), *_parts(values[half:])]
    return [remainder] if remainder else parts


def _grouped(keys: Iterable[Key], sums: Iterable[float]) -> dict[Key, list[float]]:
    """Group the sums by their keys, without zeros."""
    groups: dict[Key, list[float]] = {}
    for key, value in zip(keys, sums, strict=True):
        if value:
            groups.setdefault(key, []).append(value)
    return groups


def _by_exponent(sums: Sequence[float], exponents: Sequence[int]) -> list[tuple[float, int]]:
    """Return a few numbers for each exponent, which have the exact sum of all with that exponent."""
    groups = _grouped(exponents, sums)
    return [(part, exponent) for exponent, values in groups.items() for part in _parts(values)]


class TileSums:
    """Tile sums of some tensors, each with the number of its tensor and its exponent; they can be pickled.

    They come in any order. Many are replaced by a few that have the same exact sums, so that they do not grow with the
    data; for orders above `MAX_SUM_ORDER`, by their norm.
    """

    # Condensed sums are sent.
    sent_names: ClassVar = ("numbers", "sums", "exponents")
    condensed_names: ClassVar = sent_names

    def __init__(self, order: float, *, signed: bool = False, finite: bool = False) -> None:
        self.order, self.signed, self.finite = order, signed, finite
        self.numbers, self.sums, self.exponents = array("q"), array("d"), array("i")
        self._is_sorted, self._limit = True, _MAX_SUMS if order <= MAX_SUM_ORDER else _MAX_NORMS

    def extend(self, numbers: Iterable[int], sums: Iterable[float], exponents: Iterable[int]) -> None:
        """Add sums, unless the norm is a maximum."""
        if math.isinf(self.order):
            return
        self.numbers.extend(numbers)
        self.sums.extend(sums)
        self.exponents.extend(exponents)
        self._is_sorted = False
        if len(self.sums) > self._limit:
            self.condense()
            self._limit = max(self._limit, 2 * len(self.sums))

    def condense(self) -> None:
        """Sort the sums by their tensors, and replace them by as few as possible."""
        groups = _grouped(zip(self.numbers, self.exponents, strict=True), self.sums)
        entries = [(*key, part) for key in sorted(groups) for part in self._condensed(groups[key])]
        self.numbers = array("q", (number for number, _, _ in entries))
        self.exponents = array("i", (exponent for _, exponent, _ in entries))
        self.sums = array("d", (part for _, _, part in entries))
        self._is_sorted = True

    def _condensed(self, values: list[float]) -> list[float]:
        if len(values) == 1:
            return values
        if self.order <= MAX_SUM_ORDER:
            return _parts(values)
        return [_norm_of_norms(values, self.order)] if len(self.sums) > self._limit else values

    def between(self, first: int, end: int) -> TileSums:
        """Return the sums of consecutive tensors, from number `first` up to `end`, numbered from 0 on."""
        if not self._is_sorted:
            self.condense()
        part = slice(bisect_left(self.numbers, first), bisect_left(self.numbers, end))
        sums = self._empty()
        sums.extend((number - first for number in self.numbers[part]), self.sums[part], self.exponents[part])
        return sums

    def renumbered(self, numbers: Mapping[int, int]) -> TileSums:
        """Return the sums of the tensors that are keys of `numbers`, with the numbers that are its values."""
        sums, wanted = self._empty(), [number in numbers for number in self.numbers]
        mapped = (numbers[number] for number in compress(self.numbers, wanted))
        sums.extend(mapped, compress(self.sums, wanted), compress(self.exponents, wanted))
        return sums

    def _empty(self) -> TileSums:
        return TileSums(self.order, signed=self.signed, finite=self.finite)

    def require_valid(self, count: int) -> None:
        """Raise `ValueError` unless these may be sums of `count` tensors: finite and negative only where allowed."""
        if not len(self.numbers) == len(self.sums) == len(self.exponents):
            raise ValueError("sums without a tensor or an exponent")
        if self.numbers and not 0 <= min(self.numbers) <= max(self.numbers) < count:
            raise ValueError("sums of other tensors")
        if self.finite and not all(map(math.isfinite, self.sums)):
            raise ValueError("a sum that is not finite")
        groups = _grouped(zip(self.numbers, self.exponents, strict=True), self.sums)
        # A number that stands for many sums may be negative.
        if not self.signed and any(total(values) < 0 for values in groups.values()):
            raise ValueError("a negative sum of magnitudes")

    def norm(self, unscale: float = 1.0) -> float:
        """Return the norm of all tensors as a single vector, divided by `unscale`."""
        return norm_of(self.sums, self.exponents, self.order, unscale)


def norm_of(sums: Sequence[float], exponents: Sequence[int], order: float, unscale: float = 1.0) -> float:
    """Return (Σ|x|^order)^(1/order) / unscale, from tile sums and their exponents; infinite beyond float64."""
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
    """Return the correctly rounded sum of all sum·2^exponent, as m and k of m·2^k; 0.5 <= |m| < 1, or m is 0.

    The sums are finite, and may be negative.
    """
    if not any(exponents):
        try:
            return math.frexp(math.fsum(sums))
        except OverflowError:
            # 2^24 tiles or more, each of them in range.
            pass
    whole, unit = _whole(_by_exponent(sums, exponents))
    length = abs(whole).bit_length()
    mantissa, carry = math.frexp(whole / (1 << length))
    return mantissa, carry + length + unit if whole else 0


def _merged(sums: Sequence[float], exponents: Sequence[int], order: float) -> tuple[float, int]:
    """Return the sum s of all tiles and an exponent k, which stand for s·2^(k·order)."""
    whole = total(sums)
    if (math.isfinite(whole) and not any(exponents)) or not all(map(math.isfinite, sums)):
        return whole, 0
    highest = max(exponent for value, exponent in zip(sums, exponents, strict=True) if value)
    if math.isinf(whole):
        # 2^24 tiles or more, each of them in range.
        highest += math.ceil(64 / order)
    parts = [(part, (exponent - highest) * order) for part, exponent in _by_exponent(sums, exponents)]
    if order in (1, 2):
        # No shift is above 0.
        numerator, unit = _whole([(part, int(shift)) for part, shift in parts])
        return numerator / (1 << -unit), highest
    return math.fsum(part * 2.0**shift for part, shift in parts), highest


def _whole(parts: Sequence[tuple[float, int]]) -> tuple[int, int]:
    """Return the exact sum of part·2^shift, as a whole number n and a k of n·2^k."""
    lowest = min((shift for _, shift in parts), default=0) - 1074
    whole = 0
    for part, shift in parts:
        numerator, denominator = part.as_integer_ratio()
        whole += (numerator << (shift - lowest)) // denominator
    return whole, lowest


def _norm_of_norms(norms: Sequence[float], order: float) -> float:
    """Return the norm of a vector, from the norms of its parts."""
    largest = math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)
    if not 0 < largest < math.inf:
        return largest
    return largest * math.pow(math.fsum((norm / largest) ** order for norm in norms), 1 / order)
