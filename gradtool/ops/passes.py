"""The passes that most operations are made of, as values: measure tensors, rewrite them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, Generic, Self

from gradtool import tuning
from gradtool.backends.protocol import NormSpec, Piece
from gradtool.engines import Found, OnBlock, Part, block_bytes
from gradtool.ops.measurement import Measurement
from gradtool.reduction import TILE
from gradtool.store.format.gradset import Selected
from gradtool.store.format.tensors import BITS, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gradtool.backends.protocol import Backend, BlockSums, Data
    from gradtool.engines import Worker
    from gradtool.store.format.header import Shard
    from gradtool.store.io.blocks import Block, Span
    from gradtool.store.transaction.destination import Destination, Wanted


@dataclass(frozen=True, init=False, eq=False, repr=False)
class TensorPass(Generic[Found]):
    """A pass over the blocks of tensors, which it sums as `spec` says; it may read others beside them."""

    title: ClassVar = "reading"

    selected: Sequence[Selected]
    spec: NormSpec

    @property
    def beside(self) -> Sequence[Selected]:
        """The tensors that are read beside those selected, each in the place of its partner; or none."""
        return ()

    def empty(self) -> Found:
        """Begin with nothing."""
        raise NotImplementedError

    def work(self, block: Block, worker: Worker, found: Found) -> None:
        """Work on a block."""
        raise NotImplementedError

    def nbytes(self, destination: Destination) -> int:
        """Count the bytes of the tensors, or of whole files that are written anew."""
        return destination.nbytes([*self.selected, *self.beside])

    def block_bytes(self, backend: Backend, destination: Destination) -> int:  # noqa: ARG002 - some depend on it
        """Return the size of blocks."""
        return backend.block_bytes

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[OnBlock]:
        """Yield a task for each block."""
        blocks = destination.blocks(by_shard(self.selected), TILE, self.block_bytes(backend, destination))
        return (OnBlock(self.work, block) for block in blocks)

    def parts(self, destination: Destination) -> Iterator[Part]:
        """Yield a part for each new file; or, where nothing is written, for a stretch of a file or several small ones.

        What reads tensors beside others has a part for each file.
        """
        wanted = by_shard(self.selected)
        for shard in wanted if self.beside else destination.shards:
            places = [(number, 0) for number, _ in wanted.get(shard, ())]
            own = [Selected(shard, tensor) for _, tensor in wanted.get(shard, ())]
            beside = [self.beside[number] for number, _ in places] if self.beside else []
            reads = list(dict.fromkeys([shard, *(other.shard for other in beside)]))
            nbytes = shard.size + sum(other.tensor.nbytes for other in beside)
            yield Part(self.about(own, places), places, reads, shard if destination.count else None, nbytes)
        blocks = () if destination.count or self.beside else destination.blocks(wanted, TILE, tuning.PART_BYTES)
        for batch in _batches(blocks, tuning.PART_BYTES // tuning.SMALL_PARTS):
            places = [(span.tensor, span.start) for block in batch for span in block.spans]
            own = [Selected(block.shard, _stretch(block, span)) for block in batch for span in block.spans]
            nbytes = sum(block.end - block.begin for block in batch)
            yield Part(self.about(own, places), places, list(dict.fromkeys(one.shard for one in batch)), None, nbytes)

    def about(self, selected: Sequence[Selected], places: Sequence[tuple[int, int]]) -> Self:  # noqa: ARG002
        """Return the same for parts of tensors, whose places name the whole ones."""
        return replace(self, selected=selected)


@dataclass(frozen=True, eq=False, repr=False)
class ReadingPass(TensorPass[Found]):
    """A pass that only looks at blocks, which the backend may read itself."""

    def block_bytes(self, backend: Backend, destination: Destination) -> int:
        """Return a larger size where the backend reads blocks itself, and nothing is to be written."""
        return block_bytes(backend, destination, self.spec)


@dataclass(frozen=True, eq=False, repr=False)
class Measure(ReadingPass[Measurement]):
    """Sums tensors, and counts what is not finite. With `leaves`, blocks stay on the device for the next pass."""

    title: ClassVar = "measuring"

    leaves: bool = False

    def empty(self) -> Measurement:
        """Begin with nothing."""
        return Measurement(self.selected, self.spec)

    def about(self, selected: Sequence[Selected], places: Sequence[tuple[int, int]]) -> Self:
        """Return the same; the next pass may run anywhere."""
        return replace(super().about(selected, places), leaves=False)

    def work(self, block: Block, worker: Worker, found: Measurement) -> None:
        """Sum a block."""
        with worker.look(block, self.spec) as data:
            sums = worker.backend.tile_sums(data, pieces_of(block), self.spec)
        found.add(block, sums)
        if self.leaves:
            worker.leave(block, data)


class _Nothing(Measure):
    title: ClassVar = "writing"


# No work of its own, for what a destination writes by itself.
NOTHING = _Nothing((), NormSpec())


class Scaling(TensorPass[Measurement]):
    """Multiplies blocks in place, and measures what is written."""

    title: ClassVar = "clipping"

    def empty(self) -> Measurement:
        """Begin with nothing."""
        return Measurement(self.selected, self.spec)

    def work(self, block: Block, worker: Worker, found: Measurement) -> None:
        """Rewrite a block."""
        data = worker.load(block)
        if block.spans:
            found.add(block, self.scale(data, pieces_of(block), block, worker))
        worker.store(block, data)

    def scale(self, data: Data, pieces: Sequence[Piece], block: Block, worker: Worker) -> BlockSums:
        """Multiply the spans of a block, which are these pieces of the data: as they are stored, or as F64."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class Rewrite(Scaling):
    """Multiplies tensors by their factors, limits them to [-limit, limit], and measures what is written."""

    factors: Sequence[float]
    limit: float

    def about(self, selected: Sequence[Selected], places: Sequence[tuple[int, int]]) -> Self:
        """The same with their factors."""
        factors = [self.factors[number] for number, _ in places]
        return replace(super().about(selected, places), factors=factors)

    def scale(self, data: Data, pieces: Sequence[Piece], block: Block, worker: Worker) -> BlockSums:
        """Multiply each span by the factor of its tensor."""
        factors = [self.factors[span.tensor] for span in block.spans]
        return worker.backend.scale(data, pieces, factors, self.limit, self.spec)


