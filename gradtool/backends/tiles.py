"""Sums and counts over the pieces of a block, in numpy: canonical tile sums, exponents, histograms and extremes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gradtool.arrays import float64s, int64s, np
from gradtool.backends.storage import STORAGE, Storage
from gradtool.backends.values import BlockHistogram, BlockSums, Extremes, NormSpec, Piece
from gradtool.reduction import LANES, MAX_SUM_ORDER, TILE, exponent_of, fold, is_in_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


def tiles_of(piece: Piece) -> Iterator[tuple[int, int, int]]:
    """Yield the number of the first element of each tile, its byte offset in the block, and how many elements it has.

    What is made of a tile stays in the cache.
    """
    for start in range(0, piece.elements, TILE):
        yield start, piece.offset + start * STORAGE[piece.dtype].itemsize, min(TILE, piece.elements - start)


def sum_pieces(
    block: memoryview,
    pieces: Sequence[Piece],
    spec: NormSpec,
    factors: Sequence[float] | None = None,
    limit: float = math.inf,
) -> BlockSums:
    """Sum the pieces of a block; with factors, multiply and clamp them in place first."""
    result, tile = BlockSums.empty(pieces), 0
    with np.errstate(all="ignore"):
        for k, piece in enumerate(pieces):
            storage = STORAGE[piece.dtype]
            for start, offset, elements in tiles_of(piece):
                values = storage.values_at(block, offset, elements)
                if factors is not None:
                    before, scaled = _scaled(values, storage, factors[k], limit, drop_nonfinite=spec.drop_nonfinite)
                    storage.store(scaled, block, offset)
                    values = storage.values_at(block, offset, elements)
                    count_losses(result, k, before, values, storage.name)
                magnitudes = _count_values(result, k, start, values, drop_nonfinite=spec.drop_nonfinite)
                if spec.order != math.inf:
                    sum_, exponent = _tile_sum(magnitudes.astype(np.float64), spec.order)
                    result.sums[tile], result.exponents[tile] = sum_, exponent
                tile += 1
    return result


def _scaled(
    values: NDArray[Any], storage: Storage, factor: float, limit: float, *, drop_nonfinite: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return values as they were, or zeros if they are multiplied by 0; and the values scaled and clamped."""
    # The product of two float32 is exact in float64, so there is one rounding.
    wide = values.astype(np.float64)
    if drop_nonfinite:
        wide[~np.isfinite(wide)] = 0
    bound, factor = storage.rounded(limit), float(storage.work.type(factor))
    scaled = wide * factor
    # Not numpy's clip, whose zero has another sign in other versions if the limit is 0.
    scaled[scaled < -bound] = -bound
    scaled[scaled > bound] = bound
    return wide if factor else np.zeros_like(wide), scaled


def count_losses(
    sums: BlockSums, k: int, before: NDArray[np.float64], after: NDArray[Any], dtype: str, *, rounds: bool = False
) -> None:
    """Count for piece k what its type has lost of the values `before`: stored values, or sums that it `rounds`."""
    normal = math.ldexp(1.0, STORAGE[dtype].normal - 1)
    small, was_small = ((values != 0) & (np.abs(values) < normal) for values in (after, before))
    if rounds:
        was_small = small & (after == before)
    sums.new_zeros[k] += int(np.count_nonzero((after == 0) & (before != 0)))
    sums.new_subnormals[k] += int(np.count_nonzero(small)) - int(np.count_nonzero(was_small))


