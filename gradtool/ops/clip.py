"""Clips gradients by their global norm, by each tensor's norm, or by value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.backends import BlockSums, Piece, Terms
from gradtool.errors import BadInputError, NonFiniteError, Problem
from gradtool.ops.clip_policy import Decision, Policy, decide, exponents
from gradtool.ops.norm import facts, nonfinite_problems
from gradtool.ops.output import Output
from gradtool.ops.passes import Measurement, Session, Timings, measure_norms, open_session

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from gradtool.ops.passes import Progress
    from gradtool.store.gradset import Selected
    from gradtool.store.header import Shard


@dataclass(frozen=True)
class TensorClip:
    """What was done to one tensor."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    norm_before: float
    norm_after: float
    coef: float
    clipped: bool


@dataclass(frozen=True)
class ClipResult:
    """What was found and what was done; norms and `max_abs` are those of the unscaled gradient.

    `norm` is `norm_before`. `coef` is None where there is no single one (`per_tensor`, `max_value`). `norm_after` is
    measured on the values that were written.
    """

    norm_type: float
    norm: float
    max_abs: float
    files: int
    tensors: int
    elements: int
    bytes: int
    nan: int
    inf: int
    zeros: int
    backend: str
    backend_why: str
    threads: int
    seconds: float
    timings: Timings
    per_tensor: tuple[TensorClip, ...]
    max_norm: float | None
    max_value: float | None
    total_norm: float | None
    unscale: float
    norm_before: float
    norm_after: float
    coef: float | None
    clipped: bool
    dry_run: bool
    files_written: int
    bytes_written: int


def clip(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
    *,
    max_norm: float | None = None,
    max_value: float | None = None,
    norm_type: float = 2.0,
    eps: float = 1e-6,
    per_tensor: bool = False,
    total_norm: float | None = None,
    unscale: float = 1.0,
    nonfinite: str = "error",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    files_from: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    fsync: bool = True,
    backend: str = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
) -> ClipResult:
    """Scale all selected tensors of all paths, taken as one vector, to a norm of at most `max_norm`; in place.

    coef = max_norm / (norm + eps), as torch.nn.utils.clip_grad_norm_ has it; eps=1e-7 gives Lucid's clip_grad_norm,
    eps=0 that of Optax and Keras. Where coef < 1 every element becomes round(g · coef), with coef rounded to float32
    (F64: float64) and one rounding to the storage type; where coef >= 1 no byte is written. The norm is that of
    `gradtool.norm`.

    Args:
        paths: files, folders or index files; all of them form one gradient vector.
        max_norm: the largest norm to leave, 0 or more.
        max_value: clamp each element to [-max_value, max_value] instead.
        norm_type: the order p of the norm, above 0; `math.inf` for the largest magnitude.
        eps: added to the norm before dividing by it.
        per_tensor: clip each tensor by its own norm.
        total_norm: take this norm for the coefficient, instead of the one measured.
        unscale: a loss scale; values are divided by it, in the norm and in the result.
        nonfinite: "error" writes nothing when there is a NaN or Inf; "propagate" goes on, as torch does; "zero" takes
            each of them as 0.
        include: regular expressions; only tensors whose name one of them finds.
        exclude: regular expressions; no tensor whose name one of them finds.
        files_from: a file of further paths, separated by newline or NUL; "-" is standard input.
        output: write the one input file here, and leave it alone.
        output_dir: write all files, changed or not, into this folder, and leave the inputs alone.
        dry_run: do everything but write.
        fsync: have the new files on the disk before the old ones go.
        backend: "auto", "cpu" or "cuda".
        threads: worker threads; one for each core by default.
        progress: called with the bytes done and the bytes in all.

    Raises:
        NonFiniteError: there are NaN or Inf values, or results that their type cannot hold; nothing was written.
        UsageError: an argument makes no sense.
        BadInputError: a file, an index or a tensor that cannot be worked with.
        BackendUnavailableError: the backend is not there.
        SystemRefusedError: reading or writing failed; nothing was written.
    """
    policy = Policy(max_norm, max_value, norm_type, eps, per_tensor, total_norm, unscale, nonfinite)
    policy.check()
    session = open_session(
        paths,
        include=include,
        exclude=exclude,
        files_from=files_from,
        backend=backend,
        threads=threads,
        progress=progress,
    )
    destination = Output(output, output_dir, dry_run, fsync)
    destination.check(session)
    session.total_bytes = 2 * session.nbytes
    terms = Terms(norm_type, drop_nonfinite=nonfinite == "zero")
    before, measured, tensor_norms = measure_norms(session, terms, per_tensor=per_tensor)
    if nonfinite == "error" and not before.is_finite:
        raise NonFiniteError(
            "nothing was written, for there are NaN or Inf values; --nonfinite zero or propagate goes on",
            nonfinite_problems(session.selected, before),
        )
    norm_before, norms = measured / unscale, [one / unscale for one in tensor_norms]
    limiting = norms if per_tensor else [norm_before]
    if max_norm is not None and before.is_finite and math.inf in limiting:
        raise BadInputError("the norm is beyond float64; limit the values with --max-value first")

    coef = policy.coef(norm_before if total_norm is None else total_norm)
    coefs = [policy.coef(one) for one in norms] if per_tensor else [coef] * len(session.selected)
    decision = decide(policy, session.selected, before, coefs)
    after, files = _write(session, policy, decision, before, destination)
    return ClipResult(
        norm_type=norm_type,
        norm=norm_before,
        max_abs=before.largest / unscale,
        **facts(session, before),
        per_tensor=tuple(_rows(session, decision, norms, after) if per_tensor else ()),
        max_norm=max_norm,
        max_value=max_value,
        total_norm=total_norm,
        unscale=unscale,
        norm_before=norm_before,
        norm_after=after.norm() if decision.numbers else norm_before,
        coef=None if per_tensor or max_value is not None else coef,
        clipped=any(decision.clipped),
        dry_run=dry_run,
        files_written=len(files),
        bytes_written=sum(shard.size for shard in files),
    )


