"""The pass that looks at every value once: NaN, Inf, zeros, and values at the ends of the range of their type."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from gradtool.backends.protocol import NormSpec
from gradtool.backends.storage import STORAGE
from gradtool.engines.tally import Column
from gradtool.errors import Problem, call, number_of, say
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import TensorPass, pieces_of
from gradtool.store.format.gradset import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.engines.worker import Worker
    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.tensors import Shard, Tensor
    from gradtool.store.io.blocks import Block

    Severity = Literal["fault", "note"]

# Nothing is summed. Non-finite values are counted, and the largest magnitude is that of the others.
_SPEC = NormSpec(math.inf, drop_nonfinite=True)
_COLUMNS = {"subnormal": Column("q", "sum"), "saturated": Column("q", "sum")}
# A gradient in F16 always has some subnormal values, which carry next to nothing of its norm. Above this share of the
# values that are not zero, most of what a small one holds has been rounded away.
MANY_SUBNORMAL = 0.1
COUNTS = ("nan", "inf", "zeros", "subnormal", "saturated")


class ValueCounts(Measurement):
    """A measurement that also counts values at the ends of the range of their type."""

    subnormal: array[int]
    saturated: array[int]

    def __init__(self, selected: Sequence[Selected]) -> None:
        super().__init__(selected, _SPEC, _COLUMNS)


@dataclass(frozen=True, eq=False, repr=False)
class CountValues(TensorPass[ValueCounts]):
    """Counts the values of tensors."""

    title: ClassVar = "checking"

    spec: NormSpec = _SPEC

    def tally(self) -> ValueCounts:
        """Begin with nothing."""
        return ValueCounts(self.selected)

    def work(self, block: Block, worker: Worker, tally: ValueCounts) -> None:
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


@dataclass(frozen=True)
class DtypeCounts:
    """The counts of all tensors of one type; None where values were not read, or the type carries none."""

    dtype: str
    tensors: int
    elements: int
    bytes: int
    nan: int | None
    inf: int | None
    zeros: int | None
    subnormal: int | None
    saturated: int | None


def counts_by_dtype(
    selected: Sequence[Selected], valued: Sequence[Selected], counts: ValueCounts | None
) -> list[DtypeCounts]:
    """Return a row for each type, that with most bytes first; the counts are those of the `valued` tensors."""
    rows = []
    for dtype in dict.fromkeys(tensor.dtype for _, tensor in selected):
        tensors = [tensor for _, tensor in selected if tensor.dtype == dtype]
        numbers = [number for number, (_, tensor) in enumerate(valued) if tensor.dtype == dtype]
        sums = {name: sum(getattr(counts, name)[n] for n in numbers) if counts and numbers else None for name in COUNTS}
        elements, nbytes = (sum(getattr(tensor, key) for tensor in tensors) for key in ("elements", "nbytes"))
        rows.append(DtypeCounts(dtype, len(tensors), elements, nbytes, **sums))
    return sorted(rows, key=lambda row: (-row.bytes, row.dtype))


def value_findings(selected: Sequence[Selected], counts: ValueCounts) -> Iterator[tuple[Severity, Problem]]:
    """Yield what the values show, tensor by tensor; then a note for each file with tensors of zeros."""
    zero: dict[Shard, list[str]] = {}
    for number, (shard, tensor) in enumerate(selected):
        yield from _tensor_findings(tensor, shard.name, counts, number)
        if tensor.elements and counts.zeros[number] == tensor.elements:
            zero.setdefault(shard, []).append(tensor.name)
    for shard, names in zero.items():
        verb = "holds" if len(names) == 1 else "hold"
        message = f"{number_of(len(names), 'tensor')} of {len(shard.tensors):,} {verb} only zeros: {quoted(names)}"
        hint = "make sure that these parameters get a gradient, if they should"
        yield "note", Problem("all-zero", message, shard.name, names[0] if len(names) == 1 else None, hint)


def _tensor_findings(tensor: Tensor, file: str, counts: ValueCounts, number: int) -> Iterator[tuple[Severity, Problem]]:
    nan, inf, saturated, subnormal = (
        column[number] for column in (counts.nan, counts.inf, counts.saturated, counts.subnormal)
    )
    if nan or inf:
        message = f"{nan:,} NaN, {inf:,} Inf, the first at index {counts.first_nonfinite[number]}"
        hint: str = say("run {} to set them to 0", call("clip", file, max_norm=math.inf, nonfinite="zero"))
        yield "fault", Problem("nonfinite", message, file, tensor.name, hint)
    if saturated:
        storage = STORAGE[tensor.dtype]
        values = "1 value has" if saturated == 1 else f"{saturated:,} values have"
        message = f"{values} the largest magnitude of {tensor.dtype}, {storage.largest:.6g}, and may have been larger"
        # Values are scaled to the range of such a type, so that the largest is as large as any may be.
        is_scaled = storage.itemsize == 1
        hint = "lower the loss scale, or store a wider type"
        hint = "ignore this if values were scaled to the range of the type" if is_scaled else hint
        yield "note" if is_scaled else "fault", Problem("saturated", message, file, tensor.name, hint)
    others = tensor.elements - counts.zeros[number] - nan - inf
    if subnormal > MANY_SUBNORMAL * others:
        verb = "is" if subnormal == 1 else "are"
        message = f"{subnormal:,} of {others:,} values other than 0 {verb} subnormal in {tensor.dtype}"
        hint = "raise the loss scale, or store a wider type"
        yield "note", Problem("subnormal", f"{message}, which costs precision", file, tensor.name, hint)
