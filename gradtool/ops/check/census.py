"""The pass that looks at every value once: NaN, Inf, zeros, and the values at the ends of what their types hold."""

from __future__ import annotations

import math
import threading
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradtool.arrays import int64s
from gradtool.backends import NormSpec
from gradtool.engines import OnBlock
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import by_shard, pieces_of
from gradtool.reduction import TILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends import Backend
    from gradtool.engines import Worker
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.destination import Destination

# Nothing is summed. Non-finite values are counted, and the largest magnitude is that of the others.
_SPEC = NormSpec(math.inf, drop_nonfinite=True)


class Census:
    """Counts for each of some tensors, filled block by block from any thread."""

    def __init__(self, selected: Sequence[Selected]) -> None:
        self.facts = Measurement(selected, _SPEC)
        self.subnormal, self.saturated = (int64s(len(selected)) for _ in range(2))
        self._lock = threading.Lock()

    def add(self, block: Block, worker: Worker) -> None:
        """Count the values of a block."""
        data, pieces = worker.load(block), pieces_of(block)
        # Nothing is added before both are known: a device that has no room gets the block in halves.
        found, ends = worker.backend.tile_sums(data, pieces, _SPEC), worker.backend.extremes(data, pieces)
        # What is dropped counts as a zero, too.
        facts = zip(found.zeros, found.nan, found.inf, strict=True)
        self.facts.add(block, found._replace(zeros=array("q", (zeros - nan - inf for zeros, nan, inf in facts))))
        with self._lock:
            for span, subnormal, saturated in zip(block.spans, *ends, strict=True):
                self.subnormal[span.tensor] += subnormal
                self.saturated[span.tensor] += saturated


@dataclass(frozen=True)
class TakeCensus:
    """Counts the values of tensors."""

    title: ClassVar = "checking"

    selected: Sequence[Selected]

    def empty(self) -> Census:
        """No value counted."""
        return Census(self.selected)

    def nbytes(self, destination: Destination) -> int:
        """Bytes of the tensors."""
        return destination.nbytes(self.selected)

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[OnBlock]:
        """One for each block."""
        blocks = destination.blocks(by_shard(self.selected), TILE, backend.block_bytes)
        return (OnBlock(self.work, block) for block in blocks)

    def work(self, block: Block, worker: Worker, found: Census) -> None:
        """Count the values of a block."""
        found.add(block, worker)
