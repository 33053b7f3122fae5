"""The pass of a comparison: two gradient sets side by side, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends import NormSpec, Piece, Tolerance
from gradtool.backends.storage import STORAGE
from gradtool.engines import OnBlock, Part, block_bytes, reads_files
from gradtool.ops.beside import read_one
from gradtool.ops.diff.comparison import Comparison
from gradtool.ops.passes import by_shard, pieces_of
from gradtool.reduction import TILE
from gradtool.store.io.blocks import BRIDGE_BYTES, Span, block_around

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends import Backend
    from gradtool.engines import Worker
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination


# As sums of squares are read.
_SPEC = NormSpec()
# Of a part of a block: each takes Python's own work, so shorter ones are all read first.
_PART_BYTES = 64 << 10


class Compare(NamedTuple):
    """Compares each of the selected tensors with the other in its place."""

    selected: Sequence[Selected]
    others: Sequence[Selected]
    tolerance: Tolerance = Tolerance()

    @property
    def title(self) -> str:
        """As a progress bar shows it."""
        return "comparing"

    def empty(self) -> Comparison:
        """Of all tensors, whatever the files."""
        return Comparison(self.selected)

    def nbytes(self, destination: Destination) -> int:
        """Bytes of both sides."""
        return destination.nbytes([*self.selected, *self.others])

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[OnBlock]:
        """One for each block, which is about as large as usual, and so is what it is compared with."""
        wanted = by_shard(self.selected)
        ours, theirs = ([STORAGE[one.tensor.dtype].itemsize for one in side] for side in (self.selected, self.others))
        nbytes = max(block_bytes(backend, destination, _SPEC), 2 * backend.block_bytes)
        if ours:
            nbytes = max(TILE * max(ours), nbytes * min(ours) // (min(ours) + max(theirs)))
        return (OnBlock(self._compare, one) for one in destination.blocks(wanted, TILE, nbytes))

    def parts(self, destination: Destination) -> Iterator[Part]:  # noqa: ARG002 - nothing is written
        """One for each file, with what it is compared with, whichever files that is in."""
        for shard, tensors in by_shard(self.selected).items():
            numbers = [number for number, _ in tensors]
            ours, theirs = ([side[number] for number in numbers] for side in (self.selected, self.others))
            reads = list(dict.fromkeys([shard, *(one.shard for one in theirs)]))
            nbytes = sum(one.tensor.nbytes for one in (*ours, *theirs))
            work = self._replace(selected=ours, others=theirs)
            yield Part(work, [(number, 0) for number in numbers], reads, None, nbytes)

    def _compare(self, block: Block, worker: Worker, found: Comparison) -> None:
        reads = reads_files(worker.backend, worker.destination, _SPEC)
        parts = list(_side_by_side(block, self.others)) if reads else []
        if not reads or (len(parts) - 1) * _PART_BYTES > block.end - block.begin:
            self._load(block, worker, found)
            return
        for ours, theirs in parts:
            self._stream(ours, theirs, worker, found)

    def _stream(self, ours: Block, theirs: Block, worker: Worker, found: Comparison) -> None:
        """Compare two blocks that the backend reads."""
        with worker.lend(ours, "block", sides=2) as a, worker.lend(theirs, "gradients", sides=2) as b:
            differences = worker.backend.differences(a, pieces_of(ours), b, pieces_of(theirs), self.tolerance)
        found.add(ours, differences)

    def _load(self, block: Block, worker: Worker, found: Comparison) -> None:
        """Read a block and all that it is compared with, and compare them."""
        backend = worker.backend
        pieces = pieces_of(block)
        data = worker.load(block)
        beside = {span.tensor: self.others[span.tensor] for span in block.spans}
        view, addends = read_one(beside, self.selected, block, worker.channel)
        others = [Piece(one.dtype, one.offset, one.elements) for one in addends]
        theirs = backend.to_device(view, align=others[0].offset)
        found.add(block, backend.differences(data, pieces, theirs, others, self.tolerance))


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
