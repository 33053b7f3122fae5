"""The pass of a layer-norm backward: it computes gradients patch by patch, writes them, and measures what it writes."""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from gradtool import tuning
from gradtool.arrays import float64s
from gradtool.backends.storage import STORAGE
from gradtool.backends.values import NormSpec
from gradtool.engines.passes import Pass
from gradtool.errors import DeviceMemoryError
from gradtool.ops.passes import Measurement, pieces_of
from gradtool.reduction import TILE
from gradtool.store.io.blocks import Block, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends.protocol import Backend
    from gradtool.backends.values import Data
    from gradtool.engines.worker import Worker
    from gradtool.ops.layernorm.patches import Patches
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.destination import Destination


class Groups(NamedTuple):
    """A task: some `groups` of rows of a layer, from number `first` on, in a stretch of columns.

    It writes the gradient of X, or adds to the sums for those of scale and bias, or does both.
    """

    layer: int
    stretch: tuple[int, int]
    first: int
    groups: int
    writes: bool = True
    sums: bool = True


@dataclass(frozen=True, eq=False, repr=False)
class Backward(Pass["Gradients"]):
    """Computes the gradients of layers, writes them, and measures what is written."""

    title: ClassVar = "differentiating"

    layers: Sequence[Patches]

    def tally(self) -> Gradients:
        return Gradients([patches.outputs for patches in self.layers], [patches.began for patches in self.layers])

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[Groups]:  # noqa: ARG002
        """Yield groups of rows, layer after layer.

        Wide rows are read twice: first for the gradient of X, row by row, so that few cut tiles wait to be measured;
        then for those of scale and bias, stretch by stretch, so that few sums are in memory.
        """
        for layer, patches in enumerate(self.layers):
            # A backend may like larger blocks; wide rows lie apart in the file.
            size = 1 if patches.is_wide else max(1, backend.block_bytes // tuning.BLOCK_BYTES)
            if patches.is_wide:
                for group, stretch in product(range(patches.groups), patches.stretches):
                    yield Groups(layer, stretch, group, 1, sums=False)
            if patches.has_weights or not patches.is_wide:
                # Without any group, the sums are zeros.
                for stretch, group in product(patches.stretches, range(0, max(1, patches.groups), size)):
                    count = min(size, patches.groups - group)
                    yield Groups(layer, stretch, group, count, writes=not patches.is_wide, sums=patches.has_weights)

    def work(self, task: Groups, worker: Worker, tally: Gradients) -> None:
        """Compute the gradients of some groups; half of them at a time where the device has no room."""
        if not task.groups:
            self._finish(task, worker, tally)
            return
        patches, began = self.layers[task.layer], perf_counter()
        with ExitStack() as stack:
            # The engine must not halve the task: it would repeat what comes after the gradients.
            try:
                view, data, sums = self._gradients(task, worker, stack)
            except DeviceMemoryError:
                if task.groups == 1:
                    raise
            else:
                if task.writes:
                    start = patches.start(task.stretch, task.first)
                    tally.assemble(patches.outputs[0], start, view, data, worker.backend)
                    _write(patches.outputs[0], start, view, worker)
                tally.spend(task.layer, began)
                if task.sums:
                    weights = tally.weight_sums(task.layer, task.stretch)
                    if weights.add(task.first, task.groups, sums, worker.backend) == patches.groups:
                        self._finish(task, worker, tally)
                return
        half = task.groups // 2
        self.work(task._replace(groups=half), worker, tally)
        self.work(task._replace(first=task.first + half, groups=task.groups - half), worker, tally)

    def _finish(self, task: Groups, worker: Worker, tally: Gradients) -> None:
        """Write the gradients of scale and bias of a stretch, of which no row is missing."""
        patches, (begin, end) = self.layers[task.layer], task.stretch
        totals = tally.weight_sums(task.layer, task.stretch).totals
        tally.forget_weight_sums(task.layer, task.stretch)
        for number, output in enumerate(patches.outputs[1:]):
            values = totals[number * (end - begin) : (number + 1) * (end - begin)]
            view = worker.backend.narrow(values, output.tensor.dtype)
            tally.assemble(output, begin, view, view, worker.backend)
            _write(output, begin, view, worker)
        patches.forget()
        tally.spend(task.layer, math.inf)

    def _gradients(self, task: Groups, worker: Worker, stack: ExitStack) -> tuple[memoryview, Data, Data]:
        """Compute the gradient of X, in memory of the stack and of the backend, and sums for scale and bias."""
        patches, backend = self.layers[task.layer], worker.backend
        patch = stack.enter_context(patches.read(task.stretch, task.first, worker, task.groups))
        inputs = patch.x, patch.y_grad
        patch = patch._replace(x=backend.to_device(patch.x), y_grad=backend.to_device(patch.y_grad))
        patch = patches.with_statistics(patch, backend)
        dtype = patches.layer.x.tensor.dtype
        view = stack.enter_context(worker.memory(patch.rows * patch.columns * STORAGE[dtype].itemsize))
        data = backend.to_device(view, copies=False)
        sums = backend.layer_norm_grads(patch, patches.means(task.first), data, dtype)
        backend.to_host(data, view)
        if task.writes:
            # Inputs that stay in a new file are written from memory, and not read again; only once the device had room.
            for place, values in zip(patches.inputs, inputs, strict=True):
                if place is not None:
                    _write(place, patches.start(task.stretch, task.first), values, worker)
        return view, data, sums


def _write(place: Selected, start: int, view: memoryview, worker: Worker) -> None:
    """Write the stored values of a tensor from element `start` on."""
    shard, tensor = place
    worker.destination.write_range(worker, shard, tensor.begin + start * STORAGE[tensor.dtype].itemsize, view)


class Gradients(Measurement):
    """The gradients of some layers, which come in stretches cut anywhere, in any order; and the time of each layer.

    Whole tiles are measured at once, cut tiles when their last part arrives. `outputs` are the tensors of each layer,
    and `began` is when work on it began, infinite if it has not.
    """

    def __init__(self, outputs: Sequence[Sequence[Selected]], began: Sequence[float]) -> None:
        self.selected = [output for tensors in outputs for output in tensors]
        super().__init__(self.selected, NormSpec())
        self._numbers = {output: number for number, output in enumerate(self.selected)}
        self._times = [(time, 0.0) for time in began]
        # By tile: its parts so far, and how many bytes are missing.
        self._partial: dict[Span, tuple[memoryview, int]] = {}
        # By number of the layer, and stretch of columns.
        self._weight_sums: dict[tuple[int, tuple[int, int]], WeightSums] = {}

    def assemble(self, output: Selected, start: int, view: memoryview, data: Data, backend: Backend) -> None:
        """Measure the stored values of a tensor from element `start` on; `data` is `view` where the backend works."""
        number, tensor, itemsize = self._numbers[output], output.tensor, STORAGE[output.tensor.dtype].itemsize
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

    def weight_sums(self, layer: int, stretch: tuple[int, int]) -> WeightSums:
        """Return the sums for a stretch of columns of a layer."""
        with self._lock:
            if (layer, stretch) not in self._weight_sums:
                self._weight_sums[layer, stretch] = WeightSums(stretch[1] - stretch[0])
            return self._weight_sums[layer, stretch]

    def forget_weight_sums(self, layer: int, stretch: tuple[int, int]) -> None:
        """Free the sums for a stretch, which are complete."""
        with self._lock:
            del self._weight_sums[layer, stretch]

    def spend(self, layer: int, began: float) -> None:
        """Count the time from then until now as that of a layer."""
        with self._lock:
            self._times[layer] = min(self._times[layer][0], began), perf_counter()

    @property
    def seconds(self) -> list[float]:
        """The time of each layer, from its first patch to its last."""
        return [max(0.0, ended - began) for began, ended in self._times]


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
