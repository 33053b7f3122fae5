"""The passes of a layer-norm backward: wide rows are summed first, then gradients are computed patch by patch."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from gradtool import tuning
from gradtool.arrays import np
from gradtool.backends.protocol import NormSpec, Piece
from gradtool.backends.storage import STORAGE
from gradtool.engines.passes import Pass
from gradtool.errors import DeviceMemoryError
from gradtool.ops.layernorm.gradients import Gradients
from gradtool.ops.layernorm.patches import stored
from gradtool.ops.passes import Measure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends.protocol import Backend, Data, Patch
    from gradtool.engines.worker import Worker
    from gradtool.ops.call import Call
    from gradtool.ops.layernorm.patches import Floats, Patches
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.destination import Destination


class WideRows(NamedTuple):
    """What each wide row needs: the statistics that are computed, two means over its gradient; when summing began."""

    mean: Floats
    inv_std_dev: Floats
    weighted: Floats
    projected: Floats
    began: float


@dataclass(frozen=True, eq=False, repr=False)
class SumWideRows(Pass["Floats"]):
    """Sums the stretches of wide rows: of X, of its squared distances from the mean, or for the means over Y_grad."""

    title: ClassVar = "summing rows"

    patches: Patches
    what: Literal["values", "squares", "gradients"]
    mean: Floats
    inv_std_dev: Floats

    def tally(self) -> Floats:
        """Begin with zeros: for each stretch, one or two sums of each row."""
        return np.zeros((len(self.patches.stretches), 2, self.patches.layer.rows))

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[tuple[int, int]]:  # noqa: ARG002
        """Yield each stretch of each row."""
        return product(range(len(self.patches.stretches)), range(self.patches.layer.rows))

    def work(self, task: tuple[int, int], worker: Worker, tally: Floats) -> None:
        """Sum a stretch of a row."""
        (number, row), backend, patches = task, worker.backend, self.patches
        rows, stretch, x = slice(row, row + 1), patches.stretches[number], patches.layer.x
        if self.what == "gradients":
            with patches.read(stretch, row, worker) as patch:
                known = patch._replace(mean=self.mean[rows], inv_std_dev=self.inv_std_dev[rows])
                tally[number, :, rows] = backend.layer_norm_sums(patches.with_stored_statistics(known, row, worker))
            return
        columns, center = stretch[1] - stretch[0], self.mean[rows] if self.what == "squares" else None
        with stored(x, patches.start(stretch, row), columns, worker) as view:
            tally[number, 0, rows] = backend.row_sums(view, x.tensor.dtype, 1, columns, center)


def sum_wide_rows(call: Call, patches: Patches) -> WideRows | None:
    """Read wide rows for what their gradients need; None if a layer has none.

    The sums of stretches are added in order. So the chunks of a wide row are not simply added from the first to the
    last; docs/numerics.md has the whole order.
    """
    layer = patches.layer
    if not patches.is_wide or not layer.rows:
        return None
    began = perf_counter()
    mean = inv_std_dev = np.zeros(layer.rows)

    def sums(what: Literal["values", "squares", "gradients"]) -> Floats:
        read = [layer.x, layer.y_grad] if what == "gradients" else [layer.x]
        stretches = call.run(SumWideRows(read, NormSpec(), patches, what, mean, inv_std_dev))
        with np.errstate(all="ignore"):
            return sum(stretches, np.zeros((2, layer.rows)))

    if patches.lacks_statistics:
        if not patches.rms:
            mean = sums("values")[0] / layer.columns
        squares = sums("squares")[0]
        if np.isinf(squares).any() and not any(call.run(Measure([layer.x], NormSpec(math.inf))).inf):
            raise patches.variance_overflow()
        inv_std_dev = patches.inv_std_dev(squares)
    weighted, projected = sums("gradients") / layer.columns
    return WideRows(mean, inv_std_dev, np.zeros(layer.rows) if patches.rms else weighted, projected, began)


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
    """The patches of a layer, what its wide rows need, and where the gradients of X, scale and bias go.

    `inputs` are the places of X and Y_grad in a new file, where they stay. `number` is that of the first output among
    those of all layers.
    """

    patches: Patches
    rows: WideRows | None
    outputs: Sequence[Selected]
    inputs: Sequence[Selected | None]
    number: int

    @property
    def has_weights(self) -> bool:
        """Whether there are gradients that are sums over rows."""
        return self.patches.layer.scale is not None

    @property
    def reads(self) -> list[Selected]:
        """The tensors that are read; those of wide rows twice."""
        return self.patches.layer.inputs * (2 if self.patches.is_wide and self.has_weights else 1)

    def tasks(self, layer: int, backend: Backend) -> Iterator[Groups]:
        """Yield the tasks of the layer, which has this number.

        Wide rows are read twice: first for the gradient of X, row by row, so that few cut tiles wait to be measured;
        then for those of scale and bias, stretch by stretch, so that few sums are kept.
        """
        patches, is_wide = self.patches, self.patches.is_wide
        # A backend may like larger blocks; wide rows lie apart in the file.
        at_once = 1 if is_wide else max(1, backend.block_bytes // tuning.BLOCK_BYTES)
        if is_wide:
            for group, stretch in product(range(patches.groups), patches.stretches):
                yield Groups(layer, stretch, group, 1, sums=False)
        if self.has_weights or not is_wide:
            # Without any group, there are sums of none.
            for stretch, group in product(patches.stretches, range(0, max(1, patches.groups), at_once)):
                count = min(at_once, patches.groups - group)
                yield Groups(layer, stretch, group, count, writes=not is_wide, sums=self.has_weights)


@dataclass(frozen=True, eq=False, repr=False)
class Backward(Pass[Gradients]):
    """Computes the gradients of layers, writes them, and measures what is written."""

    title: ClassVar = "differentiating"

    plans: Sequence[LayerPlan]

    def tally(self) -> Gradients:
        """Begin with nothing."""
        return Gradients([plan.outputs for plan in self.plans])

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[Groups]:  # noqa: ARG002
        """Yield groups of rows, layer after layer."""
        for layer, plan in enumerate(self.plans):
            yield from plan.tasks(layer, backend)

    def work(self, task: Groups, worker: Worker, tally: Gradients) -> None:
        """Compute the gradients of some groups; of half of them, then the others, where the device has no room."""
        if not task.groups:
            self._finish(task, worker, tally)
            return
        plan, began = self.plans[task.layer], perf_counter()
        with ExitStack() as stack:
            # Not left to the engine: what comes after the gradients must not be repeated.
            try:
                view, data, sums = self._gradients(plan, task, worker, stack)
            except DeviceMemoryError:
                if task.groups == 1:
                    raise
            else:
                if task.writes:
                    start = plan.patches.start(task.stretch, task.first)
                    tally.assemble(plan.number, start, view, data, worker.backend)
                    _write(plan.outputs[0], start, view, worker)
                tally.spend(task.layer, began if plan.rows is None else plan.rows.began)
                if task.sums:
                    weights = tally.weight_sums(task.layer, task.stretch)
                    if weights.add(task.first, task.groups, sums, worker.backend) == plan.patches.groups:
                        self._finish(task, worker, tally)
                return
        for half in task.halves:
            self.work(half, worker, tally)

    def _finish(self, task: Groups, worker: Worker, tally: Gradients) -> None:
        """Write the gradients of scale and bias of a stretch, of which no row is missing."""
        plan, (begin, end) = self.plans[task.layer], task.stretch
        totals = tally.pop_weight_sums(task.layer, task.stretch)
        for number, output in enumerate(plan.outputs[1:]):
            values = totals[number * (end - begin) : (number + 1) * (end - begin)]
            view = worker.backend.narrow(values, output.tensor.dtype)
            tally.assemble(plan.number + 1 + number, begin, view, view, worker.backend)
            _write(output, begin, view, worker)
        plan.patches.forget()
        tally.spend(task.layer)

    def _gradients(
        self, plan: LayerPlan, task: Groups, worker: Worker, stack: ExitStack
    ) -> tuple[memoryview, Data, Data]:
        """Compute the gradient of X, in memory of the stack and where the backend works; and the sums of others."""
        patches, rows, backend = plan.patches, plan.rows, worker.backend
        patch = stack.enter_context(patches.read(task.stretch, task.first, worker, task.groups))
        inputs = patch.x, patch.y_grad
        patch = patch._replace(x=backend.to_device(patch.x), y_grad=backend.to_device(patch.y_grad))
        means: tuple[Floats, Floats] | None = None
        if rows is not None:
            row = slice(task.first, task.first + 1)
            patch = patch._replace(mean=rows.mean[row], inv_std_dev=rows.inv_std_dev[row])
            means = rows.weighted[row], rows.projected[row]
        elif patches.lacks_statistics:
            patch = _with_statistics(patches, patch, backend)
        patch = patches.with_stored_statistics(patch, task.first, worker)
        dtype = patches.layer.x.tensor.dtype
        view = stack.enter_context(worker.memory(patch.rows * patch.columns * STORAGE[dtype].itemsize))
        data = backend.to_device(view, copies=False)
        sums = backend.layer_norm_grads(patch, means, data, dtype)
        backend.to_host(data, view)
        if task.writes:
            # What stays in a new file is written from memory, and not read again; once, when the device had room.
            for place, values in zip(plan.inputs, inputs, strict=True):
                if place is not None:
                    _write(place, patches.start(task.stretch, task.first), values, worker)
        return view, data, sums


def _with_statistics(patches: Patches, patch: Patch, backend: Backend) -> Patch:
    """Compute the statistics of the rows of a patch, which are whole."""
    mean = patch.mean
    if not patches.rms:
        mean = backend.row_sums(patch.x, patch.x_dtype, patch.rows, patch.columns, None) / patch.columns
    squares = backend.row_sums(patch.x, patch.x_dtype, patch.rows, patch.columns, mean)
    if math.inf in squares:
        piece = Piece(patch.x_dtype, 0, patch.rows * patch.columns)
        # An Inf in X is found and reported like any other.
        if not any(backend.tile_sums(patch.x, [piece], NormSpec(math.inf)).inf):
            raise patches.variance_overflow()
    return patch._replace(mean=mean, inv_std_dev=patches.inv_std_dev(squares))


def _write(place: Selected, start: int, view: memoryview, worker: Worker) -> None:
    """Write the stored values of a tensor from element `start` on."""
    shard, tensor = place
    worker.destination.write_range(worker, shard, tensor.begin + start * STORAGE[tensor.dtype].itemsize, view)
