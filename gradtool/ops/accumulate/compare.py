"""How far each gradient is from what they are reduced to: its cosine and its distance."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from gradtool.backends.protocol import NormSpec, Piece, Rule, Tolerance
from gradtool.engines import OnBlock
from gradtool.engines.tally import Tallies
from gradtool.ops.beside import read
from gradtool.ops.diff.comparison import Comparison
from gradtool.ops.diff.figures import root

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends.protocol import Addend, Backend
    from gradtool.engines import Part, Worker
    from gradtool.ops.accumulate.add import Add
    from gradtool.ops.accumulate.match import Contribution
    from gradtool.ops.accumulate.screen import GradientRow
    from gradtool.ops.session import Session
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination

_UNMEASURED = NormSpec(math.inf)


class Compare(NamedTuple):
    """Compares the contributions of a pass, without their weights, with their reduction."""

    adding: Add

    @property
    def title(self) -> str:
        """As a progress bar shows it."""
        return "comparing"

    def empty(self) -> Tallies[Comparison]:
        """Of all targets, one for each gradient."""
        return Tallies([Comparison(self.adding.targets) for _ in self.adding.contributions])

    def nbytes(self, destination: Destination) -> int:  # noqa: ARG002 - nothing is written
        """Bytes of the gradients, which are read twice."""
        return 2 * sum(one.tensor.nbytes for part in self.adding.contributions for one in part.tensors.values())

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[OnBlock]:
        """One for each block of the buffer."""
        return (OnBlock(self._compare, one.block) for one in self.adding.tasks(backend, destination))

    def parts(self, destination: Destination) -> Iterator[Part]:
        """Those of adding, which write nothing."""
        for part in self.adding.parts(destination):
            yield part._replace(work=Compare(cast("Add", part.work)))

    def _compare(self, block: Block, worker: Worker, found: Tallies[Comparison]) -> None:
        backend, wide, elements = worker.backend, [], 0
        for span in block.spans:
            wide.append(Piece("F64", 8 * elements, span.elements))
            elements += span.elements
        if not elements:
            return
        result, gradient = (
            backend.to_device(worker.channel.memory(use, 8 * elements), copies=False) for use in ("result", "gradient")
        )
        rule = Rule(keeps=False, divisor=self.adding.rule_of(block).divisor)
        backend.accumulate(result, wide, self.adding.sources(block, worker), rule, _UNMEASURED)
        differences = []
        for one in self.adding.contributions:
            own = Rule(keeps=False, divisor=one.unscale)
            backend.accumulate(gradient, wide, self._own(one, block, worker), own, _UNMEASURED)
            differences.append(backend.differences(gradient, wide, result, wide, Tolerance()))
        # Nothing is added before all is known: a device that has no room gets the block in halves.
        for comparison, each in zip(found.each, differences, strict=True):
            comparison.add(block, each)

    def _own(self, one: Contribution, block: Block, worker: Worker) -> Iterator[tuple[memoryview, list[Addend]]]:
        """What a contribution has for a block, as it is stored."""
        alone = one._replace(weight=1.0, coef=1.0)
        return read([alone], self.adding.targets, block, worker.channel, 1 << 62)


def compared(session: Session, adding: Add, rows: Sequence[GradientRow]) -> list[GradientRow]:
    """The rows of gradients, with the cosine and the distance of those that are added; `rows` has the others too."""
    found = iter(session.run(Compare(adding)).each)
    return [_row(row, next(found)) if row.taken else row for row in rows]


def _row(row: GradientRow, found: Comparison) -> GradientRow:
    counts = found.all_counts()
    if counts.nonfinite_a or counts.nonfinite_b or counts.nonfinite_both:
        return replace(row, cosine=math.nan, distance=math.nan)
    return replace(row, cosine=found.figures().cosine, distance=root(found.tile_sums[0]))
