"""Values at the ends of what a storage type holds: subnormal ones, and those that are as large as any may be.

Both are questions about bits: without its sign, the code of a finite value grows with its magnitude.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradtool.arrays import int64s, np
from gradtool.backends.storage import STORAGE

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from gradtool.backends import Piece

# By storage type: the code of the smallest normal value, and that of the largest finite one.
BOUNDS = {
    "F64": (0x0010_0000_0000_0000, 0x7FEF_FFFF_FFFF_FFFF),
    "F32": (0x0080_0000, 0x7F7F_FFFF),
    "F16": (0x0400, 0x7BFF),
    "BF16": (0x0080, 0x7F7F),
    "F8_E4M3": (0x08, 0x7E),
    "F8_E5M2": (0x04, 0x7B),
}
# Elements at a time, so that what is made of them stays in the cache.
_CHUNK = 65_536


class Extremes(NamedTuple):
    """For each piece of a block, how many of its values are subnormal, and how many have the largest magnitude."""

    subnormal: array[int]
    saturated: array[int]


def count_extremes(block: memoryview, pieces: Sequence[Piece]) -> Extremes:
    """Count them in the pieces of a block."""
    found = Extremes(int64s(len(pieces)), int64s(len(pieces)))
    for k, piece in enumerate(pieces):
        storage, (normal, largest) = STORAGE[piece.dtype], BOUNDS[piece.dtype]
        kind = storage.bits.type
        for start in range(0, piece.elements, _CHUNK):
            elements = min(_CHUNK, piece.elements - start)
            at = piece.offset + start * storage.itemsize
            raw = np.frombuffer(block, np.uint8, elements * storage.itemsize, at)
            magnitudes = raw.copy().view(storage.bits) & kind((1 << (8 * storage.itemsize - 1)) - 1)
            # 0 - 1 is the largest number there is.
            found.subnormal[k] += int(np.count_nonzero(magnitudes - kind(1) < kind(normal - 1)))
            found.saturated[k] += int(np.count_nonzero(magnitudes == kind(largest)))
    return found
