"""Clips gradients by their global norm, by the norm of each group or tensor, or by value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gradtool.declare import operation
from gradtool.errors import BadInputError, Problem, UsageError
from gradtool.ops.clip_policy import Decision, Policy, decide, is_limit, keep, rounded_factor
from gradtool.ops.groups import groups_of
from gradtool.ops.limits.learn import Learned, state_path
from gradtool.ops.limits.state import Kept
from gradtool.ops.passes import Measure, Rewrite
from gradtool.ops.results import (
    OutputSummary,
    Statistics,
    loss_warnings,
    output_summary,
    refuse_nonfinite,
    refuse_overflow,
    statistics,
)
from gradtool.ops.session import Call
from gradtool.options import ClipOptions
from gradtool.store.transaction.destination import DISCARD
from gradtool.store.transaction.inputs import WritePlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.engines import Pass
    from gradtool.ops.groups import Group
    from gradtool.ops.measurement import Measurement, Norms
    from gradtool.ops.passes import Scaling
    from gradtool.ops.session import Session
    from gradtool.store.format.gradset import Selected
    from gradtool.store.transaction.destination import Destination, NewFile
    from gradtool.store.transaction.output import Output
    from gradtool.store.transaction.small import SmallFile


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
class GroupClip:
    """What was done to the tensors that a regular expression matches; without one, to those in no group.

    `coef` is None where nothing limits them.
    """

    group: str | None
    tensors: int
    norm_before: float
    norm_after: float
    coef: float | None
    clipped: bool


@dataclass(frozen=True, repr=False, kw_only=True)
class ClipResult(Statistics):
    """What was found and what was done; norms and `max_abs` are those of the unscaled gradient.

    `coef` is None where there is no single one (`per_tensor`, `group`, `max_value`, `agc`). `norm_after` is measured on
    the values that were written. `units` and `units_clipped` are None without `agc`. `limit` is what the rule of
    `limit` came to, None where `z` does not clip, and `steps` counts the norms that its state has seen. `zeros` counts
    what was written, and `zeros_before` what was there. A norm above `skip_above` is one of the `problems`; then
    nothing was written.
    """

    headline = ("norm_before", "norm_after", "coef", "clipped")

    output: OutputSummary
    per_tensor: tuple[TensorClip, ...] = ()
    per_group: tuple[GroupClip, ...] = ()
    max_norm: float | None = None
    max_value: float | None = None
    total_norm: float | None = None
    unscale: float
    agc: float | None = None
    units: int | None = None
    units_clipped: int | None = None
    limit: float | None = None
    state: str | None = None
    steps: int | None = None
    norm_before: float
    norm_after: float
    coef: float | None = None
    clipped: bool
    zeros_before: int
    problems: tuple[Problem, ...] = ()


@operation(ClipOptions)
def clip(options: ClipOptions) -> ClipResult:
    """Scale all selected tensors of all paths, taken as one vector, to a norm of at most `max_norm`, in place.

    coef = max_norm / (norm + eps), as in torch.nn.utils.clip_grad_norm_; eps=1e-7 gives Lucid's clip_grad_norm, eps=0
    that of Optax and Keras. If coef < 1, every element becomes round(g · coef), with coef rounded to float32 (F64:
    float64) and the exact product rounded to the storage type; if coef >= 1, no byte is written. The norm is that of
    `gradtool.norm`.

    A `group` REGEX:C clips the tensors whose name matches REGEX to C, by their own norm; all other tensors are clipped
    to `max_norm`, by theirs, or are left as they are without it.

    A `limit` follows from the norms of earlier calls, which the file `state` keeps: "z=2.5" is ZClip (arXiv
    2504.02507), "percentile=10" is AutoClip (arXiv 2007.14469); `gradtool.ops.limits` has their formulas. With
    `max_norm` too, the smaller one counts. The state is written together with the gradients, or by itself where nothing
    is clipped.

    With `agc` each unit, such as a row of a weight, becomes round(g · agc · max(‖w‖, agc_eps) / ‖g‖) where its norm is
    larger than agc · max(‖w‖, agc_eps); w are the parameters of the same unit, from `params`. This is adaptive gradient
    clipping (Brock et al., arXiv 2102.06171), for tensors whose first axis counts outputs, as torch has them.

    With `dtype`, the selected tensors are stored in another type in new files, rounded once. A warning says so if many
    values become 0 or subnormal.

    Raises:
        NonFiniteError: a value is NaN or Inf, or a result overflows its type; nothing is written.
        UsageError: an option is invalid, or contradicts another one.
        BadInputError: a file, index, tensor or state is invalid, a tensor is in two groups, or a coefficient is out of
            range for its type.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: reading or writing failed; nothing is written.
    """
    if options.dtype is not None and options.output is None and options.output_dir is None:
        raise UsageError("--dtype requires --output or --output-dir")
    is_agc = options.agc is not None or options.params is not None
    if is_agc or not options.is_default("agc_eps"):
        from gradtool.ops.clip_units import clip_units  # only needed for this

        return clip_units(options)
    policy, state = Policy.of(options), state_path(options)
    call = Call.of(options.named, options, unique_names=not options.concat)
    with call.open_to_write(options, WritePlan(state=state)) as (session, output):
        groups = groups_of(session.selected, [one.pattern for one in policy.groups])
        kept = None if policy.rule is None or state is None else Kept.read(state, policy.rule, policy.norm_type)
        before = session.run(Measure(session.selected, policy.spec, leaves=True))
        norms = _checked_norms(session, policy, before, groups)
        norm = norms.whole if policy.total_norm is None else policy.total_norm
        problems = policy.problems(norm)
        learned = None if policy.rule is None or kept is None or problems else Learned.of(policy.rule, kept, norm)
        limited = policy if learned is None else policy.with_limit(learned.limit)
        decision = keep(session.selected) if problems else decide(limited, session.selected, before, norms, groups)
        plan = _Plan(policy, decision, learned, options.dtype)
        done = _Done(DISCARD, before) if problems else _write(session, output, before, plan)
        numbers = [group.numbers for group in groups]
        norms_after = norms if problems else done.after.norms(per_tensor=policy.per_tensor, groups=numbers)
    return ClipResult(
        **statistics(
            session, session.selected, before, unscale=policy.unscale, after=done.after, warnings=done.warnings
        ),
        output=output_summary(session, output, done.destination),
        zeros_before=before.stored_zeros,
        per_tensor=tuple(_rows(session, decision, norms, norms_after) if policy.per_tensor else ()),
        per_group=tuple(_group_rows(groups, policy, decision, norms, norms_after)),
        max_norm=policy.max_norm,
        max_value=policy.max_value,
        total_norm=policy.total_norm,
        unscale=policy.unscale,
        limit=None if learned is None else learned.limit,
        state=None if state is None else str(state),
        steps=learned.steps if learned else kept.state.steps if kept else None,
        norm_before=norms.whole,
        norm_after=norms_after.whole,
        coef=decision.coef,
        clipped=any(decision.clipped),
        problems=tuple(problems),
    )


class _Plan(NamedTuple):
    """What is to be written, and in which type, if it is not the old one."""

    policy: Policy
    decision: Decision
    learned: Learned | None
    dtype: str | None


class _Done(NamedTuple):
    """Where it was written, what all tensors are now, and what was lost."""

    destination: Destination
    after: Measurement
    warnings: Sequence[Problem] = ()


def _write(session: Session, output: Output, before: Measurement, plan: _Plan) -> _Done:
    """Write what changes, or everything in another type, and the state."""
    policy, decision, learned, dtype = plan
    state = None if learned is None else learned.state
    numbers = [number for number, changes in enumerate(decision.changed) if changes or dtype is not None]
    selected = [session.selected[number] for number in numbers]
    factors = [rounded_factor(session.selected[number].tensor.dtype, decision.factors[number]) for number in numbers]
    rewrite = Rewrite(selected, policy.spec, factors, policy.limit)
    may_overflow = policy.nonfinite == "propagate"
    destination, after, losses = write_scaled(session, output, rewrite, dtype, may_overflow=may_overflow, state=state)
    # All is lost on purpose where values are limited to 0.
    return _Done(destination, before.updated(numbers, after), () if policy.limit == 0 else losses)


def write_scaled(
    session: Session,
    output: Output,
    scaling: Scaling,
    dtype: str | None,
    *,
    may_overflow: bool,
    state: SmallFile | None = None,
) -> tuple[Destination, Measurement, list[Problem]]:
    """Run a pass and write what it makes of its tensors. Returns the destination, the measurement, and warnings.

    Raises:
        NonFiniteError: a result overflows its type, and may not.
    """
    work: Pass[Measurement] = scaling
    targets: Sequence[Selected] = scaling.selected
    files: Sequence[NewFile] = output.files(targets)
    indexes: Sequence[SmallFile] | None = None
    if dtype is not None:
        from gradtool.ops.convert import converted  # only needed for this

        work, targets, files, indexes = converted(output, scaling, dtype)
    with session.writing(output, files, indexes, state) as destination:
        after = session.run(work, destination)
        if not may_overflow:
            refuse_overflow(targets, after)
    return destination, after, loss_warnings(targets, after)


def _checked_norms(session: Session, policy: Policy, before: Measurement, groups: Sequence[Group]) -> Norms:
    """The norms of what was measured; refused where the policy says so."""
    if policy.nonfinite == "error":
        refuse_nonfinite(session.selected, before, "Use --nonfinite zero or propagate to continue")
    numbers = [group.numbers for group in groups]
    norms = before.norms(per_tensor=policy.per_tensor, groups=numbers, unscale=policy.unscale)
    limiting = norms.tensors if policy.per_tensor else [norms.whole]
    if groups:
        limiting = [one for one, limit in zip(norms.groups, policy.limits, strict=False) if is_limit(limit)]
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


def _group_rows(
    groups: Sequence[Group], policy: Policy, decision: Decision, before: Norms, after: Norms
) -> list[GroupClip]:
    return [
        GroupClip(
            group=group.pattern,
            tensors=len(group.numbers),
            norm_before=norm_before,
            norm_after=norm_after,
            coef=None if limit is None else decision.coefs[group.numbers[0]],
            clipped=any(decision.clipped[number] for number in group.numbers),
        )
        for group, limit, norm_before, norm_after in zip(
            groups, policy.limits[: len(groups)], before.groups, after.groups, strict=True
        )
    ]
