"""What is found in the pieces of a block, in numpy: canonical tile sums, exponents and extremes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gradtool.arrays import float64s, int64s, np
from gradtool.backends.protocol import BlockHistogram, BlockSums, Extremes, NormSpec, Piece
from gradtool.backends.storage import STORAGE, Storage
from gradtool.reduction import LANES, MAX_SUM_ORDER, TILE, exponent_of, fold, is_in_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


def sum_pieces(
    block: memoryview,
    pieces: Sequence[Piece],
    spec: NormSpec,
    factors: Sequence[float] | None = None,
    limit: float = math.inf,
) -> BlockSums:
    """Sum the pieces of a block; with factors, multiply and clamp them in place first."""
    found = BlockSums.empty(pieces)
    tile = 0
    with np.errstate(all="ignore"):
        for k, piece in enumerate(pieces):
            storage = STORAGE[piece.dtype]
            for start in range(0, piece.elements, TILE):
                at, elements = piece.offset + start * storage.itemsize, min(TILE, piece.elements - start)
                raw = np.frombuffer(block, np.uint8, elements * storage.itemsize, at)
                if factors is not None:
                    before = _scale(raw, storage, factors[k], limit, drop_nonfinite=spec.drop_nonfinite)
                    count_losses(found, k, before, _widened(raw, storage), storage.name)
                values = _widened(raw, storage)
                finite = np.isfinite(values)
                is_finite = bool(finite.all())
                if not is_finite:
                    found.nan[k] += int(np.count_nonzero(np.isnan(values)))
                    found.inf[k] += int(np.count_nonzero(np.isinf(values)))
                    if found.first_nonfinite[k] < 0:
                        found.first_nonfinite[k] = start + int(np.argmin(finite))
                    if spec.drop_nonfinite:
                        values[~finite] = 0
                magnitudes = np.abs(values)
                found.zeros[k] += int(np.count_nonzero(magnitudes == 0))
                # NaN is left out because its comparisons depend on the version of numpy.
                numbers = magnitudes if is_finite else magnitudes[~np.isnan(magnitudes)]
                found.max_abs[k] = max(found.max_abs[k], float(numbers.max(initial=0)))
                if spec.order != math.inf:
                    found.sums[tile], found.exponents[tile] = _tile_sum(magnitudes.astype(np.float64), spec.order)
                tile += 1
    return found


def count_losses(
    found: BlockSums, k: int, before: NDArray[np.float64], after: NDArray[Any], dtype: str, *, rounds: bool = False
) -> None:
    """Count for piece k what its type has lost of the values `before`: stored values, or sums that it `rounds`."""
    normal = math.ldexp(1.0, STORAGE[dtype].normal - 1)
    small, was_small = ((one != 0) & (np.abs(one) < normal) for one in (after, before))
    if rounds:
        was_small = small & (after == before)
    found.new_zeros[k] += int(np.count_nonzero((after == 0) & (before != 0)))
    found.new_subnormals[k] += int(np.count_nonzero(small)) - int(np.count_nonzero(was_small))


def _scale(
    raw: NDArray[np.uint8], storage: Storage, factor: float, limit: float, *, drop_nonfinite: bool
) -> NDArray[np.float64]:
    """Scale and clamp values in place. Returns them as they were, or zeros if they are multiplied by 0."""
    # The product of two float32 is exact in float64, so there is one rounding.
    values = _widened(raw, storage).astype(np.float64)
    if drop_nonfinite:
        values[~np.isfinite(values)] = 0
    bound, factor = storage.rounded(limit), float(storage.work.type(factor))
    before = values.copy() if factor else np.zeros_like(values)
    values *= factor
    # Not numpy's clip, whose zero has another sign in other versions if the limit is 0.
    values[values < -bound] = -bound
    values[values > bound] = bound
    raw[:] = storage.narrow_wide(values).view(np.uint8)
    return before


def _widened(raw: NDArray[np.uint8], storage: Storage) -> NDArray[Any]:
    # A tensor can have any address; its copy is aligned.
    return storage.widen(raw.copy().view(storage.bits))


def _tile_sum(magnitudes: NDArray[np.float64], order: float) -> tuple[float, int]:
    """The sum of a tile, or its norm if the order is above `MAX_SUM_ORDER`; and the tile's exponent."""
    found = _lane_sum(magnitudes, order)
    if order <= MAX_SUM_ORDER and is_in_range(found):
        return found, 0
    largest = float(magnitudes.max())
    if not 0 < largest < math.inf:
        return found, 0
    if order > MAX_SUM_ORDER:
        return largest * _lane_sum(magnitudes / largest, order) ** (1 / order), 0
    exponent = exponent_of(largest)
    return _lane_sum(magnitudes / math.ldexp(1.0, exponent), order), exponent


