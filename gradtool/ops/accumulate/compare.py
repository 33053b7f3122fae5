"""How far each gradient is from what they are reduced to: its cosine and its distance."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Self, cast

from gradtool.backends import Addend, NormSpec, Piece, Rule
from gradtool.engines import OnBlock
from gradtool.ops.beside import read
from gradtool.ops.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends import Backend
    from gradtool.engines import Part, Worker
    from gradtool.ops.accumulate.add import Add
    from gradtool.ops.accumulate.match import Contribution
    from gradtool.ops.accumulate.screen import GradientRow
    from gradtool.ops.session import Session
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination

_EUCLIDEAN = NormSpec()
_MEASURES = Rule(keeps=False, rounds=False)


class Distances(NamedTuple):
    """Measurements of the result, first, and then of each gradient and of its difference from the result."""

    measured: Sequence[Measurement]

    def condensed(self) -> Self:
        """The same in fewer bytes."""
        return self._replace(measured=[one.condensed() for one in self.measured])

    def put(self, places: Sequence[tuple[int, int]], other: Self) -> None:
        """Add what was found in a part of the pass with these places."""
        if len(self.measured) != len(other.measured):
            raise ValueError("distances of other gradients")
        for own, theirs in zip(self.measured, other.measured, strict=True):
            own.put(places, theirs)


class Compare(NamedTuple):
    """Measures the differences between the contributions of a pass, without their weights, and their reduction."""

    adding: Add

    @property
    def title(self) -> str:
        """As a progress bar shows it."""
        return "comparing"

    def empty(self) -> Distances:
        """Of all targets."""
        count = 1 + 2 * len(self.adding.contributions)
        return Distances([Measurement(self.adding.targets, _EUCLIDEAN) for _ in range(count)])

    def nbytes(self, destination: Destination) -> int:  # noqa: ARG002 - nothing is written
        """Bytes of the gradients, which are read three times."""
        return 3 * sum(one.tensor.nbytes for part in self.adding.contributions for one in part.tensors.values())

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[OnBlock]:
        """One for each block of the buffer."""
        return (OnBlock(self._compare, one.block) for one in self.adding.tasks(backend, destination))

    def parts(self, destination: Destination) -> Iterator[Part]:
        """Those of adding, which write nothing."""
        for part in self.adding.parts(destination):
            yield part._replace(work=Compare(cast("Add", part.work)))

    def _compare(self, block: Block, worker: Worker, found: Distances) -> None:
        backend, wide, elements = worker.backend, [], 0
        for span in block.spans:
            wide.append(Piece("F64", 8 * elements, span.elements))
            elements += span.elements
        if not elements:
            return
        whole, *others = found.measured
        result = worker.channel.memory("result", 8 * elements)
        rule = Rule(keeps=False, divisor=self.adding.rule_of(block).divisor)
        sources = self.adding.sources(block, worker)
        whole.add(block, backend.accumulate(result, wide, sources, rule, _EUCLIDEAN))
        minus = (result, [Addend("F64", 0, elements, 0, -1.0)])
        for one, norm, gap in zip(self.adding.contributions, others[::2], others[1::2], strict=True):
            norm.add(block, backend.accumulate(result, wide, self._own(one, block, worker), _MEASURES, _EUCLIDEAN))
            differences = chain(self._own(one, block, worker), [minus])
            gap.add(block, backend.accumulate(result, wide, differences, _MEASURES, _EUCLIDEAN))

    def _own(self, one: Contribution, block: Block, worker: Worker) -> Iterator[tuple[memoryview, list[Addend]]]:
        """What a contribution has for a block, without its weight."""
        alone = one._replace(weight=1 / one.unscale, coef=1.0, is_sum=False)
        return read([alone], self.adding.targets, block, worker.channel, 1 << 62)


def compared(session: Session, adding: Add, rows: Sequence[GradientRow]) -> list[GradientRow]:
    """The rows of gradients, with the cosine and the distance of those that are added; `rows` has the others too."""
    whole, *others = (one.norms().whole for one in session.run(Compare(adding)).measured)
    found = iter(zip(others[::2], others[1::2], strict=True))
    return [_row(row, whole, *next(found)) if row.taken else row for row in rows]


def _row(row: GradientRow, whole: float, norm: float, gap: float) -> GradientRow:
    own = norm if row.norm is None else row.norm
    return replace(row, norm=own, cosine=_cosine(norm, whole, gap), distance=gap)


def _cosine(a: float, b: float, gap: float) -> float:
    """The cosine of the angle between vectors of the norms a and b, whose difference has the norm `gap`.

    That is (a² + b² - gap²) / 2ab, by the law of cosines, in ratios that do not overflow. NaN if a or b is 0.
    """
    if not (0 < a < math.inf and 0 < b < math.inf and gap < math.inf):
        return math.nan
    cosine = (a / b + b / a - (gap / a) * (gap / b)) / 2
    return min(1.0, max(-1.0, cosine))
