"""Rows that are longer than a patch: what each row needs is summed before its gradients are computed.

A backend sums each stretch of a row by itself, and the sums of the stretches are added in order. So the chunks of a
wide row are not simply added from the first to the last; docs/numerics.md has the whole order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from gradtool.arrays import np
from gradtool.backends.protocol import NormSpec
from gradtool.ops.layernorm.patches import inverted, too_large
from gradtool.ops.passes import Measure, TensorPass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradtool.backends.protocol import Backend
    from gradtool.engines.worker import Worker
    from gradtool.ops.layernorm.layers import Layer
    from gradtool.ops.layernorm.patches import Floats, Options, Patches
    from gradtool.ops.session import Session
    from gradtool.store.transaction.destination import Destination


class Rows(NamedTuple):
    """What each row needs: the statistics that are computed, two means over its gradient; and when summing began."""

    mean: Floats
    inv_std_dev: Floats
    weighted: Floats
    projected: Floats
    began: float


# Sums of stretches of rows, by (number of the stretch, row).
_Sums = dict[tuple[int, int], tuple["Floats", ...]]


@dataclass(frozen=True, eq=False, repr=False)
class SumRows(TensorPass[_Sums]):
    """Sums wide rows: of X, of its squared distances from the mean, or of what the means over the gradient take."""

    title: ClassVar = "summing rows"

    layer: Layer
    patches: Patches
    what: Literal["values", "squares", "gradients"]
    mean: Floats
    inv_std_dev: Floats

    def tally(self) -> _Sums:
        """Begin with no stretch."""
        return {}

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[tuple[int, int]]:  # noqa: ARG002
        """Yield each stretch of each row."""
        return product(range(len(self.patches.stretches)), range(self.layer.rows))

    def work(self, task: tuple[int, int], worker: Worker, tally: _Sums) -> None:
        """Sum a stretch of a row."""
        (number, row), backend, reads_x = task, worker.backend, self.what != "gradients"
        with self.patches.read(self.patches.stretches[number], row, worker, x_only=reads_x) as patch:
            if reads_x:
                center = self.mean[row : row + 1] if self.what == "squares" else None
                tally[task] = (backend.row_sums(patch.x, patch.x_dtype, 1, patch.columns, center),)
            else:
                rows = slice(row, row + 1)
                known = patch._replace(mean=self.mean[rows], inv_std_dev=self.inv_std_dev[rows])
                tally[task] = backend.layer_norm_sums(self.patches.with_stored_statistics(known, row, worker))

    def totals(self, sums: _Sums) -> list[Floats]:
        """Return the sums of whole rows; stretches are added in their order."""
        totals = [np.zeros(self.layer.rows) for _ in sums[0, 0]]
        with np.errstate(all="ignore"):
            for number, row in sorted(sums):
                for total, part in zip(totals, sums[number, row], strict=True):
                    total[row] += part[0]
        return totals


def sum_wide_rows(session: Session, options: Options, layer: Layer, patches: Patches) -> Rows | None:
    """Read wide rows for what their gradients need; None if a layer has none."""
    if not patches.is_wide or not layer.rows:
        return None
    began = perf_counter()
    mean = inv_std_dev = np.zeros(layer.rows)

    def sums(what: Literal["values", "squares", "gradients"]) -> list[Floats]:
        read = [layer.x, layer.y_grad] if what == "gradients" else [layer.x]
        work = SumRows(read, NormSpec(), layer, patches, what, mean, inv_std_dev)
        return work.totals(session.run(work))

    if options.computes_statistics(layer):
        if not options.form.rms:
            mean = sums("values")[0] / layer.columns
        squares = sums("squares")[0]
        if np.isinf(squares).any() and not any(session.run(Measure([layer.x], NormSpec(math.inf))).inf):
            raise too_large(layer)
        inv_std_dev = inverted(options, layer, squares)
    weighted, projected = sums("gradients")
    weighted = np.zeros_like(weighted) if options.form.rms else weighted / layer.columns
    return Rows(mean, inv_std_dev, weighted, projected / layer.columns, began)