def _lane_sum(magnitudes: NDArray[np.float64], order: float) -> float:
    if order == 2:  # noqa: PLR2004 - this order and the next are those whose bits are promised
        powers = magnitudes * magnitudes
    elif order == 1:
        powers = magnitudes
    else:
        powers = magnitudes**order
    return lane_sum(powers)


def lane_sum(terms: NDArray[np.float64]) -> float:
    """The sum of the terms of a tile."""
    # A loop, because numpy promises no order of its reductions.
    lanes = np.zeros(LANES)
    for start in range(0, terms.size, LANES):
        row = terms[start : start + LANES]
        lanes[: row.size] += row
    return float(fold(lanes[None, :])[0])


def empty_histogram(pieces: Sequence[Piece]) -> BlockHistogram:
    """Counts of zero."""
    return BlockHistogram(int64s(sum(len(STORAGE[piece.dtype].bins) for piece in pieces)), float64s(len(pieces)))


def count_exponents(block: memoryview, pieces: Sequence[Piece]) -> BlockHistogram:
    """Count the values of the pieces of a block by exponent."""
    found = empty_histogram(pieces)
    counts, at = np.frombuffer(found.counts, np.int64), 0
    for k, piece in enumerate(pieces):
        bins = STORAGE[piece.dtype].bins
        for codes in _codes_of(block, piece):
            values = np.abs(STORAGE[piece.dtype].widen(codes))
            values = values[np.isfinite(values) & (values > 0)]
            exponents = np.frexp(values)[1] - bins.start
            counts[at : at + len(bins)] += np.bincount(exponents, minlength=len(bins))
            found.largest[k] = max(found.largest[k], float(values.max(initial=0)))
        at += len(bins)
    return found


def count_extremes(block: memoryview, pieces: Sequence[Piece]) -> Extremes:
    """Count subnormal and saturated values: without its sign, the code of a finite value grows with its magnitude."""
    found = Extremes(int64s(len(pieces)), int64s(len(pieces)))
    for k, piece in enumerate(pieces):
        storage, kind = STORAGE[piece.dtype], STORAGE[piece.dtype].bits.type
        normal, largest = map(kind, storage.bounds)
        for codes in _codes_of(block, piece):
            magnitudes = codes & kind((1 << (8 * storage.itemsize - 1)) - 1)
            # 0 - 1 is the largest number there is.
            found.subnormal[k] += int(np.count_nonzero(magnitudes - kind(1) < normal - kind(1)))
            found.saturated[k] += int(np.count_nonzero(magnitudes == largest))
    return found


def _codes_of(block: memoryview, piece: Piece) -> Iterator[NDArray[Any]]:
    """The stored codes of a piece, a tile at a time, so that what is made of them stays in the cache."""
    storage = STORAGE[piece.dtype]
    for start in range(0, piece.elements, TILE):
        size = min(TILE, piece.elements - start) * storage.itemsize
        yield np.frombuffer(block, np.uint8, size, piece.offset + start * storage.itemsize).copy().view(storage.bits)
