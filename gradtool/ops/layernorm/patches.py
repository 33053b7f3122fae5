"""A layer cut into patches: groups of rows, or stretches of a row that is longer than a patch.

The gradients of a wide row need sums over all its stretches, which are read for these sums first.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from dataclasses import dataclass
from functools import partial
from itertools import product
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from gradtool import tuning
from gradtool.arrays import float64s, np
from gradtool.backends.storage import STORAGE
from gradtool.backends.values import NormSpec, Patch, Piece
from gradtool.engines.passes import Pass
from gradtool.errors import BadInputError, option, say
from gradtool.ops.passes import Measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from gradtool.backends.protocol import Backend
    from gradtool.backends.values import Statistics
    from gradtool.engines.worker import Worker
    from gradtool.ops.call import Call
    from gradtool.ops.layernorm.layers import Layer
    from gradtool.options import LayerNormOptions
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.destination import Destination

    Floats = NDArray[np.float64]


class Patches:
    """The patches of a layer, by group of rows and stretch of columns; and where its results and inputs are written."""

    def __init__(
        self,
        options: LayerNormOptions,
        layer: Layer,
        results: Sequence[Selected],
        places: dict[Selected, Selected],
    ) -> None:
        self._options, self.layer, self.outputs = options, layer, [places[result] for result in results]
        # X and Y_grad, where they stay in a new file; a tensor that is both, or that of two layers, is written once.
        self.inputs = places.pop(layer.x, None), places.pop(layer.y_grad, None)
        self._rms, columns, size = options.kind == "rmsnorm", layer.columns, tuning.PATCH_ELEMENTS
        self.stretches = [(begin, min(begin + size, columns)) for begin in range(0, columns, size)]
        # A group is a single row where a row is more than one patch.
        self.is_wide = len(self.stretches) > 1
        self._height = max(1, min(tuning.PATCH_ROWS, size // max(1, columns)))
        self.groups = -(-layer.rows // self._height)
        # There are gradients that are sums over rows; for them, wide rows are read again.
        self.has_weights = layer.scale is not None
        self.reads = layer.inputs * (2 if self.is_wide and self.has_weights else 1)
        needs_mean = not self._rms and not options.invertible
        self.lacks_statistics = layer.inv_std_dev is None or (layer.mean is None and needs_mean)
        # Of wide rows: when summing began, statistics that the files do not have, and two means over the gradient.
        self.began = math.inf
        self._mean: Floats | None = None
        self._inv_std_dev: Floats | None = None
        self._means: tuple[Floats, Floats] | None = None
        # Of the stretch that was read last.
        self._weights: tuple[tuple[int, int], array[float], array[float] | None] | None = None

    def start(self, stretch: tuple[int, int], group: int) -> int:
        """Return the element that a patch begins with."""
        return group * self._height * self.layer.columns + stretch[0]

    @contextlib.contextmanager
    def read(self, stretch: tuple[int, int], group: int, worker: Worker, groups: int = 1) -> Iterator[Patch]:
        """Read a patch of some groups, with zeros for statistics that are not known yet."""
        layer, start, first = self.layer, self.start(stretch, group), group * self._height
        rows, columns = min(groups * self._height, layer.rows - first), stretch[1] - stretch[0]
        scale, bias = self._scale_and_bias(stretch, worker)
        mean = _statistic(layer.mean, self._mean, first, rows, worker)
        inv_std_dev = _statistic(layer.inv_std_dev, self._inv_std_dev, first, rows, worker)
        with (
            _stored(layer.x, start, rows * columns, worker) as x,
            _stored(layer.y_grad, start, rows * columns, worker) as y_grad,
        ):
            x_dtype, y_dtype = layer.x.tensor.dtype, layer.y_grad.tensor.dtype
            yield Patch(
                rows, columns, self._height, x, x_dtype, y_grad, y_dtype, mean, inv_std_dev, scale, bias, self._rms
            )

    def with_statistics(self, patch: Patch, backend: Backend) -> Patch:
        """Return a patch with statistics that the files do not have; those of wide rows were computed before."""
        if self.is_wide or not self.lacks_statistics:
            return patch
        sums = partial(backend.row_sums, patch.x, patch.x_dtype, patch.rows, patch.columns)
        pieces = [Piece(patch.x_dtype, 0, patch.rows * patch.columns)]
        measure = partial(backend.tile_sums, patch.x, pieces, NormSpec(math.inf))
        mean, inv_std_dev = self._compute_statistics(patch.rows, sums, measure)
        return patch._replace(
            mean=mean if self.layer.mean is None else patch.mean,
            inv_std_dev=inv_std_dev if self.layer.inv_std_dev is None else patch.inv_std_dev,
        )

    def sum_wide_rows(self, call: Call) -> None:
        """Read wide rows, if there are any, and sum what their gradients need."""
        layer = self.layer
        if not self.is_wide or not layer.rows:
            return
        self.began = perf_counter()
        if self.lacks_statistics:
            measure = partial(call.run, Measure([layer.x], NormSpec(math.inf)))
            self._mean, self._inv_std_dev = self._compute_statistics(
                layer.rows, lambda center: self._row_sums(call, [layer.x], center)[0], measure
            )
        weighted, projected = self._row_sums(call, [layer.x, layer.y_grad]) / layer.columns
        self._means = np.zeros(layer.rows) if self._rms else weighted, projected

    def _row_sums(self, call: Call, reads: Sequence[Selected], center: Floats | None = None) -> Floats:
        """Return sums of each wide row, of X, of its squared distances from a center, or of X and Y_grad.

        The sums of stretches are added in order; docs/numerics.md says why that is not the order of all chunks.
        """
        stretches = call.run(_SumWideRows(reads, NormSpec(), self, center))
        with np.errstate(all="ignore"):
            return sum(stretches, np.zeros((2, self.layer.rows)))

    def means(self, group: int) -> tuple[Floats, Floats] | None:
        """Return the means over the gradient of a wide row; those of other rows are computed with their gradients."""
        return None if self._means is None else (self._means[0][group : group + 1], self._means[1][group : group + 1])

    def _compute_statistics(
        self, rows: int, sums: Callable[[Floats | None], Floats], measure: Callable[[], Statistics]
    ) -> tuple[Floats, Floats]:
        """Compute the mean and 1 / sqrt(variance + norm_eps) of rows of X, given how to sum and to measure them."""
        mean = np.zeros(rows) if self._rms else sums(None) / self.layer.columns
        squares = sums(mean)
        # An Inf in X is found and reported like any other.
        if np.isinf(squares).any() and not any(measure().inf):
            raise self._bad_x("variance overflows float64", "store mean and inv_std_dev too")
        with np.errstate(all="ignore"):
            inv_std_dev: Floats = 1.0 / np.sqrt(squares / self.layer.columns + self._options.norm_eps)
        if np.isinf(inv_std_dev).any():
            raise self._bad_x("has a row of variance 0", say("use {} above 0", option("norm_eps")))
        return mean, inv_std_dev

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
        layer, first, count = self.layer, stretch[0], stretch[1] - stretch[0]
        scale, bias = array("d", [1.0]) * count, None
        if layer.scale is not None:
            scale = _values(layer.scale, first, count, worker, self._options.scale_offset)
        if self._options.invertible:
            bias = float64s(count) if layer.bias is None else _values(layer.bias, first, count, worker)
            if layer.scale is not None and 0.0 in scale:
                subject = say("plus {} is", option("scale_offset")) if self._options.scale_offset else "is"
                column = first + scale.index(0.0)
                message = say("{} 0 in column {}, but the invertible form divides by it", subject, column)
                shard, tensor = layer.scale
                raise BadInputError(message, file=shard.name, tensor=tensor.name, code="zero-scale")
        self._weights = stretch, scale, bias
        return scale, bias


@dataclass(frozen=True, eq=False, repr=False)
class _SumWideRows(Pass["Floats"]):
    """Sums the stretches of wide rows: of X, of its squared distances from a center, or with Y_grad, for its means."""

    title: ClassVar = "summing rows"

    patches: Patches
    center: Floats | None

    def tally(self) -> Floats:
        # For each stretch, one or two sums of each row.
        return np.zeros((len(self.patches.stretches), 2, self.patches.layer.rows))

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[tuple[int, int]]:  # noqa: ARG002
        return product(range(len(self.patches.stretches)), range(self.patches.layer.rows))

    def work(self, task: tuple[int, int], worker: Worker, tally: Floats) -> None:
        (number, row), backend, patches = task, worker.backend, self.patches
        rows, stretch, x = slice(row, row + 1), patches.stretches[number], patches.layer.x
        if len(self.selected) > 1:
            with patches.read(stretch, row, worker) as patch:
                tally[number, :, rows] = backend.layer_norm_sums(patch)
            return
        columns, center = stretch[1] - stretch[0], None if self.center is None else self.center[rows]
        with _stored(x, patches.start(stretch, row), columns, worker) as view:
            tally[number, 0, rows] = backend.row_sums(view, x.tensor.dtype, 1, columns, center)


@contextlib.contextmanager
def _stored(selected: Selected, start: int, count: int, worker: Worker) -> Iterator[memoryview]:
    """Read `count` values of a tensor, from element `start` on."""
    itemsize = STORAGE[selected.tensor.dtype].itemsize
    with worker.memory(count * itemsize) as view:
        worker.read(selected.shard, selected.tensor.begin + start * itemsize, view)
        yield view


def _statistic(
    selected: Selected | None, computed: Floats | None, first: int, rows: int, worker: Worker
) -> Floats | array[float]:
    """Return a statistic of rows: as it is stored, as it was computed, or zeros if it is not known yet."""
    if selected is not None:
        return _values(selected, first, rows, worker)
    return float64s(rows) if computed is None else computed[first : first + rows]


def _values(selected: Selected, start: int, count: int, worker: Worker, offset: float = -0.0) -> array[float]:
    with _stored(selected, start, count, worker) as view:
        return worker.backend.widen(view, selected.tensor.dtype, offset)
