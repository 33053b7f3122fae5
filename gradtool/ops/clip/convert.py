"""Scaled tensors in another storage type, for `clip --dtype`: where they are in new files, and the pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Self

from gradtool.backends.storage import STORAGE
from gradtool.backends.values import Addend, AddMode, NormSpec, Piece
from gradtool.errors import BadInputError, call, option, say
from gradtool.ops.passes import Measurement, Scaling, pieces_of
from gradtool.reduction import TILE
from gradtool.store.format.gradset import Selected
from gradtool.store.format.layout import new_tensor
from gradtool.store.format.tensors import BITS
from gradtool.store.io.destination import FilePlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.backends.protocol import Backend
    from gradtool.engines.worker import Worker
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.destination import Destination, NewFile
    from gradtool.store.source import SmallFile
    from gradtool.store.transaction.output import Output

# As float64, a block takes up to eight times as much. It must have room for a tile of F64.
_BLOCK_BYTES = 8 * TILE


def convert(output: Output, scaling: Scaling, dtype: str) -> tuple[Convert, list[NewFile], list[SmallFile]]:
    """Return a pass that stores what another pass scales in a type, the new files and the indexes.

    Raises:
        BadInputError: the header of a new file would be beyond the limits of what is read, or a tensor lies in pieces.
    """
    selected = scaling.selected
    for shard, tensor in selected:
        if shard not in shard.files:
            message = say("lies in pieces, and {} needs it whole", option("dtype"))
            hint = say("put the pieces together first, with {}", call("accumulate", shard.name, output_dir="DIR"))
            raise BadInputError(message, file=shard.name, tensor=tensor.name, code="pieces", hint=hint)
    new = {entry: entry._replace(tensor=new_tensor(entry.tensor.name, dtype, entry.tensor.shape)) for entry in selected}
    plan, from_pass = FilePlan(), set(new.values())
    for shard in output.shards:
        order = [new.get(entry, entry).tensor for entry in (Selected(shard, tensor) for tensor in shard.tensors)]
        if any(tensor.dtype != old.dtype for tensor, old in zip(order, shard.tensors, strict=True)):
            # As the format's writers have it: larger elements first, so that every tensor is aligned.
            order.sort(key=lambda tensor: -BITS[tensor.dtype])
        plan.add(shard, order, from_pass)
    # The pass measures what is stored, so nothing needs to be summed where it scales.
    unmeasured = replace(scaling, spec=NormSpec(math.inf, scaling.spec.drop_nonfinite))
    targets = [plan.places[new[entry]] for entry in selected]
    files, indexes = list(plan.files.values()), plan.indexes(output.sets, is_elsewhere=True)
    return Convert(selected, scaling.spec, unmeasured, targets), files, indexes


@dataclass(frozen=True, eq=False, repr=False)
class Convert(Scaling):
    """Widens tensors to float64, scales them, and rounds them once to the type of their `targets` in new files."""

    by_tensor = ("targets",)

    scaling: Scaling
    targets: Sequence[Selected]

    def block_bytes(self, backend: Backend, destination: Destination) -> int:  # noqa: ARG002 - of any
        return _BLOCK_BYTES

    def restricted_to(self, selected: Sequence[Selected], places: Sequence[tuple[int, int]]) -> Self:
        return replace(super().restricted_to(selected, places), scaling=self.scaling.restricted_to(selected, places))

    def work(self, block: Block, worker: Worker, tally: Measurement) -> None:
        backend, pieces, mode = worker.backend, pieces_of(block), AddMode(buffer_weight=0)
        starts = [0, *accumulate(piece.elements for piece in pieces)]
        with worker.memory(8 * starts[-1]) as wide:
            wide_pieces = [Piece("F64", 8 * at, piece.elements) for at, piece in zip(starts, pieces, strict=False)]
            values = [Addend(*piece, at, 1.0) for at, piece in zip(starts, pieces, strict=False)]
            with worker.memory(block.end - block.begin) as view:
                worker.read(block.shard, block.begin, view)
                backend.accumulate(wide, wide_pieces, iter([(view, values)]), mode, self.scaling.spec)
            scaled = self.scaling.scale(wide, wide_pieces, block, worker)

            new_pieces, offset = [], 0
            for span in block.spans:
                dtype = self.targets[span.tensor].tensor.dtype
                new_pieces.append(Piece(dtype, offset, span.elements))
                offset += span.elements * STORAGE[dtype].itemsize
            with worker.memory(offset) as new:
                sources = iter([(wide, [Addend("F64", 0, starts[-1], 0, 1.0)])])
                sums = backend.accumulate(new, new_pieces, sources, mode, self.spec)
                for number, (zeros, subnormals) in enumerate(zip(scaled.new_zeros, scaled.new_subnormals, strict=True)):
                    sums.new_zeros[number] += zeros
                    sums.new_subnormals[number] += subnormals
                tally.add(block, sums)
                for span, (dtype, offset, elements) in zip(block.spans, new_pieces, strict=True):
                    itemsize = STORAGE[dtype].itemsize
                    begin = self.targets[span.tensor].tensor.begin + span.start * itemsize
                    worker.destination.write_range(
                        worker, block.shard, begin, new[offset : offset + elements * itemsize]
                    )