def _write(
    session: Session, policy: Policy, decision: Decision, before: Measurement, output: Output
) -> tuple[Measurement, list[Shard]]:
    """Write what was decided; what the tensors hold afterwards, and the files that were written."""
    numbers = decision.numbers
    changed = [session.selected[number] for number in numbers]
    factors = [decision.factors[number] for number in numbers]
    written = Measurement(changed, before.terms, exponents(policy, changed, before.max_abs[numbers], factors))

    def change(view: memoryview, pieces: Sequence[Piece], tensors: Sequence[int]) -> BlockSums:
        return session.backend.scale(view, pieces, [factors[one] for one in tensors], policy.limit, before.terms)

    def verify() -> None:
        if policy.nonfinite != "propagate" and (written.nan.any() or written.inf.any()):
            raise NonFiniteError(
                "nothing was written, for a result does not fit its type; a larger --unscale makes it smaller",
                _overflow_problems(changed, written),
            )

    files = output.write(session, changed, written, change, verify)
    return before.updated(numbers, written), files


def _overflow_problems(changed: Sequence[Selected], written: Measurement) -> list[Problem]:
    return [
        Problem(
            "overflow",
            f"{written.nan[number] + written.inf[number]} results are beyond {one.tensor.dtype}, "
            f"the first at index {written.first_nonfinite[number]}",
            str(one.shard.path),
            one.tensor.name,
        )
        for number, one in enumerate(changed)
        if written.nan[number] or written.inf[number]
    ]


def _rows(session: Session, decision: Decision, before: list[float], after: Measurement) -> list[TensorClip]:
    return [
        TensorClip(
            name=one.tensor.name,
            file=str(one.shard.path),
            dtype=one.tensor.dtype,
            shape=one.tensor.shape,
            norm_before=before[number],
            norm_after=after.tensor_norm(number) if decision.changed[number] else before[number],
            coef=decision.coefs[number],
            clipped=decision.clipped[number],
        )
        for number, one in enumerate(session.selected)
    ]
