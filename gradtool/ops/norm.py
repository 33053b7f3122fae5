"""Measures the norm of gradients and changes nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.backends import NormSpec
from gradtool.errors import Problem, UsageError
from gradtool.ops import arguments
from gradtool.ops.passes import Measure
from gradtool.ops.results import Facts, facts, nonfinite_problems
from gradtool.ops.session import Call

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from gradtool.engines.threads import Progress
    from gradtool.ops.measurement import Measurement
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
class NormResult(Facts):
    """What was found in all selected tensors, taken as one vector."""

    per_tensor: tuple[TensorNorm, ...]
    problems: tuple[Problem, ...]


def norm(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
    *,
    norm_type: float = 2.0,
    per_tensor: bool = False,
    top: int | None = None,
    fail_above: float | None = None,
    ignore_journal: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    files_from: str | os.PathLike[str] | None = None,
    backend: str | None = None,
    device: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> NormResult:
    """The norm of all tensors of all paths as one vector, as torch.nn.utils.get_total_norm has it.

    (Σ|g|^p)^(1/p) with p = `norm_type`, or max|g| for p = inf. Sums are float64 in the canonical order of
    `gradtool.reduction`, so the same bits come out for any thread count, block size and shard layout.

    Args:
        paths: files, folders or index files; all of them form one gradient vector.
        norm_type: the order p of the norm, above 0; `math.inf` for the largest magnitude.
        per_tensor: give every tensor's own norm too.
        top: give only the K tensors of the largest norms, largest first, NaN before all.
        fail_above: a norm above this is a problem of the result.
        ignore_journal: look at files even while a run is changing them, or when one died before it was done.
        include: regular expressions; only tensors whose name one of them finds.
        exclude: regular expressions; no tensor whose name one of them finds.
        files_from: a file of further paths, separated by newline or NUL; "-" is standard input.
        backend: "auto", "cpu" or "cuda"; by default what GRADTOOL_BACKEND says, or else "auto".
        device: the number of the GPU, from 0; only with "cuda".
        threads: worker threads; by default one for each core, at most 16.
        progress: called with the bytes done and the bytes in all.

    Returns:
        The result. NaN, Inf and a norm above `fail_above` are not raised, they are its `problems`.

    Raises:
        UsageError: an argument makes no sense.
        BadInputError: a file, an index or a tensor that cannot be worked with.
        BackendUnavailableError: the backend is not there.
        SystemRefusedError: a file could not be read, changed while it was, or may be half changed.
    """
    order = arguments.norm_order(norm_type)
    top = arguments.optional_count("--top", top)
    limit = arguments.optional_number("--fail-above", fail_above)
    if limit is not None and math.isnan(limit):
        raise UsageError("--fail-above must be a number, not NaN")
    call = Call.of(
        paths,
        include=include,
        exclude=exclude,
        files_from=files_from,
        backend=backend,
        device=device,
        threads=threads,
        progress=progress,
    )
    session = call.open_to_read(ignore_unfinished=ignore_journal)
    found = session.run(Measure(session.selected, NormSpec(order)))
    norms = found.norms(per_tensor=per_tensor or top is not None)
    rows = [_row(session.selected[number], found, number, one) for number, one in enumerate(norms.tensors)]
    problems = nonfinite_problems(session.selected, found)
    if limit is not None and not norms.whole <= limit:
        problems.append(Problem("above-limit", f"the norm {norms.whole!r} is above the limit {limit!r}"))
    return NormResult(
        **facts(session, session.selected, found, norms.whole),
        per_tensor=tuple(rows if top is None else _largest(rows, top)),
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


def _largest(rows: Sequence[TensorNorm], count: int) -> list[TensorNorm]:
    return sorted(rows, key=lambda row: (not math.isnan(row.norm), -row.norm))[:count]
