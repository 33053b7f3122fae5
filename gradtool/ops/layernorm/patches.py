"""A layer cut into patches: groups of rows, or where rows are long stretches of one; and how a patch is read."""

from __future__ import annotations

import contextlib
from array import array
from typing import TYPE_CHECKING

from gradtool import tuning
from gradtool.arrays import float64s, np
from gradtool.backends.protocol import Patch
from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError, option, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gradtool.engines.worker import Worker
    from gradtool.ops.layernorm.layers import Layer
    from gradtool.options import LayerNormOptions
    from gradtool.store.format.gradset import Selected

    Floats = NDArray[np.float64]


class Patches:
    """The patches of a layer, by group of rows and stretch of columns."""

    def __init__(self, options: LayerNormOptions, layer: Layer) -> None:
        self._options, self.layer = options, layer
        self.rms = options.kind == "rmsnorm"
        columns = layer.columns
        self.stretches = [
            (at, min(at + tuning.PATCH_ELEMENTS, columns)) for at in range(0, columns, tuning.PATCH_ELEMENTS)
        ]
        self._height = max(1, min(tuning.PATCH_ROWS, tuning.PATCH_ELEMENTS // max(1, columns)))
        self.groups = -(-layer.rows // self._height)
        # Of the stretch that was read last.
        self._weights: tuple[tuple[int, int], array[float], array[float] | None] | None = None

    @property
    def is_wide(self) -> bool:
        """Whether a row is more than one patch; a group then is a single row."""
        return len(self.stretches) > 1

    @property
    def lacks_statistics(self) -> bool:
        """Whether statistics that the layer needs are not in the files."""
        needs_mean = not self.rms and not self._options.invertible
        return self.layer.inv_std_dev is None or (self.layer.mean is None and needs_mean)

    def start(self, stretch: tuple[int, int], group: int) -> int:
        """Return the element that a patch begins with."""
        return group * self._height * self.layer.columns + stretch[0]

    @contextlib.contextmanager
    def read(self, stretch: tuple[int, int], group: int, worker: Worker, groups: int = 1) -> Iterator[Patch]:
        """Read a patch of some groups, with zeros for the statistics of its rows."""
        (_, x), (_, y_grad), start = self.layer.x, self.layer.y_grad, self.start(stretch, group)
        rows, columns = min(groups * self._height, self.layer.rows - group * self._height), stretch[1] - stretch[0]
        scale, bias = self._scale_and_bias(stretch, worker)
        with (
            stored(self.layer.x, start, rows * columns, worker) as x_data,
            stored(self.layer.y_grad, start, rows * columns, worker) as y_data,
        ):
            zeros = float64s(rows), float64s(rows)
            yield Patch(
                rows, columns, self._height, x_data, x.dtype, y_data, y_grad.dtype, *zeros, scale, bias, rms=self.rms
            )

    def with_stored_statistics(self, patch: Patch, group: int, worker: Worker) -> Patch:
        """Return a patch with the mean and the inverse standard deviation of its rows, where the files have them."""
        mean, inv_std_dev, first = self.layer.mean, self.layer.inv_std_dev, group * self._height
        if mean is not None:
            patch = patch._replace(mean=_values(mean, first, patch.rows, worker))
        if inv_std_dev is not None:
            patch = patch._replace(inv_std_dev=_values(inv_std_dev, first, patch.rows, worker))
        return patch

    def inv_std_dev(self, squares: Floats) -> Floats:
        """Compute 1 / sqrt(variance + norm_eps) of rows, from the sums of squared distances from their means."""
        with np.errstate(all="ignore"):
            inv_std_dev: Floats = 1.0 / np.sqrt(squares / self.layer.columns + self._options.norm_eps)
        if np.isinf(inv_std_dev).any():
            raise self._bad_x("has a row of variance 0", say("use {} above 0", option("norm_eps")))
        return inv_std_dev

    def variance_overflow(self) -> BadInputError:
        """Return the error for finite values whose squares are beyond float64."""
        return self._bad_x("variance overflows float64", "store mean and inv_std_dev too")

    def _bad_x(self, message: str, hint: str) -> BadInputError:
        shard, tensor = self.layer.x
        return BadInputError(message, file=shard.name, tensor=tensor.name, code="range", hint=hint)

    def forget(self) -> None:
        """Free what is cached between patches."""
        self._weights = None

    def _scale_and_bias(self, stretch: tuple[int, int], worker: Worker) -> tuple[array[float], array[float] | None]:
        cached = self._weights
        if cached is not None and cached[0] == stretch:
            return cached[1:]
        layer, count = self.layer, stretch[1] - stretch[0]
        scale, bias = array("d", [1.0]) * count, None
        if layer.scale is not None:
            scale = _values(layer.scale, stretch[0], count, worker, self._options.scale_offset)
        if self._options.invertible:
            bias = float64s(count) if layer.bias is None else _values(layer.bias, stretch[0], count, worker)
            if layer.scale is not None and 0.0 in scale:
                what = say("plus {} is", option("scale_offset")) if self._options.scale_offset else "is"
                column = stretch[0] + scale.index(0.0)
                message = say("{} 0 in column {}, by which the invertible form divides", what, column)
                shard, tensor = layer.scale
                raise BadInputError(message, file=shard.name, tensor=tensor.name, code="zero-scale")
        self._weights = stretch, scale, bias
        return scale, bias


@contextlib.contextmanager
def stored(selected: Selected, start: int, count: int, worker: Worker) -> Iterator[memoryview]:
    """Read so many values of a tensor, from element `start` on."""
    itemsize = STORAGE[selected.tensor.dtype].itemsize
    with worker.memory(count * itemsize) as view:
        worker.read(selected.shard, selected.tensor.begin + start * itemsize, view)
        yield view


def _values(selected: Selected, start: int, count: int, worker: Worker, offset: float = -0.0) -> array[float]:
    with stored(selected, start, count, worker) as view:
        return worker.backend.widen(view, selected.tensor.dtype, offset)
