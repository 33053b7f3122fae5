"""The pass that counts NaN, Inf, zeros and values at the ends of the range of their type, and what the counts show."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gradtool.backends.storage import STORAGE
from gradtool.backends.values import Column, NormSpec
from gradtool.engines.choose import local
from gradtool.engines.passes import Pass
from gradtool.errors import Problem, SystemRefusedError, call, number_of, say
from gradtool.ops.passes import Measurement, pieces_of
from gradtool.store.format.gradset import only, quoted, totals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.engines.threads import Threads
    from gradtool.engines.worker import Worker
    from gradtool.ops.check.headers import Kind
    from gradtool.options import CheckOptions
    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.tensors import Shard
    from gradtool.store.io.blocks import Block

# Sums nothing: NaN and Inf are counted, and dropped from the largest magnitude.
_SPEC = NormSpec(math.inf, drop_nonfinite=True)
_COLUMNS = {"subnormal": Column("q", "sum"), "saturated": Column("q", "sum")}
# A gradient in F16 always has some subnormal values, which carry next to nothing of its norm. If their share of the
# values other than 0 is above this, most of what a small gradient holds has been rounded away.
MANY_SUBNORMAL = 0.1
COUNTS = ("nan", "inf", "zeros", "subnormal", "saturated")


@dataclass(frozen=True, eq=False, repr=False)
class CountValues(Pass[Measurement]):
    """A pass that counts the values of tensors."""

    title: ClassVar = "checking"

    spec: NormSpec = _SPEC

    def tally(self) -> Measurement:
        return Measurement(self.selected, self.spec, _COLUMNS)

    def work(self, block: Block, worker: Worker, tally: Measurement) -> None:
        pieces = pieces_of(block)
        with worker.load(block) as loaded:
            # Nothing is added before both are known, because a device that has no room gets the block in halves.
            sums = worker.backend.tile_sums(loaded.data, pieces, self.spec)
            subnormal, saturated = worker.backend.extremes(loaded.data, pieces)
        # The sums count dropped values as zeros, too.
        counts = zip(sums.zeros, sums.nan, sums.inf, strict=True)
        zeros = array("q", (zeros - nan - inf for zeros, nan, inf in counts))
        tally.add(block, sums, zeros=zeros, subnormal=subnormal, saturated=saturated)


def count_values(
    valued: Sequence[Selected], options: CheckOptions
) -> tuple[Threads | None, Measurement | None, Sequence[Problem]]:
    """Count values unless the options skip that; return the engine, the counts, and what could not be read."""
    if options.fast:
        return None, None, ()
    engine = local(options, options.progress)[0]
    try:
        return engine, engine.run(CountValues(valued)), ()
    except SystemRefusedError as error:
        # An error that names no file, such as that of a GPU, says nothing about the set.
        if not all(problem.file for problem in error.problems):
            raise
        return engine, None, error.problems
    finally:
        engine.close()


@dataclass(frozen=True)
class DtypeCounts:
    """The counts of all tensors of one type; None if values were not read, or the type has no such values."""

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
    selected: Sequence[Selected], valued: Sequence[Selected], counts: Measurement | None
) -> list[DtypeCounts]:
    """Return a row for each type, the type with most bytes first; the counts are those of the `valued` tensors."""
    rows = []
    for dtype in dict.fromkeys(tensor.dtype for _, tensor in selected):
        numbers = [number for number, (_, tensor) in enumerate(valued) if tensor.dtype == dtype]
        sums: dict[str, Any] = dict.fromkeys(COUNTS)
        if counts is not None and numbers:
            sums = {name: sum(getattr(counts, name)[number] for number in numbers) for name in COUNTS}
        rows.append(DtypeCounts(dtype, **totals([entry for entry in selected if entry.tensor.dtype == dtype]), **sums))
    return sorted(rows, key=lambda row: (-row.bytes, row.dtype))


def value_findings(selected: Sequence[Selected], counts: Measurement) -> Iterator[tuple[Kind, Problem]]:
    """Yield the findings on values, tensor by tensor; then a note on each file with tensors of zeros."""
    zero: dict[Shard, list[str]] = {}
    for number, entry in enumerate(selected):
        yield from _tensor_findings(entry, counts, number)
        if entry.tensor.elements and counts.zeros[number] == entry.tensor.elements:
            zero.setdefault(entry.shard, []).append(entry.tensor.name)
    for shard, names in zero.items():
        verb = "holds" if len(names) == 1 else "hold"
        message = f"{number_of(len(names), 'tensor')} of {len(shard.tensors):,} {verb} only zeros: {quoted(names)}"
        hint = "check whether these parameters should get a gradient"
        yield "note", Problem("all-zero", message, shard.name, only(names), hint)


def _tensor_findings(selected: Selected, counts: Measurement, number: int) -> Iterator[tuple[Kind, Problem]]:
    file, tensor = selected.shard.name, selected.tensor
    nan, inf, zeros, subnormal, saturated = (getattr(counts, name)[number] for name in COUNTS)
    if nan or inf:
        first = counts.first_nonfinite[number]
        message = f"{nan:,} NaN, {inf:,} Inf, the first at {tensor.index_of(first)}"
        hint: str = say("run {} to set them to 0", call("clip", file, max_norm=math.inf, nonfinite="zero"))
        yield "fault", Problem("nonfinite", message, file, tensor.name, hint, first)
    if saturated:
        storage = STORAGE[tensor.dtype]
        values = "1 value has" if saturated == 1 else f"{saturated:,} values have"
        message = f"{values} the largest magnitude of {tensor.dtype}, {storage.largest:.6g}, and may have been larger"
        # Programs scale values to the range of a type of one byte, so that some have its largest magnitude.
        is_scaled = storage.itemsize == 1
        hint = "lower the loss scale, or store a wider type"
        hint = "ignore this if values were scaled to the range of the type" if is_scaled else hint
        yield "note" if is_scaled else "fault", Problem("saturated", message, file, tensor.name, hint)
    nonzero = tensor.elements - zeros - nan - inf
    if subnormal > MANY_SUBNORMAL * nonzero:
        verb = "is" if subnormal == 1 else "are"
        message = f"{subnormal:,} of {nonzero:,} values other than 0 {verb} subnormal in {tensor.dtype}"
        hint = "raise the loss scale, or store a wider type"
        yield "note", Problem("subnormal", f"{message}, which costs precision", file, tensor.name, hint)
