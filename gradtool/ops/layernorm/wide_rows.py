"""Rows that are longer than a patch: what each row needs is summed before its gradients are computed.

A backend sums each stretch of a row by itself, and the sums of the stretches are added in order. So the chunks of a
wide row are not simply added from the first to the last; docs/numerics.md has the whole order.
"""

from __future__ import annotations

import math
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Literal, NamedTuple

from gradtool.arrays import np
from gradtool.backends.protocol import NormSpec
from gradtool.ops.layernorm.patches import inverted, too_large
from gradtool.ops.passes import Measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gradtool.backends.protocol import Backend
    from gradtool.engines import Worker
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


class Parts(dict[tuple[int, int], "tuple[Floats, ...]"]):
    """Sums of stretches of rows, by (number of the stretch, row)."""

    def totals(self, stretches: int, rows: int) -> list[Floats]:
        """The sums of whole rows; stretches are added in their order."""
        totals = [np.zeros(rows) for _ in self[0, 0]]
        with np.errstate(all="ignore"):
            for number in range(stretches):
                for row in range(rows):
                    for total, part in zip(totals, self[number, row], strict=True):
                        total[row] += part[0]
        return totals


class SumRows(NamedTuple):
    """Sums wide rows: of X, of its squared distances from the mean, or of what the means over the gradient take."""

    layer: Layer
    patches: Patches
    what: Literal["values", "squares", "gradients"]
    mean: Floats
    inv_std_dev: Floats

    @property
    def title(self) -> str:
        """As a progress bar shows it."""
        return "summing rows"

    def empty(self) -> Parts:
        """No stretch."""
        return Parts()

    def nbytes(self, destination: Destination) -> int:  # noqa: ARG002 - nothing is written
        """Bytes of X, and of Y_grad for the gradients."""
        return self.layer.x.tensor.nbytes + (self.layer.y_grad.tensor.nbytes if self.what == "gradients" else 0)

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[Callable[[Worker, Parts], None]]:  # noqa: ARG002
        """One for each stretch of each row."""
        for number in range(len(self.patches.stretches)):
            for row in range(self.layer.rows):
                yield partial(self._sum, number, row)

    def _sum(self, number: int, row: int, worker: Worker, found: Parts) -> None:
        stretch, backend = self.patches.stretches[number], worker.backend
        patch = self.patches.read(stretch, row, worker, x_only=self.what != "gradients")
        own = slice(row, row + 1)
        patch = patch._replace(mean=self.mean[own], inv_std_dev=self.inv_std_dev[own])
        if self.what == "gradients":
            patch = self.patches.with_stored_statistics(patch, row, worker)
            found[number, row] = backend.layer_norm_sums(patch)
        else:
            center = patch.mean if self.what == "squares" else None
            found[number, row] = (backend.row_sums(patch.x, patch.x_dtype, 1, patch.columns, center),)


def sum_wide_rows(session: Session, options: Options, layer: Layer, patches: Patches) -> Rows | None:
    """Read wide rows for what their gradients need; None if a layer has none."""
    if not patches.is_wide or not layer.rows:
        return None
    began = perf_counter()
    mean = inv_std_dev = np.zeros(layer.rows)

    def sums(what: Literal["values", "squares", "gradients"]) -> list[Floats]:
        parts = session.run(SumRows(layer, patches, what, mean, inv_std_dev))
        return parts.totals(len(patches.stretches), layer.rows)

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
