"""The backward pass of one layer, as tasks: a group of rows, or where rows are long a stretch of one, at a time."""

from __future__ import annotations

import math
import threading
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gradtool.backends import Patch
from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError, UsageError
from gradtool.ops.stitch import Stitch, encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from gradtool.ops.layers import Form, Layer
    from gradtool.ops.measurement import Measurement
    from gradtool.ops.passes import Session
    from gradtool.store.channel import Channel
    from gradtool.store.gradset import Selected
    from gradtool.store.stream import Task

    Floats = NDArray[np.float64]

# Elements of a patch. The sums over rows are taken by groups of rows of this size, so it is part of the result's bits.
_PATCH = 1 << 18
_MAX_ROWS = 1 << 14


class Options(NamedTuple):
    """What the arguments say of every layer."""

    form: Form
    norm_eps: float
    scale_offset: float

    def check(self) -> None:
        """Raise `UsageError` where the arguments make no sense."""
        if not 0 <= self.norm_eps < math.inf:
            raise UsageError(f"--norm-eps must be 0 or more and finite, not {self.norm_eps!r}")
        if not math.isfinite(self.scale_offset):
            raise UsageError(f"--scale-offset must be finite, not {self.scale_offset!r}")


class Place(NamedTuple):
    """Where an output goes: a tensor of a file, of which only the number is known when nothing is written."""

    number: int
    selected: Selected
    path: Path | None

    def write(self, channel: Channel, element: int, view: memoryview) -> None:
        """Put the stored values from an element on where they belong."""
        if self.path is not None:
            tensor = self.selected.tensor
            channel.write(self.path, tensor.begin + element * STORAGE[tensor.dtype].bits.itemsize, view)


class _Rows:
    """What each row needs: its statistics, and the two means over its gradient."""

    def __init__(self, rows: int) -> None:
        self.mean, self.inv_std_dev, self.weighted, self.projected = (np.zeros(rows) for _ in range(4))


class _Columns:
    """The sums over rows of one stretch of columns; groups of rows may come in any order and are added in theirs."""

    def __init__(self, columns: int, groups: int) -> None:
        self.scale_grad, self.bias_grad = np.zeros(columns), np.zeros(columns)
        self._waiting: dict[int, tuple[Floats, Floats]] = {}
        self._next, self._groups = 0, groups
        self._lock = threading.Lock()

    def add(self, group: int, grads: tuple[Floats, Floats]) -> bool:
        """Take in a group; whether it was the last that was missing."""
        with self._lock:
            self._waiting[group] = grads
            while self._next in self._waiting:
                scale_grad, bias_grad = self._waiting.pop(self._next)
                self.scale_grad += scale_grad
                self.bias_grad += bias_grad
                self._next += 1
            return self._next == self._groups


