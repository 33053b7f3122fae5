"""Sorting networks: which values to compare, in which order, whatever the values are.

A network has no branches, so processors apply it to many columns of values at once. Any way to sort gives the same
bits, because values that are equal have the same bits here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@lru_cache(maxsize=64)
def network(count: int, dropped: int) -> NDArray[np.int32]:
    """Pairs (low, high), shape (n, 2), that sort `count` values where the `dropped` ends need not be in order.

    Each pair puts the smaller of two values at `low` and the larger at `high`. It is Batcher's merge exchange (Knuth,
    The Art of Computer Programming 3, algorithm 5.2.2M), without the pairs that none of the middle values depends on.
    """
    needed = set(range(dropped, count - dropped))
    kept = []
    for low, high in reversed(_merge_exchange(count)):
        if low in needed or high in needed:
            needed.update((low, high))
            kept.append((low, high))
    return np.array(kept[::-1], np.int32).reshape(-1, 2)


def _merge_exchange(count: int) -> list[tuple[int, int]]:
    pairs = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    step = top
    while step:
        stride, rest, distance = top, 0, step
        while True:
            pairs += [(i, i + distance) for i in range(count - distance) if i & step == rest]
            if stride == step:
                break
            distance, stride, rest = stride - step, stride // 2, step
        step //= 2
    return pairs
