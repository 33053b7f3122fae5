"""The pass of a comparison: two gradient sets side by side, block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradtool.backends.protocol import Piece
from gradtool.backends.storage import STORAGE
from gradtool.engines.worker import reads_files
from gradtool.ops.aligned_read import read_one
from gradtool.ops.diff.comparison import Comparison
from gradtool.ops.passes import ReadingPass, pieces_of
from gradtool.reduction import TILE
from gradtool.store.io.blocks import BRIDGE_BYTES, Span, block_around

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends.protocol import Backend, Tolerance
    from gradtool.engines.worker import Worker
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination


# Of a part of a block: each takes Python's own work, so shorter ones are all read first.
_PART_BYTES = 64 << 10


@dataclass(frozen=True, eq=False, repr=False)
class Compare(ReadingPass[Comparison]):
    """Compares each of the selected tensors with the other in its place."""

    title: ClassVar = "comparing"
    by_tensor = ("others",)

    others: Sequence[Selected]
    tolerance: Tolerance

    @property
    def beside(self) -> Sequence[Selected]:
        """What the tensors are compared with."""
        return self.others

    def tally(self) -> Comparison:
        """Begin with nothing."""
        return Comparison(self.selected)

    def block_bytes(self, backend: Backend, destination: Destination) -> int:
        """Return a size that, with what a block is compared with, is about as large as usual."""
        nbytes = max(super().block_bytes(backend, destination), 2 * backend.block_bytes)
        ours, theirs = ([STORAGE[one.tensor.dtype].itemsize for one in side] for side in (self.selected, self.others))
        return max(TILE * max(ours), nbytes * min(ours) // (min(ours) + max(theirs))) if ours else nbytes

    def work(self, block: Block, worker: Worker, tally: Comparison) -> None:
        """Compare a block."""
        reads = reads_files(worker.backend, worker.destination, self.spec)
        parts = list(_side_by_side(block, self.others)) if reads else []
        if not reads or (len(parts) - 1) * _PART_BYTES > block.end - block.begin:
            self._load(block, worker, tally)
            return
        for ours, theirs in parts:
            self._stream(ours, theirs, worker, tally)

    def _stream(self, ours: Block, theirs: Block, worker: Worker, tally: Comparison) -> None:
        """Compare two blocks that the backend reads."""
        with worker.file_block(ours, sides=2) as a, worker.file_block(theirs, sides=2) as b:
            differences = worker.backend.differences(a, pieces_of(ours), b, pieces_of(theirs), self.tolerance)
        tally.add(ours, differences)

    def _load(self, block: Block, worker: Worker, tally: Comparison) -> None:
        """Read a block and all that it is compared with, and compare them."""
        beside = {span.tensor: self.others[span.tensor] for span in block.spans}
        with worker.load(block) as ours, read_one(beside, self.selected, block, worker) as (view, addends):
            pieces = [Piece(addend.dtype, addend.offset, addend.elements) for addend in addends]
            theirs = worker.backend.to_device(view, align=pieces[0].offset)
            differences = worker.backend.differences(ours.data, pieces_of(block), theirs, pieces, self.tolerance)
        tally.add(block, differences)


def _side_by_side(block: Block, others: Sequence[Selected]) -> Iterator[tuple[Block, Block]]:
    """A block in parts, each with a block of what it is compared with, whose tensors follow one another in a file."""
    ours: list[Span] = []
    theirs: list[Span] = []
    shard, end = block.shard, 0
    for span in block.spans:
        tensor = others[span.tensor].tensor
        itemsize = STORAGE[tensor.dtype].itemsize
        begin = tensor.begin + span.start * itemsize
        if ours and (others[span.tensor].shard is not shard or not 0 <= begin - end <= BRIDGE_BYTES):
            yield block_around(block.shard, ours), block_around(shard, theirs)
            ours, theirs = [], []
        shard, end = others[span.tensor].shard, begin + span.elements * itemsize
        ours.append(span._replace(offset=block.begin + span.offset))
        theirs.append(span._replace(dtype=tensor.dtype, offset=begin))
    if ours:
        yield block_around(block.shard, ours), block_around(shard, theirs)
