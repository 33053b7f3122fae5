"""What tells two blocks apart, in numpy: this defines the bits.

The figures of a tile are over the elements that are finite on both sides; all others count as +0. The four sums are
canonical tile sums (`gradtool.reduction`) of float64 terms. Where Σa² is out of range, though not all a are 0, a is
divided by 2^k first, in Σab too, with k the exponent of the largest |a|; the same for b. Where Σ(a-b)² is out of range,
its terms are ((a-b)/2^k)², with k the exponent of the largest |a - b|. If that is infinite, k is 1023, and where a - b
overflows, the term is (a/2^k - b/2^k)²: both quotients are exact there.

The relative difference is |a - b| / |b|: 0 for 0/0, and infinite for any other x/0. The distance in ulps is between the
codes of a and b in the coarser of their two types, the one with the shorter mantissa, each rounded to nearest even.
Codes are counted up from 0, and down from 0 below zero; -0 is 0. What overflows the coarser type is one code above its
largest value.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.arrays import float64s, int32s, int64s, np, uint64s
from gradtool.backends.protocol import BlockDifferences, Piece, Tolerance
from gradtool.backends.storage import STORAGE, Storage
from gradtool.backends.tiles import lane_sum
from gradtool.reduction import TILE, exponent_of, is_in_range, tile_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# Of a difference that is beyond float64, though both values are not.
_LARGEST_EXPONENT = 1023


def empty_differences(tiles: int) -> BlockDifferences:
    """Of tiles in which nothing differs."""
    return BlockDifferences(
        sums=float64s(4 * tiles),
        exponents=int32s(3 * tiles),
        max_abs=float64s(tiles),
        max_rel=float64s(tiles),
        ulps=uint64s(tiles),
        places=int64s(3 * tiles),
        counts=int64s(6 * tiles),
    )


def compare_pieces(
    a: memoryview, pieces: Sequence[Piece], b: memoryview, others: Sequence[Piece], tolerance: Tolerance
) -> BlockDifferences:
    """As `Backend.differences`."""
    found = empty_differences(sum(tile_count(piece.elements) for piece in pieces))
    tile = 0
    with np.errstate(all="ignore"):
        for piece, other in zip(pieces, others, strict=True):
            for start in range(0, piece.elements, TILE):
                _compare(found, tile, _Side.of(a, piece, start), _Side.of(b, other, start), tolerance)
                tile += 1
    return found


class _Side(NamedTuple):
    """A tile as it is stored, and its values in float64."""

    storage: Storage
    codes: NDArray[Any]
    values: Floats

    @classmethod
    def of(cls, block: memoryview, piece: Piece, start: int) -> _Side:
        storage, elements = STORAGE[piece.dtype], min(TILE, piece.elements - start)
        raw = np.frombuffer(block, np.uint8, elements * storage.itemsize, piece.offset + start * storage.itemsize)
        # A tensor can have any address; its copy is aligned.
        codes = raw.copy().view(storage.bits)
        return cls(storage, codes, storage.widen(codes).astype(np.float64))


def _compare(found: BlockDifferences, tile: int, a: _Side, b: _Side, tolerance: Tolerance) -> None:
    finite = np.isfinite(a.values) & np.isfinite(b.values)
    same = ~finite & ((a.values == b.values) | (np.isnan(a.values) & np.isnan(b.values)))
    unlike = ~finite & ~same
    x, y = np.where(finite, a.values, 0.0), np.where(finite, b.values, 0.0)
    gap = np.abs(x - y)
    far = gap > tolerance.absolute + tolerance.relative * np.abs(y)
    sums, exponents = _sums(x, y)
    found.sums[4 * tile : 4 * tile + 4], found.exponents[3 * tile : 3 * tile + 3] = sums, exponents
    counts = (
        np.count_nonzero(gap) + np.count_nonzero(unlike),
        np.count_nonzero(a.codes != b.codes) if a.storage == b.storage else gap.size,
        np.count_nonzero(far) + np.count_nonzero(unlike),
        np.count_nonzero(unlike & ~np.isfinite(a.values)),
        np.count_nonzero(unlike & ~np.isfinite(b.values)),
        np.count_nonzero(same),
    )
    found.counts[6 * tile : 6 * tile + 6] = array("q", map(int, counts))
    relative = np.where(gap == 0, 0.0, gap / np.abs(y))
    coarser = max(a.storage, b.storage, key=lambda storage: storage.code)
    distances = _distances(_magnitudes(x, coarser), np.signbit(x), _magnitudes(y, coarser), np.signbit(y))
    for which, (largest, each) in enumerate(zip(found.maxima, (gap, relative, distances), strict=True)):
        at = int(np.argmax(each))
        largest[tile] = each[at].item()
        found.places[3 * tile + which] = at


def _sums(x: Floats, y: Floats) -> tuple[array[float], array[int]]:
    """The four sums of a tile, and the exponents of the first three."""
    gap = x - y
    # These are the sums, unless an exponent is not 0.
    exponents = [_exponent(lane_sum(one * one), one) for one in (gap, x, y)]
    k, m, n = (math.ldexp(1.0, exponent) for exponent in exponents)
    gap = np.where(np.isfinite(gap), gap / k, x / k - y / k)
    x, y = x / m, y / n
    return array("d", map(lane_sum, (gap * gap, x * x, y * y, x * y))), array("i", exponents)


def _exponent(sum_: float, values: Floats) -> int:
    """The exponent by which values with this sum of squares are divided."""
    largest = float(np.abs(values).max())
    if is_in_range(sum_) or largest == 0:
        return 0
    return _LARGEST_EXPONENT if math.isinf(largest) else exponent_of(largest)


def _magnitudes(values: Floats, storage: Storage) -> NDArray[np.uint64]:
    """The codes of the magnitudes of values, rounded to a storage type."""
    codes: NDArray[np.uint64] = storage.narrow_wide(np.abs(values)).astype(np.uint64)
    return codes


def _distances(
    a: NDArray[np.uint64], a_is_negative: NDArray[np.bool_], b: NDArray[np.uint64], b_is_negative: NDArray[np.bool_]
) -> NDArray[np.uint64]:
    """How many codes lie between: between two of one sign, or on both sides of zero."""
    apart = np.where(a > b, a - b, b - a)
    return np.where(a_is_negative == b_is_negative, apart, a + b)