def _batches(blocks: Iterable[Block], nbytes: int) -> Iterator[list[Block]]:
    """The blocks, the small ones together."""
    batch: list[Block] = []
    size = 0
    for block in blocks:
        size += block.end - block.begin
        if batch and (size > nbytes or len(batch) == tuning.PART_FILES):
            yield batch
            batch, size = [], block.end - block.begin
        batch.append(block)
    if batch:
        yield batch


def _stretch(block: Block, span: Span) -> Tensor:
    """A part of a tensor, as a tensor."""
    begin = block.begin + span.offset
    return Tensor("", span.dtype, (span.elements,), begin, begin + span.elements * BITS[span.dtype] // 8)


def pieces_of(block: Block) -> list[Piece]:
    """The spans of a block, as a backend takes them."""
    return [Piece(span.dtype, span.offset, span.elements) for span in block.spans]


def in_file_order(selected: Iterable[Selected]) -> list[Selected]:
    """Tensors in the order that passes need: each once, file by file, in the order of their bytes."""
    tensors: dict[Shard, set[Tensor]] = {}
    for one in selected:
        tensors.setdefault(one.shard, set()).add(one.tensor)
    return [Selected(shard, one) for shard, found in tensors.items() for one in sorted(found, key=lambda t: t.begin)]


def by_shard(selected: Sequence[Selected]) -> Wanted:
    """The tensors of each file, with their numbers."""
    groups = groupby(enumerate(selected), key=lambda entry: entry[1].shard)
    return {shard: [(number, one.tensor) for number, one in group] for shard, group in groups}
