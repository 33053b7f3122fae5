"""The differences of two blocks, in numpy: this defines the bits.

The results for a tile are over the elements that are finite on both sides; all others count as +0. The four sums are
canonical tile sums (`gradtool.reduction`) of float64 terms. Where Σa² is out of range, though not all a are 0, a is
divided by 2^k first, in Σab too, with k the exponent of the largest |a|; the same for b. Where Σ(a-b)² is out of range,
its terms are ((a-b)/2^k)², with k the exponent of the largest |a - b|. If that is infinite, k is 1023, and where a - b
overflows, the term is (a/2^k - b/2^k)²: both quotients are exact there.

The relative difference is |a - b| / |b|: 0 for 0/0, and infinite for any other x/0. The distance in ulps is between the
codes of a and b in the coarser of their two types, that with the shorter mantissa, each rounded to nearest even. Codes
are counted up from 0, and down from 0 below zero; -0 is 0. A value that overflows the coarser type is one code above
its largest value.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

from gradtool.arrays import float64s, int32s, int64s, np, uint64s
from gradtool.backends.storage import STORAGE, Storage
from gradtool.backends.tiles import lane_sum, tiles_of
from gradtool.backends.values import BlockDifferences, Piece, Tolerance
from gradtool.reduction import exponent_of, is_in_range, tile_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# Of a difference that is beyond float64, though both values are not.
_LARGEST_EXPONENT = 1023


def empty_differences(pieces: Sequence[Piece]) -> BlockDifferences:
    """Return the result for pieces in which nothing differs."""
    tiles = sum(tile_count(piece.elements) for piece in pieces)
    return BlockDifferences(
        sums=float64s(4 * tiles),
        exponents=int32s(3 * tiles),
        max_abs=float64s(tiles),
        max_rel=float64s(tiles),
        ulps=uint64s(tiles),
        places=int64s(4 * tiles),
        counts=int64s(7 * tiles),
    )


def compare_pieces(
    a: memoryview,
    a_pieces: Sequence[Piece],
    b: memoryview,
    b_pieces: Sequence[Piece],
    tolerances: Sequence[Tolerance],
) -> BlockDifferences:
    """Compare pieces in the same places, as `Backend.differences`."""
    result, tile = empty_differences(a_pieces), 0
    with np.errstate(all="ignore"):
        for a_piece, b_piece, tolerance in zip(a_pieces, b_pieces, tolerances, strict=True):
            types = STORAGE[a_piece.dtype], STORAGE[b_piece.dtype]
            for (_, a_offset, elements), (_, b_offset, _) in zip(tiles_of(a_piece), tiles_of(b_piece), strict=True):
                a_codes, b_codes = types[0].codes_at(a, a_offset, elements), types[1].codes_at(b, b_offset, elements)
                sides = types[0].widen(a_codes).astype(np.float64), types[1].widen(b_codes).astype(np.float64)
                _compare(result, tile, sides, max(types, key=lambda storage: storage.code), tolerance)
                different = np.count_nonzero(a_codes != b_codes) if types[0] == types[1] else elements
                result.counts[7 * tile + 1] = int(different)
                tile += 1
    return result


def _compare(
    result: BlockDifferences, tile: int, sides: tuple[Floats, Floats], coarser: Storage, tolerance: Tolerance
) -> None:
    """Compare the values of a tile; the stored bits are not looked at."""
    a, b = sides
    finite = np.isfinite(a) & np.isfinite(b)
    same = ~finite & ((a == b) | (np.isnan(a) & np.isnan(b)))
    unlike = ~finite & ~same
    x, y = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    gap = np.abs(x - y)
    far = gap > tolerance.absolute + tolerance.relative * np.abs(y)
    sums, exponents = _sums(x, y)
    result.sums[4 * tile : 4 * tile + 4], result.exponents[3 * tile : 3 * tile + 3] = sums, exponents
    differs, only_a, only_b = (gap != 0) | unlike, unlike & ~np.isfinite(a), unlike & ~np.isfinite(b)
    masks = differs, far | unlike, only_a, only_b, same, (gap > tolerance.near * np.abs(y)) | unlike
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    result.counts[7 * tile] = counts[0]
    result.counts[7 * tile + 2 : 7 * tile + 7] = array("q", counts[1:])
    relative = np.where(gap == 0, 0.0, gap / np.abs(y))
    distances = gap, relative, _distances(x, y, coarser)
    for number, (largest, values) in enumerate(zip(result.maxima, distances, strict=True)):
        place = int(np.argmax(values))
        largest[tile] = values[place].item()
        result.places[4 * tile + number] = place
    result.places[4 * tile + 3] = int(np.argmax(differs)) if counts[0] else -1


def _sums(x: Floats, y: Floats) -> tuple[array[float], array[int]]:
    """Return the four sums of a tile, and the exponents of the first three."""
    gap = x - y
    # These are the sums, unless an exponent is not 0.
    exponents = [_exponent(lane_sum(values * values), values) for values in (gap, x, y)]
    k, m, n = (math.ldexp(1.0, exponent) for exponent in exponents)
    gap = np.where(np.isfinite(gap), gap / k, x / k - y / k)
    x, y = x / m, y / n
    return array("d", map(lane_sum, (gap * gap, x * x, y * y, x * y))), array("i", exponents)


def _exponent(sum_: float, values: Floats) -> int:
    """Return the exponent by which values with this sum of squares are divided."""
    largest = float(np.abs(values).max())
    if is_in_range(sum_) or largest == 0:
        return 0
    return _LARGEST_EXPONENT if math.isinf(largest) else exponent_of(largest)


def _distances(x: Floats, y: Floats, storage: Storage) -> NDArray[np.uint64]:
    """Count the codes between two values, rounded to a type: between two of a sign, or on both sides of zero."""
    a, b = (storage.narrow_wide(np.abs(values)).astype(np.uint64) for values in (x, y))
    return np.where(np.signbit(x) == np.signbit(y), np.where(a > b, a - b, b - a), a + b)
