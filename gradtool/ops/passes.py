"""The passes that most operations are made of, as values: measure tensors, rewrite them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self

from gradtool import tuning
from gradtool.backends.protocol import NormSpec, Piece
from gradtool.engines.protocol import Result
from gradtool.engines.worker import reads_files
from gradtool.ops.measurement import Measurement
from gradtool.reduction import TILE
from gradtool.store.format.gradset import Selected
from gradtool.store.format.tensors import BITS, Tensor
from gradtool.store.io.blocks import Block, halved
from gradtool.store.io.destination import DISCARD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gradtool.backends.protocol import Backend, BlockSums, Data
    from gradtool.engines.cluster.work import Part
    from gradtool.engines.worker import Worker
    from gradtool.store.format.tensors import Shard
    from gradtool.store.io.blocks import Span
    from gradtool.store.io.destination import Destination, Wanted, WrittenFiles


@dataclass(frozen=True, eq=False, repr=False)
class TensorPass(Generic[Result]):
    """A pass over the blocks of tensors, which it sums as `spec` says; it may read others beside them.

    A pass says what it collects (`tally`), and what to do with a block (`work`). This one does nothing, so that the
    destination alone writes: headers, copies and zeros.
    """

    title: ClassVar = "writing"
    # The fields that have a value for each of the tensors, or none at all.
    by_tensor: ClassVar[Sequence[str]] = ()

    selected: Sequence[Selected]
    spec: NormSpec

    @property
    def beside(self) -> Sequence[Selected]:
        """The tensors that are read beside those selected."""
        return ()

    @property
    def reads_selected(self) -> bool:
        """Whether the files of the tensors are read; not where they are only being created."""
        return True

    def tally(self) -> Result:
        """Begin with nothing."""
        return Measurement(self.selected, self.spec)  # type: ignore[return-value]

    def work(self, task: Any, worker: Worker, tally: Result) -> None:
        """Work on a block, and add to the tally."""

    def nbytes(self, destination: WrittenFiles) -> int:
        """Count the bytes of the tensors, or of whole files that are written anew."""
        return destination.nbytes([*self.selected, *self.beside])

    def block_bytes(self, backend: Backend, destination: Destination) -> int:  # noqa: ARG002 - some depend on it
        """Return the size of blocks."""
        return backend.block_bytes

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[Any]:
        """Yield the blocks."""
        return destination.blocks(by_shard(self.selected), TILE, self.block_bytes(backend, destination))

    def halves(self, task: Any) -> Sequence[Any]:
        """Cut a block in two; other tasks stay whole."""
        return halved(task, TILE) if isinstance(task, Block) else ()

    def parts(self, destination: WrittenFiles) -> Iterator[Part]:
        """Yield a part for each new file; or, where nothing is written, for a stretch of a file or several small ones.

        What reads tensors beside others has a part for each file.
        """
        from gradtool.engines.cluster.work import Part  # not needed by threads

        wanted, by_file = by_shard(self.selected), destination.count or self.beside or not self.reads_selected
        for shard in destination.shards or (wanted if by_file else ()):
            places = [(number, 0) for number, _ in wanted.get(shard, ())]
            work = self.restricted_to([self.selected[number] for number, _ in places], places)
            reads = [*([shard] if self.reads_selected else []), *(other.shard for other in work.beside)]
            nbytes = shard.size + sum(other.tensor.nbytes for other in work.beside)
            yield Part(work, places, _files_of(reads), shard if destination.count else None, nbytes)
        blocks = () if by_file else DISCARD.blocks(wanted, TILE, tuning.PART_BYTES)
        for batch in _batches(blocks, tuning.PART_BYTES // tuning.SMALL_PARTS):
            places = [(span.tensor, span.start) for block in batch for span in block.spans]
            stretches = [Selected(block.shard, _stretch(block, span)) for block in batch for span in block.spans]
            reads, nbytes = _files_of(block.shard for block in batch), sum(block.end - block.begin for block in batch)
            yield Part(self.restricted_to(stretches, places), places, reads, None, nbytes)

    def restricted_to(self, selected: Sequence[Selected], places: Sequence[tuple[int, int]]) -> Self:
        """Return the same for parts of tensors, whose places name the whole ones."""
        values = {name: getattr(self, name) for name in self.by_tensor}
        fewer: dict[str, Any] = {name: [each[number] for number, _ in places] for name, each in values.items() if each}
        return replace(self, selected=selected, **fewer)


@dataclass(frozen=True, eq=False, repr=False)
class ReadingPass(TensorPass[Result]):
    """A pass that only looks at blocks, which the backend may read itself."""

    def block_bytes(self, backend: Backend, destination: Destination) -> int:
        """Return a larger size where the backend reads blocks itself, and nothing is to be written."""
        shards = {shard for shard, _ in chain(self.selected, self.beside)}
        if reads_files(backend, destination, self.spec, shards):
            return tuning.STREAM_BLOCKS * tuning.BLOCK_BYTES
        return backend.block_bytes


@dataclass(frozen=True, eq=False, repr=False)
class Measure(ReadingPass[Measurement]):
    """Sums tensors, and counts what is not finite. Blocks may stay on the device for the next pass."""

    title: ClassVar = "measuring"

    keep_on_device: bool = False

    def restricted_to(self, selected: Sequence[Selected], places: Sequence[tuple[int, int]]) -> Self:
        """Return the same; the next pass may run anywhere."""
        return replace(super().restricted_to(selected, places), keep_on_device=False)

    def work(self, block: Block, worker: Worker, tally: Measurement) -> None:
        """Sum a block."""
        with worker.view(block, self.spec) as data:
            sums = worker.backend.tile_sums(data, pieces_of(block), self.spec)
            if self.keep_on_device:
                worker.keep_on_device(block, data)
        tally.add(block, sums)


class Scaling(TensorPass[Measurement]):
    """Multiplies blocks in place, and measures what is written."""

    title: ClassVar = "clipping"

    def work(self, block: Block, worker: Worker, tally: Measurement) -> None:
        """Rewrite a block."""
        with worker.load(block) as loaded:
            if block.spans:
                tally.add(block, self.scale(loaded.data, pieces_of(block), block, worker))
            worker.store(loaded)

    def scale(self, data: Data, pieces: Sequence[Piece], block: Block, worker: Worker) -> BlockSums:
        """Multiply the spans of a block, which are these pieces of the data: as they are stored, or as F64."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class Rewrite(Scaling):
    """Multiplies tensors by their factors, limits them to [-limit, limit], and measures what is written."""

    by_tensor = ("factors",)

    factors: Sequence[float]
    limit: float

    def scale(self, data: Data, pieces: Sequence[Piece], block: Block, worker: Worker) -> BlockSums:
        """Multiply each span by the factor of its tensor."""
        factors = [self.factors[span.tensor] for span in block.spans]
        return worker.backend.scale(data, pieces, factors, self.limit, self.spec)


