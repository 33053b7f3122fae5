"""The pass that looks at every value once: NaN, Inf, zeros, and the values at the ends of what their types hold."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradtool.backends.protocol import NormSpec
from gradtool.engines.tally import Column
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import TensorPass, pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.engines.worker import Worker
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block

# Nothing is summed. Non-finite values are counted, and the largest magnitude is that of the others.
_SPEC = NormSpec(math.inf, drop_nonfinite=True)


_COLUMNS = {"subnormal": Column("q", "sum"), "saturated": Column("q", "sum")}


class Census(Measurement):
    """A measurement that also counts values at the ends of what types hold."""

    subnormal: array[int]
    saturated: array[int]

    def __init__(self, selected: Sequence[Selected]) -> None:
        super().__init__(selected, _SPEC, _COLUMNS)


@dataclass(frozen=True, eq=False, repr=False)
class TakeCensus(TensorPass[Census]):
    """Counts the values of tensors."""

    title: ClassVar = "checking"

    spec: NormSpec = _SPEC

    def tally(self) -> Census:
        """Begin with nothing."""
        return Census(self.selected)

    def work(self, block: Block, worker: Worker, tally: Census) -> None:
        """Count the values of a block."""
        pieces = pieces_of(block)
        with worker.load(block) as loaded:
            # Nothing is added before both are known: a device that has no room gets the block in halves.
            sums = worker.backend.tile_sums(loaded.data, pieces, self.spec)
            subnormal, saturated = worker.backend.extremes(loaded.data, pieces)
        # What is dropped counts as a zero, too.
        counts = zip(sums.zeros, sums.nan, sums.inf, strict=True)
        zeros = array("q", (zeros - nan - inf for zeros, nan, inf in counts))
        tally.add(block, sums, zeros=zeros, subnormal=subnormal, saturated=saturated)
