"""What a backward pass collects: sums of its results, and the gradients of scale and bias while rows are missing."""

from __future__ import annotations

import math
import threading
from time import perf_counter
from typing import TYPE_CHECKING

from gradtool.arrays import float64s
from gradtool.backends.protocol import NormSpec
from gradtool.backends.storage import STORAGE
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import pieces_of
from gradtool.reduction import TILE
from gradtool.store.io.blocks import Block, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.backends.protocol import Backend, Data
    from gradtool.store.format.gradset import Selected


class TileAssembler:
    """Measures tensor `number` of a measurement from stretches that are cut anywhere, in any order.

    Whole tiles are measured at once, cut ones when their last part arrives.
    """

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
                self._partial(begin, view[(begin - start) * self._itemsize : (end - start) * self._itemsize], backend)

    def _partial(self, start: int, view: memoryview, backend: Backend) -> None:
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
        self._measurement.add(block, backend.tile_sums(data, pieces_of(block), self._measurement.spec))


class Columns:
    """The sums over rows of a stretch of columns; groups of rows come in any order and are added in their own."""

    def __init__(self, columns: int, groups: int) -> None:
        # Of the gradient of scale, and then of bias.
        self.totals = float64s(2 * columns)
        # By their first group: how many groups, and their sums.
        self._waiting: dict[int, tuple[int, Data]] = {}
        self._next, self._groups = 0, groups
        self._lock = threading.Lock()

    def add(self, first: int, groups: int, grads: Data, backend: Backend) -> bool:
        """Add some groups; whether none is missing any more."""
        with self._lock:
            self._waiting[first] = groups, grads
            while self._next in self._waiting:
                count, waiting = self._waiting.pop(self._next)
                backend.add_groups(self.totals, waiting)
                self._next += count
            return self._next == self._groups


class Gradients:
    """What is collected of the outputs of layers."""

    def __init__(self, outputs: Sequence[Sequence[Selected]]) -> None:
        self.measurement = Measurement([output for each in outputs for output in each], NormSpec())
        numbers = iter(range(len(self.measurement)))
        # By layer, and output.
        self.tiles = [[TileAssembler(self.measurement, next(numbers), output) for output in each] for each in outputs]
        self._times = [(math.inf, 0.0) for _ in outputs]
        self._columns: dict[tuple[int, tuple[int, int]], Columns] = {}
        self._lock = threading.Lock()

    def columns(self, layer: int, stretch: tuple[int, int], groups: int) -> Columns:
        """Return the sums of a stretch of columns of a layer that has so many groups of rows."""
        with self._lock:
            key = layer, stretch
            if key not in self._columns:
                self._columns[key] = Columns(stretch[1] - stretch[0], groups)
            return self._columns[key]

    def finish(self, layer: int, stretch: tuple[int, int]) -> None:
        """Free the sums of a stretch."""
        with self._lock:
            self._columns.pop((layer, stretch), None)

    def spend(self, layer: int, began: float = math.inf) -> None:
        """Count the time from then until now as that of a layer."""
        with self._lock:
            now = perf_counter()
            self._times[layer] = min(self._times[layer][0], began, now), now

    @property
    def seconds(self) -> list[float]:
        """The time of each layer, from its first patch to its last."""
        return [max(0.0, ended - began) for began, ended in self._times]