def _batches(blocks: Iterable[Block], nbytes: int) -> Iterator[list[Block]]:
    """Put small blocks together."""
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


def _files_of(shards: Iterable[Shard]) -> list[Shard]:
    """Return the files that shards are read from, each once."""
    return list(dict.fromkeys(file for shard in dict.fromkeys(shards) for file in shard.files))


def _stretch(block: Block, span: Span) -> Tensor:
    """Return a part of a tensor, as a tensor."""
    begin = block.begin + span.offset
    return Tensor("", span.dtype, (span.elements,), begin, begin + span.elements * BITS[span.dtype] // 8)


def pieces_of(block: Block) -> list[Piece]:
    """Return the spans of a block, as a backend takes them."""
    return [Piece(span.dtype, span.offset, span.elements) for span in block.spans]


def in_file_order(selected: Iterable[Selected]) -> list[Selected]:
    """Sort tensors as passes need them: each once, file by file, in the order of their bytes."""
    tensors: dict[Shard, set[Tensor]] = {}
    for shard, tensor in selected:
        tensors.setdefault(shard, set()).add(tensor)
    return [Selected(shard, tensor) for shard in tensors for tensor in sorted(tensors[shard], key=lambda t: t.begin)]


def by_shard(selected: Sequence[Selected]) -> Wanted:
    """Return the tensors of each file, with their numbers."""
    groups = groupby(enumerate(selected), key=lambda entry: entry[1].shard)
    return {shard: [(number, tensor) for number, (_, tensor) in group] for shard, group in groups}
