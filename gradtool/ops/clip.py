"""Clips gradients by their global norm, by each tensor's norm, or by value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from gradtool.errors import BadInputError, NonFiniteError
from gradtool.ops.clip_policy import Decision, Policy, decide
from gradtool.ops.measurement import Measurement, Norms, norms_of
from gradtool.ops.output import Choices, Output, opened
from gradtool.ops.passes import Inputs, Session, measure, measure_norms, rewrite
from gradtool.ops.results import Facts, facts, nonfinite_problems, overflow_problems
from gradtool.options import ClipOptions, Vector
from gradtool.signatures import complete, documented

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradtool.backends import BlockSums, Data, Piece
    from gradtool.ops.passes import Change
    from gradtool.store.format.header import Shard
    from gradtool.store.fs import File


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


@documented
def clip(paths: Vector = (), **options: Unpack[ClipOptions]) -> ClipResult:
    """Scale all selected tensors of all paths, taken as one vector, to a norm of at most `max_norm`, in place.

    coef = max_norm / (norm + eps), as in torch.nn.utils.clip_grad_norm_; eps=1e-7 gives Lucid's clip_grad_norm, eps=0
    that of Optax and Keras. If coef < 1, every element becomes round(g · coef), with coef rounded to float32 (F64:
    float64) and one rounding to the storage type; if coef >= 1, no byte is written. The norm is that of
    `gradtool.norm`.

    Raises:
        NonFiniteError: a value is NaN or Inf, or a result overflows its type; nothing is written.
        UsageError: an option is invalid, or contradicts another one.
        BadInputError: a file, index or tensor is invalid.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: reading or writing failed; nothing is written.
    """
    chosen = complete("clip", ClipOptions, options)
    policy = Policy(
        max_norm=chosen["max_norm"],
        max_value=chosen["max_value"],
        norm_type=chosen["norm_type"],
        eps=chosen["eps"],
        per_tensor=chosen["per_tensor"],
        total_norm=chosen["total_norm"],
        unscale=chosen["unscale"],
        nonfinite=chosen["nonfinite"],
    )
    policy.check()
    inputs, choices = Inputs.of(paths, chosen), Choices.of(chosen)
    with opened(inputs, choices) as (session, destination):
        session.total_bytes = 2 * session.nbytes
        try:
            before, norms = _measure(session, policy)
            decision = decide(policy, session.selected, before, norms)
            after, written = _write(session, policy, decision, before, destination)
        finally:
            # For a second pass that did not come.
            session.kept.clear()
    return ClipResult(
        **facts(session, before, norms.whole, unscale=policy.unscale),
        per_tensor=tuple(_rows(session, decision, norms, after) if policy.per_tensor else ()),
        max_norm=policy.max_norm,
        max_value=policy.max_value,
        total_norm=policy.total_norm,
        unscale=policy.unscale,
        norm_before=norms.whole,
        norm_after=after.whole,
        coef=decision.coef,
        clipped=any(decision.clipped),
        dry_run=choices.dry_run,
        files_written=written,
        bytes_written=session.timings.write_bytes,
    )


def _measure(session: Session, policy: Policy) -> tuple[Measurement, Norms]:
    """What the files hold, and its norms; refused where the policy says so."""
    before, norms = measure_norms(
        session, session.selected, policy.terms, per_tensor=policy.per_tensor, unscale=policy.unscale, keeps=True
    )
    if policy.nonfinite == "error" and not before.is_finite:
        raise NonFiniteError(
            "nothing was written, for there are NaN or Inf values; --nonfinite zero or propagate goes on",
            nonfinite_problems(session.selected, before),
        )
    limiting = norms.tensors if policy.per_tensor else [norms.whole]
    if policy.needs_norm and before.is_finite and math.inf in limiting:
        raise BadInputError("the norm is beyond float64; limit the values with --max-value first")
    return before, norms


def _write(
    session: Session, policy: Policy, decision: Decision, before: Measurement, output: Output
) -> tuple[Norms, int]:
    """Write what was decided; the norms of the result, and the number of files that were written."""
    changed = [number for number, changes in enumerate(decision.changed) if changes]

    def rewriting(numbers: Sequence[int]) -> Change:
        factors = [decision.factors[number] for number in numbers]

        def change(held: Data, pieces: Sequence[Piece], tensors: Sequence[int]) -> BlockSums:
            return session.backend.scale(held, pieces, [factors[one] for one in tensors], policy.limit, policy.terms)

        return change

    def again(numbers: Sequence[int], divisors: Sequence[float]) -> Measurement:
        selected = [session.selected[number] for number in numbers]
        if session.journal is not None:
            return measure(session, selected, policy.terms, divisors)
        # The result is not in its place yet, so it is worked out once more.
        found = Measurement(selected, policy.terms, divisors)
        rewrite(session, selected, found, rewriting(numbers), {})
        return found

    selected = [session.selected[number] for number in changed]
    written = Measurement(selected, policy.terms)
    after = Norms(math.nan, [])

    def verify() -> None:
        nonlocal after
        if policy.nonfinite != "propagate" and (written.nan.any() or written.inf.any()):
            raise NonFiniteError(
                "nothing was written, for a result does not fit its type; a larger --unscale makes it smaller",
                overflow_problems(selected, written),
            )
        after = norms_of(before.updated(changed, written), again, per_tensor=policy.per_tensor)

    def fill(destinations: Mapping[Shard, File]) -> None:
        rewrite(session, selected, written, rewriting(changed), destinations)

    count = output.write(session, output.arriving(selected), fill, verify)
    return after, count


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
