"""Canonical sums of a tensor whose values come in stretches that are cut anywhere, in any order."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gradtool.backends.storage import STORAGE
from gradtool.ops.passes import pieces_of
from gradtool.reduction import TILE
from gradtool.store.io.blocks import Block, Span

if TYPE_CHECKING:
    from gradtool.backends.protocol import Backend, Data
    from gradtool.ops.measurement import Measurement
    from gradtool.store.format.gradset import Selected


class Stitch:
    """Measures tensor `number` of a measurement: whole tiles at once, cut ones when their last part arrives."""

    def __init__(self, measurement: Measurement, number: int, selected: Selected) -> None:
        self._measurement = measurement
        self._number = number
        self._selected = selected
        self._itemsize = STORAGE[selected.tensor.dtype].itemsize
        self._lock = threading.Lock()
        # By tile: its parts so far, and how many elements are missing.
        self._cut: dict[int, tuple[memoryview, int]] = {}

    def add(self, start: int, view: memoryview, data: Data, backend: Backend) -> None:
        """Measure the stored values from element `start` on; `data` is the same memory where the backend works."""
        elements = len(view) // self._itemsize
        stop = start + elements
        first = min(-(-start // TILE) * TILE, stop)
        last = stop if stop == self._selected.tensor.elements else max(stop // TILE * TILE, first)
        if first < last:
            self._measure(first, last - first, data, (first - start) * self._itemsize, backend)
        for begin, end in ((start, first), (last, stop)):
            if begin < end:
                self._patch(begin, view[(begin - start) * self._itemsize : (end - start) * self._itemsize], backend)

    def _patch(self, start: int, view: memoryview, backend: Backend) -> None:
        tile = start // TILE
        size = min(TILE, self._selected.tensor.elements - tile * TILE)
        with self._lock:
            if tile not in self._cut:
                self._cut[tile] = (memoryview(bytearray(size * self._itemsize)), size)
            buffer, missing = self._cut.pop(tile)
            at = (start - tile * TILE) * self._itemsize
            buffer[at : at + len(view)] = view
            missing -= len(view) // self._itemsize
            if missing:
                self._cut[tile] = (buffer, missing)
                return
        self._measure(tile * TILE, size, buffer, 0, backend)

    def _measure(self, start: int, elements: int, data: Data, offset: int, backend: Backend) -> None:
        span = Span(self._number, self._selected.tensor.dtype, start, elements, offset)
        block = Block(self._selected.shard, 0, offset + elements * self._itemsize, [span])
        found = backend.tile_sums(data, pieces_of(block), self._measurement.spec)
        self._measurement.add(block, found)
