"""What a backward pass collects: sums of its results, and the gradients of scale and bias while rows are missing."""

from __future__ import annotations

import math
import threading
from time import perf_counter
from typing import TYPE_CHECKING

from gradtool.arrays import float64s
from gradtool.backends.protocol import NormSpec
from gradtool.backends.storage import STORAGE
from gradtool.ops.passes import Measurement, pieces_of
from gradtool.reduction import TILE
from gradtool.store.io.blocks import Block, Span

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from gradtool.backends.protocol import Backend, Data
    from gradtool.store.format.gradset import Selected


class TileAssembler(Measurement):
    """A measurement of tensors that come in stretches cut anywhere, in any order.

    Whole tiles are measured at once, cut ones when their last part arrives.
    """

    def __init__(self, selected: Sequence[Selected]) -> None:
        super().__init__(selected, NormSpec())
        self.selected = selected
        # By tile: its parts so far, and how many bytes are missing.
        self._partial: dict[Span, tuple[memoryview, int]] = {}

    def assemble(self, number: int, start: int, view: memoryview, data: Data, backend: Backend) -> None:
        """Measure the stored values of a tensor from element `start` on; `data` is `view` where the backend works."""
        tensor = self.selected[number].tensor
        itemsize = STORAGE[tensor.dtype].itemsize
        stop = start + len(view) // itemsize
        first = min(-(-start // TILE) * TILE, stop)
        last = stop if stop == tensor.elements else max(stop // TILE * TILE, first)
        if first < last:
            self._measure(Span(number, tensor.dtype, first, last - first, (first - start) * itemsize), data, backend)
        for begin, end in ((start, first), (last, stop)):
            if begin < end:
                part, at = view[(begin - start) * itemsize : (end - start) * itemsize], begin // TILE * TILE
                tile = Span(number, tensor.dtype, at, min(TILE, tensor.elements - at), 0)
                whole = self._with_part(tile, (begin - at) * itemsize, part, tile.elements * itemsize)
                if whole is not None:
                    self._measure(tile, whole, backend)

    def _with_part(self, tile: Span, at: int, part: memoryview, nbytes: int) -> memoryview | None:
        """Copy a part of a tile of that many bytes to byte `at` of it; return the tile once no part is missing."""
        with self._lock:
            if tile not in self._partial:
                self._partial[tile] = memoryview(bytearray(nbytes)), nbytes
            data, missing = self._partial.pop(tile)
            data[at : at + len(part)] = part
            if missing == len(part):
                return data
            self._partial[tile] = data, missing - len(part)
        return None

    def _measure(self, span: Span, data: Data, backend: Backend) -> None:
        end = span.offset + span.elements * STORAGE[span.dtype].itemsize
        block = Block(self.selected[span.tensor].shard, 0, end, [span])
        self.add(block, backend.tile_sums(data, pieces_of(block), self.spec))


class WeightSums:
    """The sums over rows for a stretch of columns; groups of rows come in any order and are added in their own."""

    def __init__(self, columns: int) -> None:
        # For the gradient of scale, and then of bias.
        self.totals = float64s(2 * columns)
        # By their first group: how many groups, and their sums.
        self._waiting: dict[int, tuple[int, Data]] = {}
        self._next = 0
        self._lock = threading.Lock()

    def add(self, first: int, groups: int, sums: Data, backend: Backend) -> int:
        """Add the sums of some groups; return how many groups have been added, from the first one on."""
        with self._lock:
            self._waiting[first] = groups, sums
            while self._next in self._waiting:
                count, waiting = self._waiting.pop(self._next)
                backend.add_groups(self.totals, waiting)
                self._next += count
            return self._next


class Gradients(TileAssembler):
    """The results of some layers, measured; the sums for those that are not complete; and the time of each layer."""

    def __init__(self, outputs: Sequence[Sequence[Selected]]) -> None:
        super().__init__([output for of_layer in outputs for output in of_layer])
        self._times = [(math.inf, 0.0) for _ in outputs]
        # By number of the layer, and stretch of columns.
        self._sums: dict[tuple[int, tuple[int, int]], WeightSums] = {}

    def weight_sums(self, layer: int, stretch: tuple[int, int]) -> WeightSums:
        """Return the sums for a stretch of columns of a layer."""
        with self._lock:
            if (layer, stretch) not in self._sums:
                self._sums[layer, stretch] = WeightSums(stretch[1] - stretch[0])
            return self._sums[layer, stretch]

    def pop_weight_sums(self, layer: int, stretch: tuple[int, int]) -> array[float]:
        """Return the totals of a stretch, which are needed no more."""
        totals = self.weight_sums(layer, stretch).totals
        with self._lock:
            del self._sums[layer, stretch]
        return totals

    def spend(self, layer: int, began: float = math.inf) -> None:
        """Count the time from then until now as that of a layer."""
        with self._lock:
            self._times[layer] = min(self._times[layer][0], began), perf_counter()

    @property
    def seconds(self) -> list[float]:
        """The time of each layer, from its first patch to its last."""
        return [max(0.0, ended - began) for began, ended in self._times]
