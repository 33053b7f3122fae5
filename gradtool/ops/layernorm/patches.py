"""A layer cut into patches: groups of rows, or where rows are long stretches of one; and how a patch is read."""

from __future__ import annotations

import contextlib
from array import array
from typing import TYPE_CHECKING, NamedTuple

from gradtool import tuning
from gradtool.arrays import float64s, np
from gradtool.backends.protocol import Patch
from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gradtool.engines.worker import Worker
    from gradtool.ops.layernorm.forms import Form
    from gradtool.ops.layernorm.layers import Layer
    from gradtool.store.format.gradset import Selected

    Floats = NDArray[np.float64]


class Options(NamedTuple):
    """What the options say of every layer."""

    form: Form
    norm_eps: float
    scale_offset: float

    def computes_statistics(self, layer: Layer) -> bool:
        """Whether a layer lacks statistics that it needs."""
        needs_mean = not self.form.rms and not self.form.invertible
        return layer.inv_std_dev is None or (layer.mean is None and needs_mean)


class Patches:
    """The patches of a layer, by group of rows and stretch of columns."""

    def __init__(self, options: Options, layer: Layer) -> None:
        self._options, self._layer = options, layer
        columns = layer.columns
        self.stretches = [
            (at, min(at + tuning.PATCH_ELEMENTS, columns)) for at in range(0, columns, tuning.PATCH_ELEMENTS)
        ]
        self._height = max(1, min(tuning.PATCH_ROWS, tuning.PATCH_ELEMENTS // max(1, columns)))
        self.groups = -(-layer.rows // self._height)
        self._scales: tuple[tuple[int, int], array[float], array[float] | None] | None = None

    @property
    def is_wide(self) -> bool:
        """Whether a row is more than one patch; a group then is a single row."""
        return len(self.stretches) > 1

    def groups_at_once(self, block_bytes: int) -> int:
        """How many groups of rows a patch should have for a backend that likes blocks of that size."""
        # Wide rows lie apart in the file.
        return 1 if self.is_wide else max(1, block_bytes // tuning.BLOCK_BYTES)

    def start(self, stretch: tuple[int, int], group: int) -> int:
        """The element that a patch begins with."""
        return group * self._height * self._layer.columns + stretch[0]

    @contextlib.contextmanager
    def read(
        self, stretch: tuple[int, int], group: int, worker: Worker, *, groups: int = 1, x_only: bool = False
    ) -> Iterator[Patch]:
        """Read a patch of some groups, with zeros for the statistics of its rows; with `x_only`, only the input."""
        layer = self._layer
        rows, columns = min(groups * self._height, layer.rows - group * self._height), stretch[1] - stretch[0]
        start = self.start(stretch, group)
        scale, bias = (float64s(0), None) if x_only else self._scale_and_bias(stretch, worker)
        y_count = 0 if x_only else rows * columns
        with _stored(layer.x, start, rows * columns, worker) as x, _stored(layer.y_grad, start, y_count, worker) as y:
            yield Patch(
                rows=rows,
                columns=columns,
                height=self._height,
                x=x,
                x_dtype=layer.x.tensor.dtype,
                y_grad=y,
                y_grad_dtype=layer.y_grad.tensor.dtype,
                mean=float64s(rows),
                inv_std_dev=float64s(rows),
                scale=scale,
                bias=bias,
                rms=self._options.form.rms,
            )

    def with_stored_statistics(self, patch: Patch, group: int, worker: Worker) -> Patch:
        """A patch with the mean and the inverse standard deviation of its rows, where the files have them."""
        mean, inv_std_dev = self._layer.mean, self._layer.inv_std_dev
        if mean is not None:
            patch = patch._replace(mean=_values(mean, group * self._height, patch.rows, worker))
        if inv_std_dev is not None:
            patch = patch._replace(inv_std_dev=_values(inv_std_dev, group * self._height, patch.rows, worker))
        return patch

    def forget(self) -> None:
        """Free what is cached between patches."""
        self._scales = None

    def _scale_and_bias(self, stretch: tuple[int, int], worker: Worker) -> tuple[array[float], array[float] | None]:
        kept = self._scales
        if kept is not None and kept[0] == stretch:
            return kept[1], kept[2]
        layer, count = self._layer, stretch[1] - stretch[0]
        scale = array("d", [1.0]) * count
        if layer.scale is not None:
            scale = _values(layer.scale, stretch[0], count, worker, self._options.scale_offset)
        bias = None
        if self._options.form.invertible:
            bias = float64s(count) if layer.bias is None else _values(layer.bias, stretch[0], count, worker)
            self._refuse_zeros(scale, stretch)
        self._scales = stretch, scale, bias
        return scale, bias

    def _refuse_zeros(self, scale: array[float], stretch: tuple[int, int]) -> None:
        """Raise `BadInputError` for a scale that nothing can be divided by."""
        stored = self._layer.scale
        if stored is not None and 0.0 in scale:
            what = "plus --scale-offset is" if self._options.scale_offset else "is"
            raise BadInputError(
                f"{what} 0 in column {stretch[0] + scale.index(0.0)}, which the invertible form divides by",
                file=stored.shard.path,
                tensor=stored.tensor.name,
                code="zero-scale",
            )


def too_large(layer: Layer) -> BadInputError:
    """The error for finite values whose squares are beyond float64."""
    message = "variance overflows float64; store mean and inv_std_dev too"
    return BadInputError(message, file=layer.x.shard.path, tensor=layer.x.tensor.name, code="range")


def inverted(options: Options, layer: Layer, squares: Floats) -> Floats:
    """The inverse standard deviation of rows, from the sums of squared distances from their means."""
    with np.errstate(all="ignore"):
        inverse: Floats = 1.0 / np.sqrt(squares / layer.columns + options.norm_eps)
    if np.isinf(inverse).any():
        message = "has a row of variance 0; --norm-eps must be above 0"
        raise BadInputError(message, file=layer.x.shard.path, tensor=layer.x.tensor.name, code="range")
    return inverse


@contextlib.contextmanager
def _stored(selected: Selected, start: int, count: int, worker: Worker) -> Iterator[memoryview]:
    itemsize = STORAGE[selected.tensor.dtype].itemsize
    with worker.memory(count * itemsize) as view:
        worker.read(selected.shard, selected.tensor.begin + start * itemsize, view)
        yield view


def _values(selected: Selected, start: int, count: int, worker: Worker, offset: float = -0.0) -> array[float]:
    with _stored(selected, start, count, worker) as stored:
        return worker.backend.widen(stored, selected.tensor.dtype, offset)
