"""Counts of values by binary exponent: the bins of each storage type, and the reference in numpy.

The exponent e of a value is that of `math.frexp`: 2^(e-1) <= |x| < 2^e. Zeros, NaN and Inf are in no bin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradtool.arrays import float64s, int64s, np
from gradtool.backends import BlockHistogram, Piece
from gradtool.backends.storage import STORAGE
from gradtool.reduction import TILE

if TYPE_CHECKING:
    from collections.abc import Sequence


class Range(NamedTuple):
    """The exponents of a storage type: of its largest number, of its least normal one, and of its least one."""

    largest: int
    normal: int
    least: int


RANGES = {
    "F64": Range(1024, -1021, -1073),
    "F32": Range(128, -125, -148),
    "F16": Range(16, -13, -23),
    "BF16": Range(128, -125, -132),
    "F8_E4M3": Range(9, -5, -8),
    "F8_E5M2": Range(16, -13, -15),
}


def bins_of(dtype: str) -> range:
    """The exponents that values of a type are counted by, in order: those of float32 for all types but F64."""
    one = RANGES["F64" if dtype == "F64" else "F32"]
    return range(one.least, one.largest + 1)


def empty_histogram(pieces: Sequence[Piece]) -> BlockHistogram:
    """Counts of zero."""
    bins = sum(len(bins_of(piece.dtype)) for piece in pieces)
    return BlockHistogram(int64s(bins), float64s(len(pieces)))


def count_pieces(block: memoryview, pieces: Sequence[Piece]) -> BlockHistogram:
    """Count the values of the pieces of a block, a tile at a time."""
    found = empty_histogram(pieces)
    counts, at = np.frombuffer(found.counts, np.int64), 0
    for k, piece in enumerate(pieces):
        storage, bins = STORAGE[piece.dtype], bins_of(piece.dtype)
        for start in range(0, piece.elements, TILE):
            elements = min(TILE, piece.elements - start)
            raw = np.frombuffer(block, np.uint8, elements * storage.itemsize, piece.offset + start * storage.itemsize)
            values = np.abs(storage.widen(raw.copy().view(storage.bits)))
            values = values[np.isfinite(values) & (values > 0)]
            exponents = np.frexp(values)[1] - bins.start
            counts[at : at + len(bins)] += np.bincount(exponents, minlength=len(bins))
            found.largest[k] = max(found.largest[k], float(values.max(initial=0)))
        at += len(bins)
    return found
