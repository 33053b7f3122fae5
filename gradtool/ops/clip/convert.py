"""Writes scaled tensors in another storage type: `clip --dtype`. Where they are in their new files, and the pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Self

from gradtool.backends.protocol import Addend, AddMode, NormSpec, Piece
from gradtool.backends.storage import STORAGE
from gradtool.engines.passes import Pass, by_shard
from gradtool.ops.passes import Measurement, Scaling, pieces_of
from gradtool.reduction import TILE
from gradtool.store.format.gradset import Selected
from gradtool.store.format.index import reindexed
from gradtool.store.format.layout import lay_out, new_tensor
from gradtool.store.format.tensors import BITS
from gradtool.store.io.destination import NewFile

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gradtool.backends.protocol import Backend
    from gradtool.engines.worker import Worker
    from gradtool.store.format.tensors import Shard, Tensor
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.destination import Destination
    from gradtool.store.source import SmallFile
    from gradtool.store.transaction.output import Output

# As float64, a block takes up to eight times as much. It must have room for a tile of F64.
_BLOCK_BYTES = 8 * TILE


def converted(output: Output, scaling: Scaling, dtype: str) -> tuple[Convert, list[NewFile], list[SmallFile]]:
    """Return a pass that stores what another one scales in a type, the new files and the indexes.

    Raises:
        BadInputError: the header of a new file would be beyond the limits of what is read.
    """
    wanted = by_shard(scaling.selected)
    names = {shard: {tensor.name for _, tensor in wanted.get(shard, ())} for shard in output.shards}
    files = {shard: _new_file(shard, names[shard], dtype) for shard in output.shards}
    placed = {(shard, tensor.name): tensor for shard, (_, tensors) in files.items() for tensor in tensors}
    targets = [Selected(shard, placed[shard, tensor.name]) for shard, tensor in scaling.selected]
    indexes = [
        reindexed(index, {shard.file_name: files[shard][1] for shard in owner.shards})
        for owner in output.sets
        if (index := owner.read_index()) is not None
    ]
    # The pass measures what is stored, so nothing needs to be summed where it scales.
    quick = replace(scaling, spec=NormSpec(math.inf, scaling.spec.drop_nonfinite))
    return Convert(scaling.selected, scaling.spec, quick, targets), [file for file, _ in files.values()], indexes


def _new_file(shard: Shard, names: Collection[str], dtype: str) -> tuple[NewFile, Sequence[Tensor]]:
    """Return the new file of a shard in which the named tensors have another type, and the tensors in it."""
    tensors = [new_tensor(old.name, dtype, old.shape) if old.name in names else old for old in shard.tensors]
    header, placed, size, copies = b"", shard.tensors, shard.size, [(0, shard.data_start, 0)]
    if any(new.dtype != old.dtype for new, old in zip(tensors, shard.tensors, strict=True)):
        # As the format's writers have it: larger elements first, so that every tensor is aligned.
        header, new = lay_out(shard.name, sorted(tensors, key=lambda tensor: -BITS[tensor.dtype]), shard.metadata)
        placed, size, copies = new.tensors, new.size, []
    begins = {tensor.name: tensor.begin for tensor in placed}
    copies += [(old.begin, old.end, begins[old.name]) for old in shard.tensors if old.name not in names]
    return NewFile(shard, size, header, copies), placed


@dataclass(frozen=True, eq=False, repr=False)
class Convert(Pass[Measurement]):
    """Widens tensors to float64, scales them, and rounds them once to the type of their `targets` in new files."""

    title = "clipping"
    by_tensor = ("targets",)

    scaling: Scaling
    targets: Sequence[Selected]

    def tally(self) -> Measurement:
        """Begin with nothing."""
        return Measurement(self.selected, self.spec)

    def block_bytes(self, backend: Backend, destination: Destination) -> int:  # noqa: ARG002 - of any
        """Return a size that has room for a tile of F64."""
        return _BLOCK_BYTES

    def restricted_to(self, selected: Sequence[Selected], places: Sequence[tuple[int, int]]) -> Self:
        """Restrict the scaling, too."""
        return replace(super().restricted_to(selected, places), scaling=self.scaling.restricted_to(selected, places))

    def work(self, block: Block, worker: Worker, tally: Measurement) -> None:
        """Convert a block."""
        backend, stored, sets = worker.backend, pieces_of(block), AddMode(include_buffer=False)
        first = [0, *accumulate(piece.elements for piece in stored)]
        with worker.memory(8 * first[-1]) as wide:
            pieces = [Piece("F64", 8 * at, piece.elements) for at, piece in zip(first, stored, strict=False)]
            values = [Addend(*piece, at, 1.0) for at, piece in zip(first, stored, strict=False)]
            with worker.memory(block.end - block.begin) as view:
                worker.read(block.shard, block.begin, view)
                backend.accumulate(wide, pieces, iter([(view, values)]), sets, self.scaling.spec)
            scaled = self.scaling.scale(wide, pieces, block, worker)

            targets, offset = [], 0
            for span in block.spans:
                dtype = self.targets[span.tensor].tensor.dtype
                targets.append(Piece(dtype, offset, span.elements))
                offset += span.elements * STORAGE[dtype].itemsize
            with worker.memory(offset) as new:
                sums = [(wide, [Addend("F64", 0, first[-1], 0, 1.0)])]
                written = backend.accumulate(new, targets, iter(sums), sets, self.spec)
                for number, (zeros, subnormals) in enumerate(zip(scaled.new_zeros, scaled.new_subnormals, strict=True)):
                    written.new_zeros[number] += zeros
                    written.new_subnormals[number] += subnormals
                tally.add(block, written)
                for span, (dtype, offset, elements) in zip(block.spans, targets, strict=True):
                    itemsize = STORAGE[dtype].itemsize
                    begin = self.targets[span.tensor].tensor.begin + span.start * itemsize
                    worker.destination.write_range(
                        worker, block.shard, begin, new[offset : offset + elements * itemsize]
                    )
