"""The pass of a layer-norm backward: patch by patch, the gradient of X, and sums for those of scale and bias."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from gradtool.backends.protocol import NormSpec, Piece
from gradtool.backends.storage import STORAGE
from gradtool.errors import DeviceMemoryError
from gradtool.ops.layernorm.gradients import Gradients
from gradtool.ops.layernorm.patches import inverted, too_large
from gradtool.ops.passes import TensorPass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from gradtool.backends.protocol import Backend, Data, Patch
    from gradtool.engines.worker import Worker
    from gradtool.ops.layernorm.layers import Layer
    from gradtool.ops.layernorm.patches import Options, Patches
    from gradtool.ops.layernorm.placement import Place
    from gradtool.ops.layernorm.wide_rows import Rows
    from gradtool.store.format.gradset import Selected
    from gradtool.store.transaction.destination import Destination


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

    @property
    def halves(self) -> tuple[Groups, Groups]:
        """Half of the groups, and the others."""
        half = self.groups // 2
        return self._replace(groups=half), self._replace(first=self.first + half, groups=self.groups - half)


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
    def reads(self) -> list[Selected]:
        """The tensors that are read; those of wide rows twice."""
        return self.layer.inputs * (2 if self.patches.is_wide and self.has_sums else 1)

    def tasks(self, number: int, backend: Backend) -> Iterator[Groups]:
        """Yield the tasks of the layer, which has this number.

        Wide rows are read twice: first for the gradient of X, row by row, so that few cut tiles wait to be measured;
        then for those of scale and bias, stretch by stretch, so that few sums are kept.
        """
        patches, has_sums = self.patches, self.has_sums
        at_once = patches.groups_at_once(backend.block_bytes)
        if patches.is_wide:
            for group in range(patches.groups):
                for stretch in patches.stretches:
                    yield Groups(number, stretch, group, 1, sums=False)
        for stretch in patches.stretches if has_sums or not patches.is_wide else ():
            # Without any group, there are sums of none.
            for group in range(0, max(1, patches.groups), at_once):
                count = min(at_once, patches.groups - group)
                yield Groups(number, stretch, group, count, writes=not patches.is_wide, sums=has_sums)


@dataclass(frozen=True, eq=False, repr=False)
class Backward(TensorPass[Gradients]):
    """Computes the gradients of layers, writes them, and measures what is written."""

    title: ClassVar = "differentiating"

    options: Options
    plans: Sequence[LayerPlan]

    def tally(self) -> Gradients:
        """Begin with nothing."""
        return Gradients([[place.selected for place in plan.places] for plan in self.plans])

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[Groups]:  # noqa: ARG002
        """Yield groups of rows, layer after layer."""
        for number, plan in enumerate(self.plans):
            yield from plan.tasks(number, backend)

    def work(self, task: Groups, worker: Worker, tally: Gradients) -> None:
        """Compute the gradients of some groups; of half of them, then the others, where the device has no room."""
        if not task.groups:
            self._finish(task, worker, tally)
            return
        began = perf_counter()
        halves: Sequence[Groups] = ()
        with ExitStack() as stack:
            # Not left to the engine: what comes after the gradients must not be repeated.
            try:
                view, data, grads = self._gradients(task, worker, stack)
            except DeviceMemoryError:
                if task.groups == 1:
                    raise
                halves = task.halves
            else:
                patches, rows = self.plans[task.layer].patches, self.plans[task.layer].rows
                if task.writes:
                    start = patches.start(task.stretch, task.first)
                    tally.tiles[task.layer][0].add(start, view, data, worker.backend)
                    _write(self.plans[task.layer].places[0], start, view, worker)
                tally.spend(task.layer, began if rows is None else rows.began)
                if task.sums:
                    columns = tally.columns(task.layer, task.stretch, patches.groups)
                    if columns.add(task.first, task.groups, grads, worker.backend):
                        self._finish(task, worker, tally)
        for half in halves:
            self.work(half, worker, tally)

    def _finish(self, task: Groups, worker: Worker, tally: Gradients) -> None:
        """Write the gradients of scale and bias of a stretch, of which no row is missing."""
        plan, (begin, end) = self.plans[task.layer], task.stretch
        totals = tally.columns(task.layer, task.stretch, plan.patches.groups).totals
        outputs = zip(plan.places[1:], tally.tiles[task.layer][1:], strict=True)
        for number, (place, tiles) in enumerate(outputs):
            values = totals[number * (end - begin) : (number + 1) * (end - begin)]
            view = worker.backend.narrow(values, place.selected.tensor.dtype)
            tiles.add(begin, view, view, worker.backend)
            _write(place, begin, view, worker)
        tally.finish(task.layer, task.stretch)
        plan.patches.forget()
        tally.spend(task.layer)

    def _gradients(self, task: Groups, worker: Worker, stack: ExitStack) -> tuple[memoryview, Data, Data]:
        """Compute the gradient of X, in memory of the stack and where the backend works; and the sums of others."""
        (layer, patches, rows, *_), backend = self.plans[task.layer], worker.backend
        patch = stack.enter_context(patches.read(task.stretch, task.first, worker, groups=task.groups))
        inputs = patch.x, patch.y_grad
        patch = patch._replace(x=backend.to_device(patch.x), y_grad=backend.to_device(patch.y_grad))
        means: tuple[np.ndarray, np.ndarray] | None = None
        if rows is None:
            patch = self._with_statistics(layer, patch, backend)
        else:
            row = slice(task.first, task.first + 1)
            patch = patch._replace(mean=rows.mean[row], inv_std_dev=rows.inv_std_dev[row])
            means = rows.weighted[row], rows.projected[row]
        patch = patches.with_stored_statistics(patch, task.first, worker)
        dtype = layer.x.tensor.dtype
        view = stack.enter_context(worker.memory(patch.rows * patch.columns * STORAGE[dtype].itemsize))
        data = backend.to_device(view, copies=False)
        grads = backend.layer_norm_grads(patch, means, data, dtype)
        backend.to_host(data, view)
        if task.writes:
            # What stays in a new file is written from memory, and not read again; once, when the device had room.
            for place, stored in zip(self.plans[task.layer].inputs, inputs, strict=True):
                if place is not None:
                    _write(place, patches.start(task.stretch, task.first), stored, worker)
        return view, data, grads

    def _with_statistics(self, layer: Layer, patch: Patch, backend: Backend) -> Patch:
        """Compute the statistics of the rows of a patch, which are whole, where some are not in the files."""
        mean = patch.mean
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


def _write(place: Place, start: int, view: memoryview, worker: Worker) -> None:
    """Write the stored values of a tensor from element `start` on."""
    tensor = place.selected.tensor
    worker.destination.put(worker, place.shard, tensor.begin + start * STORAGE[tensor.dtype].itemsize, view)
