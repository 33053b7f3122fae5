"""What a backward pass finds: sums of its results, and the gradients of scale and bias while rows are still missing."""

from __future__ import annotations

import math
import threading
from time import perf_counter
from typing import TYPE_CHECKING

from gradtool.arrays import float64s
from gradtool.backends.protocol import NormSpec
from gradtool.ops.layernorm.stitch import Stitch
from gradtool.ops.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.backends.protocol import Backend, Data
    from gradtool.store.format.gradset import Selected


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
                count, found = self._waiting.pop(self._next)
                backend.add_groups(self.totals, found)
                self._next += count
            return self._next == self._groups


class Gradients:
    """What is found in the outputs of layers; each part of the work has whole layers."""

    def __init__(self, outputs: Sequence[Selected], layers: int) -> None:
        self.measurement = Measurement(outputs, NormSpec())
        self.stitches = [Stitch(self.measurement, number, one) for number, one in enumerate(outputs)]
        self._times = [(math.inf, 0.0)] * layers
        self._columns: dict[tuple[int, tuple[int, int]], Columns] = {}
        self._lock = threading.Lock()

    def columns(self, layer: int, stretch: tuple[int, int], groups: int) -> Columns:
        """The sums of a stretch of columns of a layer that has so many groups of rows."""
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
        """Of each layer, from its first patch to its last."""
        return [max(0.0, ended - began) for began, ended in self._times]
