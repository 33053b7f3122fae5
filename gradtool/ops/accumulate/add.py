"""The pass of an accumulation: the buffer and all gradients side by side, block by block."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from gradtool import tuning
from gradtool.backends.storage import STORAGE
from gradtool.engines import OnBlock, Part
from gradtool.engines.tally import Tallies
from gradtool.ops.accumulate.reduce import reduced
from gradtool.ops.beside import read
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import by_shard, pieces_of
from gradtool.reduction import TILE
from gradtool.store.io.blocks import cut_where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends.protocol import Addend, Backend, NormSpec, Rule, Trim
    from gradtool.engines import Worker
    from gradtool.ops.accumulate.match import Contribution
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination


class Add(NamedTuple):
    """Adds contributions to tensors of the buffer (`targets`), which their tensors are numbered by.

    With `trim`, what is added is the trimmed mean of the contributions and not their sum. With `divisors`, each target
    has a divisor of its own, not that of the rule. With `counts_zeros`, contributions are 0 where they lack a target.
    The buffer `is_new` if it is only being created. With `measures_before`, what it held is measured in the same pass.
    """

    targets: Sequence[Selected]
    contributions: Sequence[Contribution]
    rule: Rule
    spec: NormSpec
    trim: Trim | None = None
    divisors: Sequence[float] = ()
    counts_zeros: bool = False
    is_new: bool = False
    measures_before: bool = False

    @property
    def title(self) -> str:
        """As a progress bar shows it."""
        return "adding"

    def empty(self) -> Tallies[Measurement]:
        """Of all targets: after the gradients were added and, if that is measured, before."""
        return Tallies([Measurement(self.targets, self.spec) for _ in range(1 + self.measures_before)])

    def nbytes(self, destination: Destination) -> int:
        """Bytes of the gradients, and of the buffer where it is read."""
        gradients = sum(one.tensor.nbytes for part in self.contributions for one in part.tensors.values())
        return gradients + destination.nbytes(self.targets if self.rule.keeps else ())

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[OnBlock]:
        """One for each block of the buffer, small enough for its float64 sums to stay in a core's cache."""
        wanted = by_shard(self.targets)
        itemsizes = {STORAGE[one.tensor.dtype].itemsize for one in self.targets}
        tiles = tuning.SUM_TILES * _times_larger(backend)
        nbytes = TILE * max([tiles * min(itemsizes), *itemsizes]) if itemsizes else TILE
        blocks = destination.blocks(wanted, TILE, nbytes)
        if self.divisors:
            blocks = chain.from_iterable(cut_where(one, self.divisors) for one in blocks)
        return (OnBlock(self._add, one) for one in blocks)

    def parts(self, destination: Destination) -> Iterator[Part]:
        """One for each file of the buffer, with what is added to it, whichever files that is in."""
        wanted = by_shard(self.targets)
        for shard in destination.shards or wanted:
            numbers = [number for number, _ in wanted.get(shard, ())]
            place = {number: position for position, number in enumerate(numbers)}
            own = [
                one._replace(tensors={place[n]: one.tensors[n] for n in numbers if n in one.tensors})
                for one in self.contributions
            ]
            gradients = [selected for one in own for selected in one.tensors.values()]
            reads = dict.fromkeys([*([] if self.is_new else [shard]), *(one.shard for one in gradients)])
            nbytes = shard.size + sum(one.tensor.nbytes for one in gradients)
            targets = [self.targets[number] for number in numbers]
            divisors = [self.divisors[number] for number in numbers] if self.divisors else ()
            work = self._replace(targets=targets, contributions=own, divisors=divisors)
            places = [(number, 0) for number in numbers]
            yield Part(work, places, list(reads), shard if destination.count else None, nbytes)

    def _add(self, block: Block, worker: Worker, found: Tallies[Measurement]) -> None:
        channel, backend = worker.channel, worker.backend
        view = channel.memory("block", block.end - block.begin)
        pieces = pieces_of(block)
        covered = sum(piece.elements * STORAGE[piece.dtype].itemsize for piece in pieces) == len(view)
        reads = not self.is_new and (self.rule.keeps or not covered)
        if reads:
            channel.read(block.shard, block.begin, view)
            worker.destination.keep(channel, block, view)
        elif not covered:
            view[:] = bytes(len(view))
        data = view
        if pieces:
            data = backend.to_device(view, copies=reads or not covered, align=pieces[0].offset)
            sums = [backend.tile_sums(data, pieces, self.spec)] if self.measures_before else []
            sums.insert(
                0, backend.accumulate(data, pieces, self.sources(block, worker), self.rule_of(block), self.spec)
            )
            for measurement, each in zip(found.each, sums, strict=True):
                measurement.add(block, each)
        worker.store(block, data)

    def rule_of(self, block: Block) -> Rule:
        """The rule for the targets of a block."""
        return self.rule._replace(divisor=self.divisors[block.spans[0].tensor]) if self.divisors else self.rule

    def sources(self, block: Block, worker: Worker) -> Iterator[tuple[memoryview, list[Addend]]]:
        """What is added to a block, a batch at a time."""
        if self.trim is not None:
            return reduced(self.trim, self.contributions, self.targets, block, worker, fills=self.counts_zeros)
        batch = tuning.BATCH_BYTES * _times_larger(worker.backend)
        return read(self.contributions, self.targets, block, worker.channel, batch, fills=self.counts_zeros)


def _times_larger(backend: Backend) -> int:
    """How many times larger than on the CPU blocks should be."""
    return backend.block_bytes // tuning.BLOCK_BYTES
