"""Clips gradients by their global norm, by each tensor's norm, or by value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from gradtool.errors import BadInputError
from gradtool.ops.agc import AgcPolicy, decide_units
from gradtool.ops.clip_policy import Decision, Policy, decide
from gradtool.ops.passes import Measure, Rewrite
from gradtool.ops.results import Facts, Written, facts, refuse_nonfinite, refuse_overflow, written
from gradtool.ops.session import Call, output_options_of, refuse_engine
from gradtool.ops.units import ScaleUnits
from gradtool.options import ClipOptions, Paths, Vector
from gradtool.signatures import complete, documented

if TYPE_CHECKING:
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


@dataclass(frozen=True, repr=False)
class ClipResult(Facts, Written):
    """What was found and what was done; norms and `max_abs` are those of the unscaled gradient.

    `coef` is None where there is no single one (`per_tensor`, `max_value`, `agc`). `norm_after` is measured on the
    values that were written. `units` and `units_clipped` are None without `agc`.
    """

    headline = ("norm_before", "norm_after", "coef", "clipped")

    per_tensor: tuple[TensorClip, ...]
    max_norm: float | None
    max_value: float | None
    total_norm: float | None
    unscale: float
    agc: float | None
    units: int | None
    units_clipped: int | None
    norm_before: float
    norm_after: float
    coef: float | None
    clipped: bool


@documented
def clip(paths: Vector = (), **options: Unpack[ClipOptions]) -> ClipResult:
    """Scale all selected tensors of all paths, taken as one vector, to a norm of at most `max_norm`, in place.

    coef = max_norm / (norm + eps), as in torch.nn.utils.clip_grad_norm_; eps=1e-7 gives Lucid's clip_grad_norm, eps=0
    that of Optax and Keras. If coef < 1, every element becomes round(g · coef), with coef rounded to float32 (F64:
    float64) and the exact product rounded to the storage type; if coef >= 1, no byte is written. The norm is that of
    `gradtool.norm`.

    With `agc` each unit, such as a row of a weight, becomes round(g · agc · max(‖w‖, agc_eps) / ‖g‖) where its norm is
    larger than agc · max(‖w‖, agc_eps); w are the parameters of the same unit, from `params`. This is adaptive gradient
    clipping (Brock et al., arXiv 2102.06171), for tensors whose first axis counts outputs, as torch has them.

    Raises:
        NonFiniteError: a value is NaN or Inf, or a result overflows its type; nothing is written.
        UsageError: an option is invalid, or contradicts another one.
        BadInputError: a file, index or tensor is invalid, or a coefficient is out of range for its type.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: reading or writing failed; nothing is written.
    """
    chosen = complete("clip", ClipOptions, options)
    agc = AgcPolicy.of(chosen)
    if agc is not None:
        return _clip_units(paths, chosen, agc)
    policy = Policy.of(chosen)
    output_options = output_options_of(chosen)
    call = Call.of(paths, chosen, unique_names=not chosen["concat"])
    with call.open_to_write(output_options) as (session, output):
        before = session.run(Measure(session.selected, policy.spec, leaves=True))
        norms = _checked_norms(session, policy, before)
        decision = decide(policy, session.selected, before, norms)
        changed = [number for number, changes in enumerate(decision.changed) if changes]
        selected = [session.selected[number] for number in changed]
        rewrite = Rewrite(selected, policy.spec, [decision.factors[number] for number in changed], policy.limit)
        with session.writing(output, output.files(selected)) as destination:
            after = session.run(rewrite, destination)
            if policy.nonfinite != "propagate":
                refuse_overflow(selected, after)
            norms_after = before.updated(changed, after).norms(per_tensor=policy.per_tensor)
    return ClipResult(
        **facts(session, session.selected, before, unscale=policy.unscale),
        **written(session, output, destination),
        per_tensor=tuple(_rows(session, decision, norms, norms_after) if policy.per_tensor else ()),
        max_norm=policy.max_norm,
        max_value=policy.max_value,
        total_norm=policy.total_norm,
        unscale=policy.unscale,
        agc=None,
        units=None,
        units_clipped=None,
        norm_before=norms.whole,
        norm_after=norms_after.whole,
        coef=decision.coef,
        clipped=any(decision.clipped),
    )


def _clip_units(paths: Paths, chosen: ClipOptions, policy: AgcPolicy) -> ClipResult:
    """Clip each unit by the norm of its parameters."""
    refuse_engine(chosen, "clip --agc")
    output_options = output_options_of(chosen)
    call = Call.of(paths, chosen, unique_names=not chosen["concat"])
    with call.open_to_write(output_options) as (session, output):
        before = session.run(Measure(session.selected, policy.spec))
        if policy.nonfinite == "error":
            refuse_nonfinite(session.selected, before, "Use --nonfinite propagate to continue")
        decision = decide_units(session, policy, session.selected)
        changed = [number for number, changes in enumerate(decision.changed) if changes]
        selected = [session.selected[number] for number in changed]
        scale = ScaleUnits(selected, policy.spec, [decision.factors[number] for number in changed])
        with session.writing(output, output.files(selected)) as destination:
            after = session.run(scale, destination)
            if policy.nonfinite != "propagate":
                refuse_overflow(selected, after)
            norm_after = before.updated(changed, after).norms().whole
    return ClipResult(
        **facts(session, session.selected, before, unscale=policy.unscale),
        **written(session, output, destination),
        per_tensor=(),
        max_norm=None,
        max_value=None,
        total_norm=None,
        unscale=policy.unscale,
        agc=policy.ratio,
        units=decision.units,
        units_clipped=decision.clipped,
        norm_before=before.norms(unscale=policy.unscale).whole,
        norm_after=norm_after,
        coef=None,
        clipped=decision.clipped > 0,
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
