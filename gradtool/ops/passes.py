"""The passes that most operations are made of, as values: measure tensors, rewrite them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, Self

from gradtool.backends import NormSpec, Piece
from gradtool.engines import OnBlock
from gradtool.ops.measurement import Measurement
from gradtool.reduction import TILE
from gradtool.store.format.gradset import Selected

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from gradtool.backends import Backend
    from gradtool.engines import Worker
    from gradtool.store.format.header import Shard
    from gradtool.store.format.tensors import Tensor
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination, Wanted


@dataclass(frozen=True)
class TensorPass:
    """A pass over the blocks of tensors, which it measures with `spec`; `shards` limits it to those files."""

    title: ClassVar = "reading"

    selected: Sequence[Selected]
    spec: NormSpec
    shards: Collection[Shard] | None = field(default=None, kw_only=True)

    def over(self, shards: Collection[Shard]) -> Self:
        """The part of the pass that is about those files; what the parts find is merged."""
        return replace(self, shards=shards)

    def empty(self) -> Measurement:
        """Of all tensors, whatever the files."""
        return Measurement(self.selected, self.spec)

    def nbytes(self, destination: Destination) -> int:
        """Bytes of the tensors, or of whole files that are written anew."""
        return destination.nbytes(self.selected)

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[OnBlock]:
        """One for each block."""
        wanted = by_shard(self.selected, self.shards)
        return (OnBlock(self.work, one) for one in destination.blocks(wanted, TILE, backend.block_bytes))

    def work(self, block: Block, worker: Worker, found: Measurement) -> None:
        """What a pass does with a block."""
        raise NotImplementedError


@dataclass(frozen=True)
class Measure(TensorPass):
    """Sums tensors, and counts what is not finite. With `leaves`, blocks stay on the device for the next pass."""

    title: ClassVar = "measuring"

    leaves: bool = False

    def work(self, block: Block, worker: Worker, found: Measurement) -> None:
        """Sum a block."""
        data = worker.load(block)
        found.add(block, worker.backend.tile_sums(data, pieces_of(block), self.spec))
        if self.leaves:
            worker.leave(block, data)


@dataclass(frozen=True)
class _Nothing(Measure):
    title: ClassVar = "writing"


# No work of its own, for what a destination writes by itself.
NOTHING = _Nothing((), NormSpec())


@dataclass(frozen=True)
class Rewrite(TensorPass):
    """Multiplies tensors by their factors, limits them to [-limit, limit], and measures what is written."""

    title: ClassVar = "clipping"

    factors: Sequence[float]
    limit: float

    def work(self, block: Block, worker: Worker, found: Measurement) -> None:
        """Rewrite a block."""
        data = worker.load(block)
        if block.spans:
            factors = [self.factors[span.tensor] for span in block.spans]
            found.add(block, worker.backend.scale(data, pieces_of(block), factors, self.limit, self.spec))
        worker.store(block, data)


def pieces_of(block: Block) -> list[Piece]:
    """The spans of a block, as a backend takes them."""
    return [Piece(span.dtype, span.offset, span.elements) for span in block.spans]


def in_file_order(selected: Iterable[Selected]) -> list[Selected]:
    """Tensors in the order that passes need: each once, file by file, in the order of their bytes."""
    tensors: dict[Shard, set[Tensor]] = {}
    for one in selected:
        tensors.setdefault(one.shard, set()).add(one.tensor)
    return [Selected(shard, one) for shard, found in tensors.items() for one in sorted(found, key=lambda t: t.begin)]


def by_shard(selected: Sequence[Selected], shards: Collection[Shard] | None = None) -> Wanted:
    """The tensors of each file with their numbers; only of the given files, if there are any given."""
    groups = groupby(enumerate(selected), key=lambda entry: entry[1].shard)
    wanted = {shard: [(number, one.tensor) for number, one in group] for shard, group in groups}
    return wanted if shards is None else {shard: wanted[shard] for shard in wanted if shard in shards}
