"""The backward pass of one layer, as tasks that each do a patch."""

from __future__ import annotations

import math
import threading
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gradtool import tuning
from gradtool.backends import NormSpec, Piece
from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError, DeviceMemoryError
from gradtool.ops.layernorm.patches import Options, Patches
from gradtool.ops.layernorm.stitch import Stitch, encoded
from gradtool.ops.passes import measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradtool.backends import Backend, BlockSums, Data, Patch
    from gradtool.ops.layernorm.layers import Layer
    from gradtool.ops.layernorm.patches import Floats
    from gradtool.ops.measurement import Measurement
    from gradtool.ops.passes import Session
    from gradtool.store.format.gradset import Selected
    from gradtool.store.fs import File
    from gradtool.store.io.channel import Channel
    from gradtool.store.io.workers import Task


class Place(NamedTuple):
    """Where an output goes: a tensor of a file, which has no file when nothing is to be written."""

    number: int
    selected: Selected
    file: File | None

    def write(self, channel: Channel, element: int, view: memoryview) -> None:
        """Put the stored values from an element on where they belong."""
        if self.file is not None:
            tensor = self.selected.tensor
            channel.write(self.file, tensor.begin + element * STORAGE[tensor.dtype].itemsize, view)


class _Rows:
    """What each row needs: its statistics, and the two means over its gradient."""

    def __init__(self, rows: int) -> None:
        self.mean, self.inv_std_dev, self.weighted, self.projected = (np.zeros(rows) for _ in range(4))


class _Columns:
    """The sums over rows of one stretch of columns; groups of rows may come in any order and are added in theirs."""

    def __init__(self, columns: int, groups: int, backend: Backend) -> None:
        # Those of the gradient of scale, and of bias.
        self.totals = np.zeros((2, columns))
        # By their first group: how many groups, and what was found in them.
        self._waiting: dict[int, tuple[int, Data]] = {}
        self._next, self._groups, self._backend = 0, groups, backend
        self._lock = threading.Lock()

    def add(self, first: int, groups: int, grads: Data) -> bool:
        """Take in some groups; whether they were the last that were missing."""
        with self._lock:
            self._waiting[first] = groups, grads
            while self._next in self._waiting:
                count, found = self._waiting.pop(self._next)
                self._backend.add_groups(self.totals, found)
                self._next += count
            return self._next == self._groups


