"""The passes of an accumulation: the buffer and all gradients side by side, block by block."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Self

from gradtool import tuning
from gradtool.backends.protocol import Addend, AddMode, NormSpec, Piece, Tolerance
from gradtool.backends.storage import STORAGE
from gradtool.engines.passes import Pass, Tallies
from gradtool.ops.aligned_read import Operand, read
from gradtool.ops.diff.comparison import Comparison
from gradtool.ops.passes import Measurement, pieces_of
from gradtool.reduction import TILE
from gradtool.store.io.blocks import cut_where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends.protocol import Backend, Trim
    from gradtool.engines.worker import Worker
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.destination import Destination, WrittenFiles

# A window of fewer elements costs more to read than to sort.
_FEWEST = 512
_UNMEASURED = NormSpec(math.inf)


@dataclass(frozen=True, eq=False, repr=False)
class Add(Pass[Tallies[Any]]):
    """Adds gradients to tensors of the buffer, the selected ones, which theirs are numbered by.

    With `trim`, what is added is the trimmed mean of the gradients and not their sum. With `divisors`, each target has
    a divisor of its own, not that of the rule. With `fills`, gradients are 0 where they lack a target. The buffer
    `is_new` if it is only being created. With `measures_before`, what it held is measured in the same pass.
    """

    title: ClassVar = "adding"
    by_tensor = ("divisors",)

    gradients: Sequence[Operand]
    rule: AddMode
    trim: Trim | None = None
    divisors: Sequence[float] = ()
    fills: bool = False
    is_new: bool = False
    measures_before: bool = False

    @property
    def beside(self) -> Sequence[Selected]:
        """The tensors of all gradients."""
        return [selected for gradient in self.gradients for selected in gradient.tensors.values()]

    @property
    def reads_selected(self) -> bool:
        """Whether there is a buffer."""
        return not self.is_new

    def tally(self) -> Tallies[Any]:
        """Begin with nothing: after the gradients were added and, if that is measured, before."""
        return Tallies([Measurement(self.selected, self.spec) for _ in range(1 + self.measures_before)])

    def nbytes(self, destination: WrittenFiles) -> int:
        """Count the bytes of the gradients, and of the buffer where it is read."""
        gradients = sum(selected.tensor.nbytes for selected in self.beside)
        return gradients + destination.nbytes(self.selected if self.rule.include_buffer else ())

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
        numbers = [number for number, _ in places]
        gradients = [gradient.restricted_to(numbers) for gradient in self.gradients]
        return replace(super().restricted_to(selected, places), gradients=gradients)

    def work(self, block: Block, worker: Worker, tally: Tallies[Any]) -> None:
        """Add to a block."""
        backend, pieces = worker.backend, pieces_of(block)
        covered = sum(piece.elements * STORAGE[piece.dtype].itemsize for piece in pieces) == block.end - block.begin
        reads = not self.is_new and (self.rule.include_buffer or not covered)
        with worker.load(block) if reads else worker.make(block, zeros=not covered) as loaded:
            if pieces:
                before = [backend.tile_sums(loaded.data, pieces, self.spec)] if self.measures_before else []
                rule, addends = self.rule_of(block), self.addends(block, worker)
                after = backend.accumulate(loaded.data, pieces, addends, rule, self.spec)
                for measurement, sums in zip(tally.each, [after, *before], strict=True):
                    measurement.add(block, sums)
            worker.store(loaded)

    def rule_of(self, block: Block) -> AddMode:
        """Return the rule for the targets of a block."""
        return self.rule._replace(divisor=self.divisors[block.spans[0].tensor]) if self.divisors else self.rule

    def addends(self, block: Block, worker: Worker) -> Iterator[tuple[memoryview, list[Addend]]]:
        """Read what is added to a block, a batch at a time."""
        if self.trim is not None:
            return self._trimmed_means(self.trim, block, worker)
        batch = tuning.BATCH_BYTES * _times_larger(worker.backend)
        return read(self.gradients, self.selected, block, worker, batch, fills=self.fills)

    def _trimmed_means(self, trim: Trim, block: Block, worker: Worker) -> Iterator[tuple[memoryview, list[Addend]]]:
        """Yield the trimmed means for a block, as float64 addends of weight 1, a window of all gradients at a time.

        The more gradients there are, the fewer elements are in a window, so that memory does not grow.
        """
        most = max(_FEWEST, _times_larger(worker.backend) * tuning.WINDOW_BYTES // (8 * len(self.gradients)))
        at = 0
        for window, elements in _windows(block, most):
            # All gradients at once.
            for source, addends in read(self.gradients, self.selected, window, worker, sys.maxsize, fills=self.fills):
                means = worker.backend.trimmed_means(source, addends, trim, elements)
                yield means.data.cast("B"), [Addend("F64", 0, elements, at, 1.0)]
            at += elements


@dataclass(frozen=True, eq=False, repr=False)
class Compare(Add):
    """Compares the gradients of a pass with their reduction: without their factors, each over its own number."""

    title: ClassVar = "comparing"

    unscales: Sequence[float] = ()

    def tally(self) -> Tallies[Comparison]:
        """Begin with nothing, for each gradient."""
        return Tallies([Comparison(self.selected) for _ in self.gradients])

    def nbytes(self, destination: WrittenFiles) -> int:  # noqa: ARG002 - nothing is written
        """Count the bytes of the gradients, which are read twice."""
        return 2 * sum(selected.tensor.nbytes for selected in self.beside)

    def work(self, block: Block, worker: Worker, tally: Tallies[Any]) -> None:
        """Compare what is added to a block."""
        backend, wide, elements = worker.backend, [], 0
        for span in block.spans:
            wide.append(Piece("F64", 8 * elements, span.elements))
            elements += span.elements
        if not elements:
            return
        with worker.memory(8 * elements) as result_memory, worker.memory(8 * elements) as gradient_memory:
            result, alone = (backend.to_device(view, copies=False) for view in (result_memory, gradient_memory))
            rule = AddMode(include_buffer=False, divisor=self.rule_of(block).divisor)
            backend.accumulate(result, wide, self.addends(block, worker), rule, _UNMEASURED)
            differences = []
            for gradient, unscale in zip(self.gradients, self.unscales, strict=True):
                stored = read([Operand(gradient.tensors)], self.selected, block, worker, sys.maxsize)
                backend.accumulate(alone, wide, stored, AddMode(include_buffer=False, divisor=unscale), _UNMEASURED)
                differences.append(backend.differences(alone, wide, result, wide, Tolerance()))
        # Nothing is added before all is known: a device that has no room gets the block in halves.
        for comparison, difference in zip(tally.each, differences, strict=True):
            comparison.add(block, difference)


def _times_larger(backend: Backend) -> int:
    """Return how many times larger than on the CPU blocks should be."""
    return backend.block_bytes // tuning.BLOCK_BYTES


def _windows(block: Block, most: int) -> Iterator[tuple[Block, int]]:
    """Yield the spans of a block in parts of at most so many elements, with their number."""
    spans, elements = [], 0
    for span in block.spans:
        done = 0
        while done < span.elements:
            count = min(span.elements - done, most - elements)
            # Their offsets in the block are not used.
            spans.append(span._replace(start=span.start + done, elements=count))
            done, elements = done + count, elements + count
            if elements == most:
                yield block._replace(spans=spans), elements
                spans, elements = [], 0
    if spans:
        yield block._replace(spans=spans), elements
