"""Measures the norm of gradients and changes nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from gradtool.backends import NormSpec
from gradtool.errors import Problem
from gradtool.ops.groups import groups_of
from gradtool.ops.passes import Measure
from gradtool.ops.results import Facts, facts, nonfinite_problems
from gradtool.ops.session import Call
from gradtool.options import NormOptions, Vector
from gradtool.signatures import complete, documented

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.ops.measurement import Measurement
    from gradtool.ops.session import Session
    from gradtool.store.format.gradset import Selected


@dataclass(frozen=True)
class TensorNorm:
    """What was found in one tensor; `max_abs` leaves NaN out."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    norm: float
    max_abs: float
    nan: int
    inf: int
    zeros: int


@dataclass(frozen=True)
class FileNorm:
    """What was found in one path, which is `file` as it was given; `max_abs` leaves NaN out."""

    file: str
    tensors: int
    elements: int
    norm: float
    max_abs: float
    nan: int
    inf: int
    zeros: int


@dataclass(frozen=True)
class GroupNorm:
    """The norm of the tensors that a regular expression matches; without one, of those in no group."""

    group: str | None
    tensors: int
    norm: float


@dataclass(frozen=True, repr=False)
class NormResult(Facts):
    """What was found in all selected tensors, taken as one vector."""

    headline = ("norm", "max_abs")

    norm: float
    per_tensor: tuple[TensorNorm, ...]
    per_file: tuple[FileNorm, ...]
    per_group: tuple[GroupNorm, ...]
    problems: tuple[Problem, ...]


@documented
def norm(paths: Vector = (), **options: Unpack[NormOptions]) -> NormResult:
    """The norm of all tensors of all paths as one vector, as torch.nn.utils.get_total_norm has it.

    (Σ|g|^p)^(1/p) with p = `norm_type`, or max|g| for p = inf. Sums are float64 in the canonical order of
    `gradtool.reduction`, so the bits are the same for any thread count, block size and shard layout.

    Tensors of one name in several paths are refused, because nothing says whether they are parts of one vector, unless
    `concat` says so. With `by_file`, each path has a norm of its own too, and `fail_above` is about these. With
    `group`, so have the tensors that each regular expression matches, and those that none does.

    Returns:
        The result. NaN, Inf and a norm above `fail_above` are not raised; they are its `problems`.

    Raises:
        UsageError: an option is invalid.
        BadInputError: a file, index or tensor is invalid, or a tensor is in two groups.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: a file cannot be read, changed meanwhile, or may be half changed.
    """
    chosen = complete("norm", NormOptions, options)
    top, limit = chosen["top"], chosen["fail_above"]
    by_file = chosen["by_file"]
    call = Call.of(paths, chosen, unique_names=not (chosen["concat"] or by_file))
    with call.open_to_read(ignore_unfinished=chosen["ignore_journal"]) as session:
        groups = groups_of(session.selected, chosen["group"])
        found = session.run(Measure(session.selected, NormSpec(chosen["norm_type"])))
        norms = found.norms(
            per_tensor=chosen["per_tensor"] or top is not None, groups=[group.numbers for group in groups]
        )
        rows = [_row(session.selected[number], found, number, one) for number, one in enumerate(norms.tensors)]
        files = list(_file_rows(call.inputs.paths, session, found)) if by_file else []
        limited = [(row.norm, row.file) for row in files] if by_file else [(norms.whole, None)]
        problems = nonfinite_problems(session.selected, found)
        problems += [_above(value, limit, file) for value, file in limited if limit is not None and not value <= limit]
        return NormResult(
            **facts(session, session.selected, found),
            norm=norms.whole,
            per_tensor=tuple(rows if top is None else _largest(rows, top)),
            per_file=tuple(files),
            per_group=tuple(
                GroupNorm(group.pattern, len(group.numbers), value)
                for group, value in zip(groups, norms.groups, strict=True)
            ),
            problems=tuple(problems),
        )


def _row(one: Selected, found: Measurement, number: int, value: float) -> TensorNorm:
    """The row of one tensor."""
    return TensorNorm(
        name=one.tensor.name,
        file=str(one.shard.path),
        dtype=one.tensor.dtype,
        shape=one.tensor.shape,
        norm=value,
        max_abs=float(found.max_abs[number]),
        nan=int(found.nan[number]),
        inf=int(found.inf[number]),
        zeros=int(found.zeros[number]),
    )


def _file_rows(paths: Sequence[str], session: Session, found: Measurement) -> Iterator[FileNorm]:
    """The row of each path."""
    first = 0
    for path, one in zip(paths, session.opened.sets, strict=True):
        selected = session.opened.selected_in(one.shards)
        own = found.between(first, first + len(selected))
        first += len(selected)
        yield FileNorm(
            file=path,
            tensors=len(selected),
            elements=sum(one.tensor.elements for one in selected),
            norm=own.norms().whole,
            max_abs=own.largest,
            nan=int(own.nan.sum()),
            inf=int(own.inf.sum()),
            zeros=int(own.zeros.sum()),
        )


def _above(norm: float, limit: float, file: str | None) -> Problem:
    message = f"the norm {norm!r} is above the limit {limit!r}"
    if math.isnan(norm):
        message = f"the norm is NaN, which is not within the limit {limit!r}"
    return Problem("above-limit", message, file)


def _largest(rows: Sequence[TensorNorm], count: int) -> list[TensorNorm]:
    return sorted(rows, key=lambda row: (not math.isnan(row.norm), -row.norm))[:count]
