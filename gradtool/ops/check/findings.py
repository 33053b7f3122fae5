"""What is worth telling of a gradient set, how serious it is, and what helps.

A fault is wrong whatever the data is for: other commands refuse it, or read something else than what was meant. A note
may be as it should be, which only those can tell who know the data; healthy files have some.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gradtool.backends.storage import STORAGE
from gradtool.errors import Problem, number_of
from gradtool.ops.check.counts import Counted, counts_of
from gradtool.store.format.examine import is_aligned, listed, unaligned_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gradtool.ops.check.census import Census
    from gradtool.store.format.examine import Examined
    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.header import Shard
    from gradtool.store.transaction.remains import Remains

# A gradient in F16 always has some subnormal values, which carry next to nothing of its norm. Above this share of the
# values that are not zero, most of what a small one holds has been rounded away.
MANY_SUBNORMAL = 0.1
_MAPPING = "programs that map the file must copy what is not aligned"
_SAVE_AGAIN = "save it again with the safetensors library"


@dataclass(frozen=True)
class Finding:
    """One thing found: a "fault" or a "note", its code, what it is, what helps, and the tensor and file it is about."""

    severity: Literal["fault", "note"]
    code: str
    message: str
    remedy: str
    name: str | None
    file: str

    @property
    def problem(self) -> Problem:
        """The same as an error or a warning."""
        return Problem(self.code, self.message, self.file, self.name, self.remedy or None)


def of_problem(problem: Problem) -> Finding:
    """Return the fault of a file or an index that a problem is."""
    remedy = problem.hint or "copy the file again, or write it anew"
    return Finding("fault", problem.code, problem.message, remedy, problem.tensor, problem.file or "")


def of_set(one: Examined) -> Iterator[Finding]:
    """What headers and an index show."""
    yield from map(of_problem, one.faults)
    for file in one.unmapped:
        what = f"the index {one.index.name if one.index else ''} does not name it, so it is not read"
        yield Finding("note", "unmapped-file", what, "add its tensors to the index, or move it away", None, str(file))


def of_layout(shard: Shard) -> Iterator[Finding]:
    """Whether the data of a file is aligned."""
    unaligned = [one.name for one in unaligned_in(shard)]
    if not is_aligned(shard):
        what = f"the data begins at byte {shard.data_start:,}, which is no multiple of 8; {_MAPPING}"
        yield Finding("note", "unaligned", what, _SAVE_AGAIN, None, str(shard.path))
    elif unaligned:
        verb = "begins" if len(unaligned) == 1 else "begin"
        what = f"{number_of(len(unaligned), 'tensor')} {verb} within an element's size: {listed(unaligned)}; {_MAPPING}"
        yield Finding("note", "unaligned", what, _SAVE_AGAIN, None, str(shard.path))


def of_remains(one: Remains, folder: str) -> Finding:
    """What a run has left; `folder` is what to recover."""
    remedy, file = f"gradtool recover {shlex.quote(folder)}", str(one.path)
    left = f"{number_of(one.files, 'file')} of {one.nbytes:,} bytes"
    if one.kind == "writing":
        what = f"a run ({one.who}) is changing files at this moment, or has crashed"
        return Finding("fault", "in-use", what, f"wait for it, or use {remedy}", None, file)
    if one.kind == "unfinished":
        what = f"a run ({one.who}) has crashed and left files half changed"
        return Finding("fault", "unfinished", what, remedy, None, file)
    if one.kind == "crashed":
        what = f"a run ({one.who}) has crashed and left {left}; all others are whole"
        return Finding("note", "leftover", what, remedy, None, file)
    return Finding("note", "leftover", f"a run that has no log has left {left}", remedy, None, file)


def of_values(selected: Sequence[Selected], census: Census) -> Iterator[Finding]:
    """What the values show: first the faults, tensor by tensor."""
    counted = [counts_of(census, number) for number in range(len(selected))]
    findings = [found for one, counts in zip(selected, counted, strict=True) for found in _of_tensor(one, counts)]
    yield from (one for one in findings if one.severity == "fault")
    yield from (one for one in findings if one.severity == "note")
    yield from _all_zero(selected, counted)


def _of_tensor(one: Selected, counts: Counted) -> Iterator[Finding]:
    tensor, file = one.tensor, str(one.shard.path)
    if counts.nan or counts.inf:
        what = f"{counts.nan:,} NaN, {counts.inf:,} Inf, the first at index {counts.first_nonfinite}"
        remedy = f"gradtool clip {shlex.quote(file)} --max-norm inf --nonfinite zero sets them to 0"
        yield Finding("fault", "nonfinite", what, remedy, tensor.name, file)
    if counts.saturated:
        storage = STORAGE[tensor.dtype]
        # Values are scaled to the range of such a type, so that the largest is as large as any may be.
        is_scaled = storage.itemsize == 1
        severity: Literal["fault", "note"] = "note" if is_scaled else "fault"
        values = "1 value has" if counts.saturated == 1 else f"{counts.saturated:,} values have"
        what = f"{values} the largest magnitude of {tensor.dtype}, {storage.largest:.6g}, and may have been larger"
        remedy = "as it should be if it was scaled to the range of its type" if is_scaled else _WIDER.format("lower")
        yield Finding(severity, "saturated", what, remedy, tensor.name, file)
    others = tensor.elements - counts.zeros - counts.nan - counts.inf
    if counts.subnormal > MANY_SUBNORMAL * others:
        share = f"{counts.subnormal:,} of {others:,} values other than 0"
        verb = "is" if counts.subnormal == 1 else "are"
        what = f"{share} {verb} subnormal in {tensor.dtype}, which costs precision"
        yield Finding("note", "subnormal", what, _WIDER.format("raise"), tensor.name, file)


_WIDER = "{} the loss scale, or store a wider type"


def _all_zero(selected: Sequence[Selected], counted: Iterable[Counted]) -> Iterator[Finding]:
    """A note for each file with tensors that hold nothing but zeros."""
    zero: dict[Shard, list[str]] = {}
    for one, counts in zip(selected, counted, strict=True):
        if one.tensor.elements and counts.zeros == one.tensor.elements:
            zero.setdefault(one.shard, []).append(one.tensor.name)
    for shard, names in zero.items():
        who = f"{number_of(len(names), 'tensor')} of {len(shard.tensors):,}"
        what = f"{who} {'holds' if len(names) == 1 else 'hold'} only zeros: {listed(names)}"
        remedy = "make sure that these parameters get a gradient, if they should"
        yield Finding("note", "all-zero", what, remedy, names[0] if len(names) == 1 else None, str(shard.path))