class LayerPass:
    """One layer's pass over its inputs; `places` are those of the gradients of x, scale and bias."""

    def __init__(
        self, session: Session, options: Options, layer: Layer, places: Sequence[Place], measurement: Measurement
    ) -> None:
        self._session, self._options, self._layer, self._places = session, options, layer, places
        self._measurement = measurement
        self._stitch = Stitch(measurement, places[0].number, places[0].selected, session.backend)
        self._patches = Patches(options, layer)
        # Of wide rows; known before their gradients are worked out.
        self._rows: _Rows | None = None
        self._began = self._ended = 0.0
        needs_mean = not options.form.rms and not options.form.invertible
        self._computes_statistics = layer.inv_std_dev is None or (layer.mean is None and needs_mean)

    @property
    def seconds(self) -> float:
        """From its first patch to its last."""
        return self._ended - self._began

    @property
    def task_bytes(self) -> int:
        """What the tasks read, about."""
        return sum(one.tensor.nbytes for one in self._layer.inputs) * (2 if self._patches.is_wide else 1)

    @property
    def preparation_bytes(self) -> int:
        """What is read before them, about."""
        if not self._patches.is_wide:
            return 0
        statistics = (1 if self._options.form.rms else 2) if self._computes_statistics else 0
        return self._layer.y_grad.tensor.nbytes + self._layer.x.tensor.nbytes * (1 + statistics)

    def prepare(self) -> None:
        """Read rows that are longer than a patch for what their gradients will need."""
        if not self._patches.is_wide or not self._layer.rows:
            return
        self._began = perf_counter()
        backend, rows = self._session.backend, _Rows(self._layer.rows)

        def sums(patch: Patch) -> tuple[Floats]:
            return (backend.row_sums(patch.x, patch.x_dtype, 1, patch.columns, None),)

        def squares(patch: Patch) -> tuple[Floats]:
            return (backend.row_sums(patch.x, patch.x_dtype, 1, patch.columns, patch.mean),)

        if self._computes_statistics:
            if not self._options.form.rms:
                rows.mean = self._over_rows(rows, sums)[0] / self._layer.columns
            found = self._over_rows(rows, squares)[0]
            rows.inv_std_dev = self._inverted(
                found, lambda: measure(self._session, [self._layer.x], NormSpec(math.inf))
            )
        self._session.stream([partial(self._read_statistics, rows)], 0)
        weighted, projected = self._over_rows(rows, backend.layer_norm_sums, x_only=False)
        rows.weighted, rows.projected = self._means(weighted, projected)
        self._rows = rows

    def tasks(self) -> Iterator[Task]:
        """The gradients: of x patch by patch, of scale and bias when all rows of a stretch are done.

        Of wide rows, first those of x, a row after the other, so that little of it waits to be measured; then those of
        scale and bias, a stretch after the other, so that few sums are kept.
        """
        patches, is_wide, backend = self._patches, self._patches.is_wide, self._session.backend
        # Wide rows lie apart in the file.
        at_once = 1 if is_wide else backend.block_bytes // tuning.BLOCK_BYTES
        if is_wide:
            for group in range(patches.groups):
                for stretch in patches.stretches:
                    yield partial(self._differentiate, stretch, group, 1, None)
        for stretch in patches.stretches:
            columns = _Columns(stretch[1] - stretch[0], patches.groups, backend)
            if not patches.groups:
                yield partial(self._finish, stretch, columns)
            for group in range(0, patches.groups, at_once):
                groups = min(at_once, patches.groups - group)
                yield partial(self._differentiate, stretch, group, groups, columns, writes=not is_wide)

    def _differentiate(
        self,
        stretch: tuple[int, int],
        group: int,
        groups: int,
        columns: _Columns | None,
        channel: Channel,
        *,
        writes: bool = True,
    ) -> None:
        self._began = self._began or perf_counter()
        found = None
        try:
            found = self._gradients(stretch, group, groups, channel)
        except DeviceMemoryError:
            if groups == 1:
                raise
        if found is None:
            half = groups // 2
            self._differentiate(stretch, group, half, columns, channel, writes=writes)
            self._differentiate(stretch, group + half, groups - half, columns, channel, writes=writes)
            return
        out, held, grads = found
        if writes:
            start = self._patches.start(stretch, group)
            self._stitch.add(start, out, held)
            self._places[0].write(channel, start, out)
        if columns is not None and columns.add(group, groups, grads):
            self._finish(stretch, columns, channel)

    def _gradients(
        self, stretch: tuple[int, int], group: int, groups: int, channel: Channel
    ) -> tuple[memoryview, Data, Data]:
        """A patch's gradient of x, here and as the backend holds it; and those of scale and bias, as it has them."""
        backend = self._session.backend
        patch = self._patches.read(stretch, group, channel, groups=groups)
        patch = patch._replace(x=backend.to_device(patch.x), y_grad=backend.to_device(patch.y_grad))
        means = None
        if self._rows is None:
            patch = self._with_statistics(patch, group, channel)
        else:
            rows = slice(group, group + 1)
            patch = patch._replace(mean=self._rows.mean[rows], inv_std_dev=self._rows.inv_std_dev[rows])
            means = self._rows.weighted[rows], self._rows.projected[rows]
        dtype = self._layer.x.tensor.dtype
        out = channel.memory("x_grad", patch.rows * patch.columns * STORAGE[dtype].itemsize)
        held = backend.to_device(out, copies=False)
        grads = backend.layer_norm_grads(patch, means, held, dtype)
        backend.to_host(held, out)
        return out, held, grads

    def _finish(self, stretch: tuple[int, int], columns: _Columns, channel: Channel) -> None:
        for place, values in zip(self._places[1:], columns.totals, strict=False):
            view = encoded(values, place.selected.tensor.dtype)
            Stitch(self._measurement, place.number, place.selected, self._session.backend).add(stretch[0], view, view)
            place.write(channel, stretch[0], view)
        self._patches.forget()
        self._ended = perf_counter()
        self._began = self._began or self._ended

    def _with_statistics(self, patch: Patch, group: int, channel: Channel) -> Patch:
        """The patch with the mean and the inverse standard deviation of its rows, which are whole."""
        backend = self._session.backend
        mean = inv_std_dev = patch.mean
        if self._computes_statistics:
            if not self._options.form.rms:
                mean = backend.row_sums(patch.x, patch.x_dtype, patch.rows, patch.columns, None) / patch.columns
            squares = backend.row_sums(patch.x, patch.x_dtype, patch.rows, patch.columns, mean)
            piece = Piece(patch.x_dtype, 0, patch.rows * patch.columns)
            inv_std_dev = self._inverted(squares, lambda: backend.tile_sums(patch.x, [piece], NormSpec(math.inf)))
        own_mean, own_inv_std_dev = self._patches.statistics(group, patch.rows, channel)
        return patch._replace(
            mean=mean if own_mean is None else own_mean,
            inv_std_dev=inv_std_dev if own_inv_std_dev is None else own_inv_std_dev,
        )

    def _read_statistics(self, rows: _Rows, channel: Channel) -> None:
        mean, inv_std_dev = self._patches.statistics(0, self._layer.rows, channel)
        rows.mean = rows.mean if mean is None else mean
        rows.inv_std_dev = rows.inv_std_dev if inv_std_dev is None else inv_std_dev

    def _over_rows(
        self, rows: _Rows, sums: Callable[[Patch], Sequence[Floats]], *, x_only: bool = True
    ) -> list[Floats]:
        """Sums over wide rows, of which a patch has only a stretch; stretches are added in their order."""
        found: dict[tuple[int, int], Sequence[Floats]] = {}
        stretches = self._patches.stretches

        def work(number: int, row: int, channel: Channel) -> None:
            patch = self._patches.read(stretches[number], row, channel, x_only=x_only)
            own = slice(row, row + 1)
            found[number, row] = sums(patch._replace(mean=rows.mean[own], inv_std_dev=rows.inv_std_dev[own]))

        tasks = (partial(work, number, row) for number in range(len(stretches)) for row in range(self._layer.rows))
        nbytes = self._layer.x.tensor.nbytes + (0 if x_only else self._layer.y_grad.tensor.nbytes)
        self._session.stream(tasks, nbytes)
        totals = [np.zeros(self._layer.rows) for _ in found[0, 0]]
        for number in range(len(stretches)):
            for row in range(self._layer.rows):
                for total, part in zip(totals, found[number, row], strict=True):
                    total[row] += part[0]
        return totals

    def _inverted(self, squares: Floats, look: Callable[[], Measurement | BlockSums]) -> Floats:
        """The inverse standard deviation of rows, of which the squared distances from the mean are given.

        Where those are infinite, a `look` at X says whether X is, which is found and told of like every Inf.
        """
        x = self._layer.x
        if np.isinf(squares).any() and not look().inf.any():
            message = "is too large for its variance to be computed in float64; store its mean and inv_std_dev too"
            raise BadInputError(message, file=x.shard.path, tensor=x.tensor.name, code="range")
        with np.errstate(all="ignore"):
            inverted: Floats = 1.0 / np.sqrt(squares / self._layer.columns + self._options.norm_eps)
        if np.isinf(inverted).any():
            message = "has a row whose variance is 0; --norm-eps must be above 0"
            raise BadInputError(message, file=x.shard.path, tensor=x.tensor.name, code="range")
        return inverted

    def _means(self, weighted: Floats, projected: Floats) -> tuple[Floats, Floats]:
        columns = self._layer.columns
        return (np.zeros_like(weighted) if self._options.form.rms else weighted / columns), projected / columns