def _count_values(sums: BlockSums, k: int, start: int, values: NDArray[Any], *, drop_nonfinite: bool) -> NDArray[Any]:
    """Count the values of a tile of piece k, which begins at element `start`, and return their magnitudes."""
    finite = np.isfinite(values)
    is_finite = bool(finite.all())
    if not is_finite:
        sums.nan[k] += int(np.count_nonzero(np.isnan(values)))
        sums.inf[k] += int(np.count_nonzero(np.isinf(values)))
        if sums.first_nonfinite[k] < 0:
            sums.first_nonfinite[k] = start + int(np.argmin(finite))
        if drop_nonfinite:
            values[~finite] = 0
    magnitudes: NDArray[Any] = np.abs(values)
    sums.zeros[k] += int(np.count_nonzero(magnitudes == 0))
    # NaN is left out because its comparisons depend on the version of numpy.
    numbers = magnitudes if is_finite else magnitudes[~np.isnan(magnitudes)]
    sums.max_abs[k] = max(sums.max_abs[k], float(numbers.max(initial=0)))
    return magnitudes


def _tile_sum(magnitudes: NDArray[np.float64], order: float) -> tuple[float, int]:
    """Return the sum of a tile, or its norm if the order is above `MAX_SUM_ORDER`; and the tile's exponent."""
    sum_ = _power_sum(magnitudes, order)
    if order <= MAX_SUM_ORDER and is_in_range(sum_):
        return sum_, 0
    largest = float(magnitudes.max())
    if not 0 < largest < math.inf:
        return sum_, 0
    if order > MAX_SUM_ORDER:
        return largest * _power_sum(magnitudes / largest, order) ** (1 / order), 0
    exponent = exponent_of(largest)
    return _power_sum(magnitudes / math.ldexp(1.0, exponent), order), exponent


def _power_sum(magnitudes: NDArray[np.float64], order: float) -> float:
    if order == 2:  # noqa: PLR2004 - this order and the next are those whose bits are promised
        return lane_sum(magnitudes * magnitudes)
    return lane_sum(magnitudes if order == 1 else magnitudes**order)


def lane_sum(terms: NDArray[np.float64]) -> float:
    """Sum the terms of a tile."""
    # A loop, because numpy promises no order of its reductions.
    lanes = np.zeros(LANES)
    for start in range(0, terms.size, LANES):
        row = terms[start : start + LANES]
        lanes[: row.size] += row
    return float(fold(lanes[None, :])[0])


def empty_histogram(pieces: Sequence[Piece]) -> BlockHistogram:
    """Return the counts of pieces before anything is counted."""
    return BlockHistogram(int64s(sum(len(STORAGE[piece.dtype].bins) for piece in pieces)), float64s(len(pieces)))


def count_exponents(block: memoryview, pieces: Sequence[Piece]) -> BlockHistogram:
    """Count the values of the pieces of a block by exponent."""
    histogram = empty_histogram(pieces)
    counts, first_bin = np.frombuffer(histogram.counts, np.int64), 0
    for k, piece in enumerate(pieces):
        storage, bins = STORAGE[piece.dtype], STORAGE[piece.dtype].bins
        for _, offset, elements in tiles_of(piece):
            values = np.abs(storage.values_at(block, offset, elements))
            values = values[np.isfinite(values) & (values > 0)]
            exponents = np.frexp(values)[1] - bins.start
            counts[first_bin : first_bin + len(bins)] += np.bincount(exponents, minlength=len(bins))
            histogram.largest[k] = max(histogram.largest[k], float(values.max(initial=0)))
        first_bin += len(bins)
    return histogram


def count_extremes(block: memoryview, pieces: Sequence[Piece]) -> Extremes:
    """Count subnormal and saturated values: without its sign, the code of a finite value grows with its magnitude."""
    extremes = Extremes(int64s(len(pieces)), int64s(len(pieces)))
    for k, piece in enumerate(pieces):
        storage, kind = STORAGE[piece.dtype], STORAGE[piece.dtype].bits.type
        normal, largest = map(kind, storage.bounds)
        for _, offset, elements in tiles_of(piece):
            magnitudes = storage.codes_at(block, offset, elements) & kind((1 << (8 * storage.itemsize - 1)) - 1)
            # 0 - 1 is the largest number there is.
            extremes.subnormal[k] += int(np.count_nonzero(magnitudes - kind(1) < normal - kind(1)))
            extremes.saturated[k] += int(np.count_nonzero(magnitudes == largest))
    return extremes
