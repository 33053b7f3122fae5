"""The pass of a layer-norm backward: patch by patch, the gradient of X, and sums for those of scale and bias."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends.protocol import NormSpec, Piece
from gradtool.backends.storage import STORAGE
from gradtool.errors import DeviceMemoryError
from gradtool.ops.layernorm.found import Gradients
from gradtool.ops.layernorm.patches import inverted, too_large

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from gradtool.backends.protocol import Backend, Data, Patch
    from gradtool.engines import Worker
    from gradtool.ops.layernorm.layers import Layer
    from gradtool.ops.layernorm.patches import Options, Patches
    from gradtool.ops.layernorm.placement import Place
    from gradtool.ops.layernorm.wide_rows import Rows
    from gradtool.store.transaction.destination import Destination


class Values(NamedTuple):
    """Stored values of an output from element `start` on; `data` is the same where the backend works."""

    start: int
    view: memoryview
    data: Data


class LayerPlan(NamedTuple):
    """A layer, its patches, what its wide rows need, and where the gradients of X, scale and bias go.

    `inputs` are the places of X and Y_grad in a new file, where they stay.
    """

    layer: Layer
    patches: Patches
    rows: Rows | None
    places: Sequence[Place]
    inputs: tuple[Place | None, Place | None]

    @property
    def has_sums(self) -> bool:
        """Whether it has weights, whose gradients are sums over rows."""
        return self.layer.scale is not None

    @property
    def nbytes(self) -> int:
        """What is read of it, about."""
        times = 2 if self.patches.is_wide and self.has_sums else 1
        return sum(one.tensor.nbytes for one in self.layer.inputs) * times


@dataclass(frozen=True)
class Backward:
    """Computes the gradients of layers, writes them, and measures what is written."""

    options: Options
    plans: Sequence[LayerPlan]

    @property
    def title(self) -> str:
        """As a progress bar shows it."""
        return "differentiating"

    def empty(self) -> Gradients:
        """Of all layers."""
        return Gradients([place.selected for plan in self.plans for place in plan.places], len(self.plans))

    def nbytes(self, destination: Destination) -> int:
        """Bytes of the layers, and of what is copied beside them."""
        return sum(plan.nbytes for plan in self.plans) + destination.nbytes(())

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[Callable[[Worker, Gradients], None]]:  # noqa: ARG002
        """Layer after layer."""
        firsts = accumulate((len(plan.places) for plan in self.plans), initial=0)
        for number, (plan, first_output) in enumerate(zip(self.plans, firsts, strict=False)):
            yield from LayerTasks(self.options, plan, number, first_output).each(backend)


@dataclass(frozen=True)
class LayerTasks:
    """The tasks of one layer: its number in the pass, and that of its first output."""

    options: Options
    plan: LayerPlan
    number: int
    first_output: int

    def each(self, backend: Backend) -> Iterator[Callable[[Worker, Gradients], None]]:
        """The gradient of X patch by patch, those of scale and bias when all rows of a stretch are done.

        Wide rows are read twice: first for the gradient of X, row by row, so that few cut tiles wait to be measured;
        then for those of scale and bias, stretch by stretch, so that few sums are kept.
        """
        patches, has_sums = self.plan.patches, self.plan.has_sums
        at_once = patches.groups_at_once(backend.block_bytes)
        if patches.is_wide:
            for group in range(patches.groups):
                for stretch in patches.stretches:
                    yield OnPatch(self, stretch, group, 1, sums=False)
        for stretch in patches.stretches if has_sums or not patches.is_wide else ():
            if not patches.groups:
                yield partial(self.finish, stretch)
            for group in range(0, patches.groups, at_once):
                groups = min(at_once, patches.groups - group)
                yield OnPatch(self, stretch, group, groups, writes=not patches.is_wide, sums=has_sums)

    def finish(self, stretch: tuple[int, int], worker: Worker, found: Gradients) -> None:
        """Write the gradients of scale and bias of a stretch, of which no row is missing."""
        totals, count = found.columns(self.number, stretch, self.plan.patches.groups).totals, stretch[1] - stretch[0]
        for number, place in enumerate(self.plan.places[1:]):
            values = totals[number * count : (number + 1) * count]
            view = worker.backend.narrow(values, place.selected.tensor.dtype)
            self.write(number + 1, Values(stretch[0], view, view), worker, found)
        found.finish(self.number, stretch)
        self.plan.patches.forget()
        found.spend(self.number)

    def write(self, output: int, values: Values, worker: Worker, found: Gradients) -> None:
        """Measure and write a part of an output: 0 for the gradient of X, 1 for that of scale, 2 for that of bias."""
        found.stitches[self.first_output + output].add(values.start, values.view, values.data, worker.backend)
        shard, selected = self.plan.places[output]
        begin = selected.tensor.begin + values.start * STORAGE[selected.tensor.dtype].itemsize
        worker.destination.put(worker.channel, shard, begin, values.view)

    def keep(self, patch: Patch, start: int, worker: Worker) -> None:
        """Write the values that were read, from element `start` on, where they stay in a new file."""
        for place, view in zip(self.plan.inputs, (patch.x, patch.y_grad), strict=True):
            if place is not None:
                tensor = place.selected.tensor
                begin = tensor.begin + start * STORAGE[tensor.dtype].itemsize
                worker.destination.put(worker.channel, place.shard, begin, view)

    def with_statistics(self, patch: Patch, backend: Backend) -> Patch:
        """A patch with the statistics of its rows, which are whole, computed where some are not in the files."""
        layer, mean = self.plan.layer, patch.mean
        if not self.options.computes_statistics(layer):
            return patch
        if not self.options.form.rms:
            mean = backend.row_sums(patch.x, patch.x_dtype, patch.rows, patch.columns, None) / patch.columns
        squares = backend.row_sums(patch.x, patch.x_dtype, patch.rows, patch.columns, mean)
        if math.inf in squares:
            piece = Piece(patch.x_dtype, 0, patch.rows * patch.columns)
            # An Inf in X is found and reported like any other.
            if not any(backend.tile_sums(patch.x, [piece], NormSpec(math.inf)).inf):
                raise too_large(layer)
        return patch._replace(mean=mean, inv_std_dev=inverted(self.options, layer, squares))


@dataclass(frozen=True)
class OnPatch:
    """A task that works on some groups of rows; on half of them, then the others, where the device has no room."""

    of: LayerTasks
    stretch: tuple[int, int]
    group: int
    groups: int
    writes: bool = True
    sums: bool = True

    def __call__(self, worker: Worker, found: Gradients) -> None:
        """Work on the groups."""
        began, halves = perf_counter(), False
        try:
            x_grad, data, grads = self._gradients(worker)
        except DeviceMemoryError:
            if self.groups == 1:
                raise
            halves = True
        if halves:
            half = self.groups // 2
            OnPatch(self.of, self.stretch, self.group, half, self.writes, self.sums)(worker, found)
            rest = self.group + half, self.groups - half
            OnPatch(self.of, self.stretch, *rest, self.writes, self.sums)(worker, found)
            return
        patches, number = self.of.plan.patches, self.of.number
        if self.writes:
            start = patches.start(self.stretch, self.group)
            self.of.write(0, Values(start, x_grad, data), worker, found)
        rows = self.of.plan.rows
        found.spend(number, began if rows is None else rows.began)
        if self.sums:
            columns = found.columns(number, self.stretch, patches.groups)
            if columns.add(self.group, self.groups, grads, worker.backend):
                self.of.finish(self.stretch, worker, found)

    def _gradients(self, worker: Worker) -> tuple[memoryview, Data, Data]:
        """The gradient of X, in memory and where the backend works; and the sums for those of scale and bias."""
        (layer, patches, rows, *_), backend = self.of.plan, worker.backend
        patch = patches.read(self.stretch, self.group, worker, groups=self.groups)
        if self.writes:
            self.of.keep(patch, patches.start(self.stretch, self.group), worker)
        patch = patch._replace(x=backend.to_device(patch.x), y_grad=backend.to_device(patch.y_grad))
        means: tuple[np.ndarray, np.ndarray] | None = None
        if rows is None:
            patch = self.of.with_statistics(patch, backend)
        else:
            own = slice(self.group, self.group + 1)
            patch = patch._replace(mean=rows.mean[own], inv_std_dev=rows.inv_std_dev[own])
            means = rows.weighted[own], rows.projected[own]
        patch = patches.with_stored_statistics(patch, self.group, worker)
        dtype = layer.x.tensor.dtype
        out = worker.channel.memory("x_grad", patch.rows * patch.columns * STORAGE[dtype].itemsize)
        data = backend.to_device(out, copies=False)
        grads = backend.layer_norm_grads(patch, means, data, dtype)
        backend.to_host(data, out)
        return out, data, grads
