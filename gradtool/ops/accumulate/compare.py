"""How far each gradient is from what they are reduced to: its cosine and its distance."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from gradtool.backends.protocol import NormSpec, Piece, Rule, Tolerance
from gradtool.engines.tally import Tallies
from gradtool.ops.accumulate.add import Add
from gradtool.ops.beside import read
from gradtool.ops.diff.comparison import Comparison

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.engines.worker import Worker
    from gradtool.ops.accumulate.screen import GradientRow
    from gradtool.ops.session import Session
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination

_UNMEASURED = NormSpec(math.inf)


@dataclass(frozen=True, eq=False, repr=False)
class Compare(Add):
    """Compares the contributions of a pass, without their weights, with their reduction."""

    title: ClassVar = "comparing"

    def tally(self) -> Tallies[Comparison]:  # type: ignore[override]
        """Begin with nothing, for each gradient."""
        return Tallies([Comparison(self.selected) for _ in self.contributions])

    def nbytes(self, destination: Destination) -> int:  # noqa: ARG002 - nothing is written
        """Count the bytes of the gradients, which are read twice."""
        return 2 * sum(gradient.tensor.nbytes for gradient in self.beside)

    def work(self, block: Block, worker: Worker, tally: Tallies[Any]) -> None:
        """Compare what is added to a block."""
        backend, wide, elements = worker.backend, [], 0
        for span in block.spans:
            wide.append(Piece("F64", 8 * elements, span.elements))
            elements += span.elements
        if not elements:
            return
        with worker.memory(8 * elements) as result_memory, worker.memory(8 * elements) as gradient_memory:
            result, gradient = (backend.to_device(view, copies=False) for view in (result_memory, gradient_memory))
            rule = Rule(keeps=False, divisor=self.rule_of(block).divisor)
            backend.accumulate(result, wide, self.sources(block, worker), rule, _UNMEASURED)
            differences = []
            for contribution in self.contributions:
                alone = contribution._replace(weight=1.0, coef=1.0)
                stored = read([alone], self.selected, block, worker, 1 << 62)
                unscaled = Rule(keeps=False, divisor=contribution.unscale)
                backend.accumulate(gradient, wide, stored, unscaled, _UNMEASURED)
                differences.append(backend.differences(gradient, wide, result, wide, Tolerance()))
        # Nothing is added before all is known: a device that has no room gets the block in halves.
        for comparison, each in zip(tally.each, differences, strict=True):
            comparison.add(block, each)


def compared(session: Session, adding: Add, rows: Sequence[GradientRow]) -> list[GradientRow]:
    """The rows of gradients, with the cosine and the distance of those that are added; `rows` has the others too."""
    found = iter(session.run(Compare(**vars(adding))).each)
    return [_row(row, next(found)) if row.taken else row for row in rows]


def _row(row: GradientRow, found: Comparison) -> GradientRow:
    if any(map(any, (found.nonfinite_a, found.nonfinite_b, found.nonfinite_both))):
        return replace(row, cosine=math.nan, distance=math.nan)
    return replace(row, cosine=found.metrics().cosine, distance=found.distance())
