"""The pass of an accumulation: the buffer and all gradients side by side, block by block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Self

from gradtool import tuning
from gradtool.backends.storage import STORAGE
from gradtool.engines.tally import Tallies
from gradtool.ops.accumulate.reduce import reduced
from gradtool.ops.beside import read
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import TensorPass, pieces_of
from gradtool.reduction import TILE
from gradtool.store.io.blocks import cut_where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends.protocol import Addend, Backend, Rule, Trim
    from gradtool.engines.worker import Worker
    from gradtool.ops.accumulate.match import Contribution
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination


@dataclass(frozen=True, eq=False, repr=False)
class Add(TensorPass[Tallies[Measurement]]):
    """Adds contributions to tensors of the buffer, the selected ones, which their tensors are numbered by.

    With `trim`, what is added is the trimmed mean of the contributions and not their sum. With `divisors`, each target
    has a divisor of its own, not that of the rule. With `counts_zeros`, contributions are 0 where they lack a target.
    The buffer `is_new` if it is only being created. With `measures_before`, what it held is measured in the same pass.
    """

    title: ClassVar = "adding"
    by_tensor = ("divisors",)

    contributions: Sequence[Contribution]
    rule: Rule
    trim: Trim | None = None
    divisors: Sequence[float] = ()
    counts_zeros: bool = False
    is_new: bool = False
    measures_before: bool = False

    @property
    def beside(self) -> Sequence[Selected]:
        """The tensors of all gradients."""
        return [selected for each in self.contributions for selected in each.tensors.values()]

    @property
    def reads_selected(self) -> bool:
        """Whether there is a buffer."""
        return not self.is_new

    def tally(self) -> Tallies[Measurement]:
        """Begin with nothing: after the gradients were added and, if that is measured, before."""
        return Tallies([Measurement(self.selected, self.spec) for _ in range(1 + self.measures_before)])

    def nbytes(self, destination: Destination) -> int:
        """Count the bytes of the gradients, and of the buffer where it is read."""
        gradients = sum(gradient.tensor.nbytes for gradient in self.beside)
        return gradients + destination.nbytes(self.selected if self.rule.keeps else ())

    def block_bytes(self, backend: Backend, destination: Destination) -> int:  # noqa: ARG002 - of any
        """Return a size whose float64 sums stay in a core's cache."""
        itemsizes = {STORAGE[target.tensor.dtype].itemsize for target in self.selected}
        tiles = tuning.SUM_TILES * _times_larger(backend)
        return TILE * max([tiles * min(itemsizes), *itemsizes]) if itemsizes else TILE

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[Block]:
        """Yield the blocks of the buffer, cut where the divisor changes."""
        blocks = super().tasks(backend, destination)
        return chain.from_iterable(cut_where(block, self.divisors) for block in blocks) if self.divisors else blocks

    def restricted_to(self, selected: Sequence[Selected], places: Sequence[tuple[int, int]]) -> Self:
        """Restrict the gradients to what is added to these targets."""
        position = {number: at for at, (number, _) in enumerate(places)}
        contributions = [
            each._replace(tensors={position[n]: each.tensors[n] for n in position if n in each.tensors})
            for each in self.contributions
        ]
        return replace(super().restricted_to(selected, places), contributions=contributions)

    def work(self, block: Block, worker: Worker, tally: Tallies[Any]) -> None:
        """Add to a block."""
        backend, pieces = worker.backend, pieces_of(block)
        covered = sum(piece.elements * STORAGE[piece.dtype].itemsize for piece in pieces) == block.end - block.begin
        reads = not self.is_new and (self.rule.keeps or not covered)
        with worker.load(block) if reads else worker.make(block, zeros=not covered) as loaded:
            if pieces:
                before = [backend.tile_sums(loaded.data, pieces, self.spec)] if self.measures_before else []
                rule, sources = self.rule_of(block), self.sources(block, worker)
                after = backend.accumulate(loaded.data, pieces, sources, rule, self.spec)
                for measurement, sums in zip(tally.each, [after, *before], strict=True):
                    measurement.add(block, sums)
            worker.store(loaded)

    def rule_of(self, block: Block) -> Rule:
        """The rule for the targets of a block."""
        return self.rule._replace(divisor=self.divisors[block.spans[0].tensor]) if self.divisors else self.rule

    def sources(self, block: Block, worker: Worker) -> Iterator[tuple[memoryview, list[Addend]]]:
        """What is added to a block, a batch at a time."""
        if self.trim is not None:
            return reduced(self.trim, self.contributions, self.selected, block, worker, fills=self.counts_zeros)
        batch = tuning.BATCH_BYTES * _times_larger(worker.backend)
        return read(self.contributions, self.selected, block, worker, batch, fills=self.counts_zeros)


def _times_larger(backend: Backend) -> int:
    """How many times larger than on the CPU blocks should be."""
    return backend.block_bytes // tuning.BLOCK_BYTES
