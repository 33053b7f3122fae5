"""Clips gradients by their global norm, by each tensor's norm, or by value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.errors import BadInputError
from gradtool.ops import arguments
from gradtool.ops.clip_policy import Decision, Policy, decide
from gradtool.ops.passes import Measure, Rewrite
from gradtool.ops.results import Facts, facts, refuse_nonfinite, refuse_overflow
from gradtool.ops.session import Call, output_options
from gradtool.store.transaction.destination import DISCARD

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from gradtool.engines.threads import Progress
    from gradtool.ops.measurement import Measurement, Norms
    from gradtool.ops.session import Session


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
class ClipResult(Facts):
    """What was found and what was done; norms and `max_abs` are those of the unscaled gradient.

    `norm` is `norm_before`. `coef` is None where there is no single one (`per_tensor`, `max_value`). `norm_after` is
    measured on the values that were written.
    """

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
    write: str = "replace",
    fsync: bool = True,
    lock_timeout: float = 0.0,
    backend: str | None = None,
    device: int | None = None,
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
        write: "replace" builds new files that take the place of the old ones; "inplace" overwrites what changes in the
            files that are there, and saves it to a journal first.
        fsync: have what is written on the disk before what was there goes.
        lock_timeout: seconds to wait for other runs that are about to write the same files.
        backend: "auto", "cpu" or "cuda"; by default what GRADTOOL_BACKEND says, or else "auto".
        device: the number of the GPU, from 0; only with "cuda".
        threads: worker threads; by default one for each core, at most 16.
        progress: called with the bytes done and the bytes in all.

    Raises:
        NonFiniteError: there are NaN or Inf values, or results that their type cannot hold; nothing was written.
        UsageError: an argument makes no sense.
        BadInputError: a file, an index or a tensor that cannot be worked with.
        BackendUnavailableError: the backend is not there.
        SystemRefusedError: reading or writing failed; nothing was written.
    """
    policy = Policy(
        max_norm=arguments.optional_number("--max-norm", max_norm),
        max_value=arguments.optional_number("--max-value", max_value),
        norm_type=arguments.norm_order(norm_type),
        eps=arguments.number("--eps", eps),
        per_tensor=per_tensor,
        total_norm=arguments.optional_number("--total-norm", total_norm),
        unscale=arguments.number("--unscale", unscale),
        nonfinite=nonfinite,
    )
    policy.check()
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
    options = output_options(output, output_dir, dry_run, write, fsync, lock_timeout)
    with call.open_to_write(options) as (session, output_):
        session.engine.expected_bytes = 2 * DISCARD.nbytes(session.selected)
        before = session.run(Measure(session.selected, policy.spec, leaves=True))
        norms = _checked_norms(session, policy, before)
        decision = decide(policy, session.selected, before, norms)
        changed = [number for number, changes in enumerate(decision.changed) if changes]
        selected = [session.selected[number] for number in changed]
        rewrite = Rewrite(selected, [decision.factors[number] for number in changed], policy.limit, policy.spec)
        with session.writing(output_, output_.files(selected)) as destination:
            written = session.run(rewrite, destination)
            if policy.nonfinite != "propagate":
                refuse_overflow(selected, written)
            after = before.updated(changed, written).norms(per_tensor=policy.per_tensor)
    return ClipResult(
        **facts(session, session.selected, before, norms.whole, unscale=policy.unscale),
        per_tensor=tuple(_rows(session, decision, norms, after) if per_tensor else ()),
        max_norm=policy.max_norm,
        max_value=policy.max_value,
        total_norm=policy.total_norm,
        unscale=policy.unscale,
        norm_before=norms.whole,
        norm_after=after.whole,
        coef=decision.coef,
        clipped=any(decision.clipped),
        dry_run=dry_run,
        files_written=destination.count,
        bytes_written=session.timings.write_bytes,
    )


def _checked_norms(session: Session, policy: Policy, before: Measurement) -> Norms:
    """The norms of what was measured; refused where the policy says so."""
    if policy.nonfinite == "error":
        refuse_nonfinite(session.selected, before, "Use --nonfinite zero or propagate to continue")
    norms = before.norms(per_tensor=policy.per_tensor, unscale=policy.unscale)
    limiting = norms.tensors if policy.per_tensor else [norms.whole]
    if policy.needs_norm and before.is_finite and math.inf in limiting:
        raise BadInputError("the norm overflows float64; nothing written. Use --max-value to limit the values first")
    return norms


def _rows(session: Session, decision: Decision, before: Norms, after: Norms) -> list[TensorClip]:
    return [
        TensorClip(
            name=one.tensor.name,
            file=str(one.shard.path),
            dtype=one.tensor.dtype,
            shape=one.tensor.shape,
            norm_before=norm_before,
            norm_after=norm_after,
            coef=coef,
            clipped=clipped,
        )
        for one, norm_before, norm_after, coef, clipped in zip(
            session.selected, before.tensors, after.tensors, decision.coefs, decision.clipped, strict=True
        )
    ]