class LayerPass:
    """One layer's pass over its inputs; `places` are those of the gradients of x, scale and bias."""

    def __init__(
        self, session: Session, options: Options, layer: Layer, places: Sequence[Place], measurement: Measurement
    ) -> None:
        self._session, self._options, self._layer, self._places = session, options, layer, places
        self._measurement = measurement
        self._stitch = Stitch(measurement, places[0].number, places[0].selected, session.backend)
        columns = layer.columns
        self._stretches = [(at, min(at + _PATCH, columns)) for at in range(0, columns, _PATCH)]
        self._height = max(1, min(_MAX_ROWS, _PATCH // max(1, columns)))
        self._groups = -(-layer.rows // self._height)
        # Known before the gradients are worked out where a row is more than one patch.
        self._rows: _Rows | None = None
        self._scales: tuple[tuple[int, int], Floats, Floats | None] | None = None
        self._began = self._ended = 0.0
        needs_mean = not options.form.rms and not options.form.invertible
        self._computes_statistics = layer.inv_std_dev is None or (layer.mean is None and needs_mean)

    @property
    def seconds(self) -> float:
        """From its first patch to its last."""
        return self._ended - self._began

    def prepare(self) -> None:
        """Read rows that are longer than a patch for what their gradients will need."""
        if len(self._stretches) < 2 or not self._layer.rows:  # noqa: PLR2004
            return
        self._began = perf_counter()
        layer, form, backend = self._layer, self._options.form, self._session.backend
        rows = _Rows(layer.rows)

        def sums(patch: Patch) -> tuple[Floats]:
            return (backend.row_sums(patch.x, patch.x_dtype, 1, patch.columns, None),)

        def squares(patch: Patch) -> tuple[Floats]:
            return (backend.row_sums(patch.x, patch.x_dtype, 1, patch.columns, patch.mean),)

        if self._computes_statistics:
            if not form.rms:
                rows.mean = self._over_rows(rows, sums)[0] / layer.columns
            rows.inv_std_dev = self._inverted(self._over_rows(rows, squares)[0])
        self._session.stream([partial(self._read_statistics, rows)], 0)
        weighted, projected = self._over_rows(rows, backend.layer_norm_sums)
        rows.weighted, rows.projected = self._means(weighted, projected)
        self._rows = rows

    def tasks(self) -> Iterator[Task]:
        """The gradients: of x patch by patch, of scale and bias when all rows of a stretch are done.

        Where a row is more than one patch, first those of x, a row after the other, so that little of it waits to be
        measured; then those of scale and bias, a stretch after the other, so that few sums are kept.
        """
        is_wide = len(self._stretches) > 1
        if is_wide:
            for group in range(self._groups):
                for stretch in self._stretches:
                    yield partial(self._differentiate, stretch, group, None)
        for stretch in self._stretches:
            columns = _Columns(stretch[1] - stretch[0], self._groups)
            if not self._groups:
                yield partial(self._finish, stretch, columns)
            for group in range(self._groups):
                yield partial(self._differentiate, stretch, group, columns, writes=not is_wide)

    def _differentiate(
        self,
        stretch: tuple[int, int],
        group: int,
        columns: _Columns | None,
        channel: Channel,
        *,
        writes: bool = True,
    ) -> None:
        self._began = self._began or perf_counter()
        patch = self._patch(stretch, group, channel)
        if self._rows is None:
            patch = self._with_statistics(patch, group, channel)
            means = self._means(*self._session.backend.layer_norm_sums(patch))
        else:
            rows = slice(group, group + 1)
            patch = patch._replace(mean=self._rows.mean[rows], inv_std_dev=self._rows.inv_std_dev[rows])
            means = self._rows.weighted[rows], self._rows.projected[rows]
        dtype = self._layer.x.tensor.dtype
        out = channel.memory("x_grad", patch.rows * patch.columns * STORAGE[dtype].bits.itemsize)
        grads = self._session.backend.layer_norm_grads(patch, means, out, dtype)
        start = group * self._height * self._layer.columns + stretch[0]
        if writes:
            self._stitch.add(start, out)
            self._places[0].write(channel, start, out)
        if columns is not None and columns.add(group, grads):
            self._finish(stretch, columns, channel)

    def _finish(self, stretch: tuple[int, int], columns: _Columns, channel: Channel) -> None:
        for place, values in zip(self._places[1:], (columns.scale_grad, columns.bias_grad), strict=False):
            view = encoded(values, place.selected.tensor.dtype)
            Stitch(self._measurement, place.number, place.selected, self._session.backend).add(stretch[0], view)
            place.write(channel, stretch[0], view)
        self._scales = None
        self._ended = perf_counter()
        self._began = self._began or self._ended

    def _patch(self, stretch: tuple[int, int], group: int, channel: Channel) -> Patch:
        layer = self._layer
        first = group * self._height
        rows, columns = min(self._height, layer.rows - first), stretch[1] - stretch[0]
        start = first * layer.columns + stretch[0]
        scale, bias = self._scale_and_bias(stretch, channel)
        return Patch(
            rows=rows,
            columns=columns,
            x=_stored(layer.x, start, rows * columns, "x", channel),
            x_dtype=layer.x.tensor.dtype,
            y_grad=_stored(layer.y_grad, start, rows * columns, "y_grad", channel),
            y_grad_dtype=layer.y_grad.tensor.dtype,
            mean=np.zeros(rows),
            inv_std_dev=np.zeros(rows),
            scale=scale,
            bias=bias,
        )

    def _with_statistics(self, patch: Patch, group: int, channel: Channel) -> Patch:
        """The patch with the mean and the inverse standard deviation of its rows, which are whole."""
        layer, form, backend = self._layer, self._options.form, self._session.backend
        first = group * self._height
        mean = inv_std_dev = patch.mean
        if self._computes_statistics:
            if not form.rms:
                mean = backend.row_sums(patch.x, patch.x_dtype, patch.rows, patch.columns, None) / patch.columns
            inv_std_dev = self._inverted(backend.row_sums(patch.x, patch.x_dtype, patch.rows, patch.columns, mean))
        if layer.mean is not None:
            mean = _values(layer.mean, first, patch.rows, channel)
        if layer.inv_std_dev is not None:
            inv_std_dev = _values(layer.inv_std_dev, first, patch.rows, channel)
        return patch._replace(mean=mean, inv_std_dev=inv_std_dev)

    def _read_statistics(self, rows: _Rows, channel: Channel) -> None:
        if self._layer.mean is not None:
            rows.mean = _values(self._layer.mean, 0, self._layer.rows, channel)
        if self._layer.inv_std_dev is not None:
            rows.inv_std_dev = _values(self._layer.inv_std_dev, 0, self._layer.rows, channel)

    def _over_rows(self, rows: _Rows, sums: Callable[[Patch], Sequence[Floats]]) -> list[Floats]:
        """Sums over whole rows, of which a patch has only a stretch; stretches are added in their order."""
        found: dict[tuple[int, int], Sequence[Floats]] = {}

        def work(number: int, row: int, channel: Channel) -> None:
            patch = self._patch(self._stretches[number], row, channel)
            patch = patch._replace(mean=rows.mean[row : row + 1], inv_std_dev=rows.inv_std_dev[row : row + 1])
            found[number, row] = sums(patch)

        numbers = range(len(self._stretches))
        tasks = (partial(work, number, row) for number in numbers for row in range(self._layer.rows))
        self._session.stream(tasks, self._layer.x.tensor.nbytes + self._layer.y_grad.tensor.nbytes)
        totals = [np.zeros(self._layer.rows) for _ in found[0, 0]]
        for number in numbers:
            for row in range(self._layer.rows):
                for total, part in zip(totals, found[number, row], strict=True):
                    total[row] += part[0]
        return totals

    def _inverted(self, squares: Floats) -> Floats:
        x = self._layer.x
        if np.isinf(squares).any():
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

    def _scale_and_bias(self, stretch: tuple[int, int], channel: Channel) -> tuple[Floats, Floats | None]:
        kept = self._scales
        if kept is not None and kept[0] == stretch:
            return kept[1], kept[2]
        layer, form = self._layer, self._options.form
        count = stretch[1] - stretch[0]
        scale = _values(layer.scale, stretch[0], count, channel) + self._options.scale_offset
        bias = None
        if form.invertible:
            bias = np.zeros(count) if layer.bias is None else _values(layer.bias, stretch[0], count, channel)
            zeros = np.flatnonzero(scale == 0)
            if zeros.size:
                offset = " plus --scale-offset" if self._options.scale_offset else ""
                raise BadInputError(
                    f"{offset} is 0 in column {stretch[0] + zeros[0]}, which the invertible form divides by".lstrip(),
                    file=layer.scale.shard.path,
                    tensor=layer.scale.tensor.name,
                    code="zero-scale",
                )
        self._scales = stretch, scale, bias
        return scale, bias


def _stored(one: Selected, start: int, count: int, use: str, channel: Channel) -> memoryview:
    itemsize = STORAGE[one.tensor.dtype].bits.itemsize
    view = channel.memory(use, count * itemsize)
    channel.read(one.shard, one.tensor.begin + start * itemsize, view)
    return view


def _values(one: Selected, start: int, count: int, channel: Channel) -> Floats:
    storage = STORAGE[one.tensor.dtype]
    codes = np.frombuffer(_stored(one, start, count, "values", channel), storage.bits)
    values: Floats = storage.widen(codes).astype(np.float64)
    return values
