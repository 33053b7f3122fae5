"""Clips gradients by their global norm, by the norm of each group or tensor, or by value."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.declare import operation
from gradtool.errors import NonFiniteError, Problem, option, say
from gradtool.ops.call import Call, require_this_machine
from gradtool.ops.clip.decide import Decision, check_options, decide, group_limits
from gradtool.ops.clip.limits import StateFile, rule_from_options, state_path
from gradtool.ops.results import OnceResult, OutputSummary, loss_warnings, overflow_problems
from gradtool.options import ClipOptions
from gradtool.store.format.selection import SHARED_NAMES, groups_of
from gradtool.store.transaction.inputs import WritePlan
from gradtool.store.transaction.once import Once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.engines.passes import Pass
    from gradtool.ops.passes import Measurement

# The options that the result repeats.
_GIVEN = ("max_norm", "max_value", "total_norm", "unscale", "agc")


@dataclass(frozen=True)
class TensorClip:
    """A tensor before and after clipping. `coef` is 1 if nothing is multiplied, and None without a limit."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    norm_before: float
    norm_after: float
    coef: float | None
    clipped: bool


@dataclass(frozen=True)
class GroupClip:
    """The tensors that a regular expression matches, before and after clipping; `group` is None for those in no group.

    `coef` is 1 if nothing is multiplied, and None without a limit.
    """

    group: str | None
    tensors: int
    norm_before: float
    norm_after: float
    coef: float | None
    clipped: bool


@dataclass(frozen=True, repr=False, kw_only=True)
class ClipResult(OnceResult):
    """The result of `clip`; norms and `max_abs` are those of the unscaled gradient.

    `coef` is 1 if nothing is multiplied, and None if there is no limit, or tensors have different coefficients
    (`per_tensor`, `group`, `max_value`, `agc`). `norm_after` is measured on the values that were written. `units` and
    `units_clipped` are None without `agc`. `limit` is the maximum norm that the rule of `limit` computed, or None if
    `z` does not clip; `steps` counts the norms in its history. `zeros_before` counts zeros before clipping, and `zeros`
    those after it. If the norm is above `skip_above`, `problems` says so, and nothing was written. If the gradients are
    `already_done`, an earlier call with the same ID clipped them: no value was read, and what was not measured is None.
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
    norm_before: float | None = None
    norm_after: float | None = None
    coef: float | None = None
    clipped: bool = False
    zeros_before: int | None = None
    already_done: bool = False
    problems: tuple[Problem, ...] = ()


@operation(ClipOptions)
def clip(options: ClipOptions) -> ClipResult:
    """Scale all selected tensors of all paths, taken as one vector, to a norm of at most `max_norm`, in place.

    coef = max_norm / (norm + eps), as in torch.nn.utils.clip_grad_norm_; eps=1e-7 gives Lucid's clip_grad_norm, eps=0
    that of Optax and Keras. If coef < 1, every element becomes round(g · coef), with coef rounded to float32 (F64:
    float64) and the exact product rounded to the storage type; if coef >= 1, or so near to 1 that every product rounds
    back, nothing is written. The norm is that of `gradtool.norm`.

    A `group` REGEX:C clips the tensors whose name matches REGEX to a norm of C. All other tensors are clipped to a norm
    of `max_norm`, or stay unchanged without it.

    A `limit` is computed from the norms of earlier calls, which the file `state` stores: "z=2.5" is ZClip (arXiv
    2504.02507), "percentile=10" is AutoClip (arXiv 2007.14469); `gradtool.ops.clip.limits` has their formulas. If
    `max_norm` is given too, the smaller limit applies. The state is written together with the gradients, or alone if
    nothing is clipped.

    With `agc`, each unit (such as a row of a weight) becomes round(g · agc · max(‖w‖, agc_eps) / ‖g‖) where its norm is
    larger than agc · max(‖w‖, agc_eps); w are the parameters of the same unit, from `params`. This is adaptive gradient
    clipping (Brock et al., arXiv 2102.06171), for tensors whose first axis is the outputs, as in torch.

    With `dtype`, the selected tensors are stored in another type in new files, rounded once. A warning says so if many
    values become 0 or subnormal.

    Raises:
        NonFiniteError: a value is NaN or Inf, or a result overflows its type; nothing is written.
        UsageError: an option is invalid, or contradicts another one.
        BadInputError: a file, index, tensor or state is invalid, a tensor is in two groups, or a coefficient is out of
            range for its type.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: reading or writing failed; nothing is written, unless the message names `recover`.
    """
    check_options(options)
    limits, rule, state = group_limits(options), rule_from_options(options), state_path(options)
    if options.agc is not None:
        require_this_machine(options, option("agc"))
    call = Call(options.named, options, unique_names=None if options.concat else SHARED_NAMES)
    once, given = Once.from_options(options), {name: getattr(options, name) for name in _GIVEN}
    given["state"] = None if state is None else str(state)
    with call.open_to_write(options, WritePlan(state=state, once=once)), contextlib.ExitStack() as stack:
        selected, groups = call.selected, groups_of(call.selected, [pattern for pattern, _ in limits])
        state_file = None if rule is None or state is None else StateFile.read(state, rule, options.norm_type)
        if call.output.is_done(None if state_file is None else state_file.state.once):
            return ClipResult(**call.already_done(), norm_type=options.norm_type, **given)
        if state_file is not None and once is not None:
            state_file = state_file.recording(once)
        if options.agc is None:
            decision = decide(options, call, groups, state_file)
        else:
            from gradtool.ops.clip.units import decide_units  # only needed for this

            decision = decide_units(options, call, stack)
        after, warnings = _write(call, options, decision)
        before, norms = decision.before, decision.norms
        norms_after = norms
        if decision.scaling is not None:
            members = [group.numbers for group in groups]
            norms_after = after.norms(per_tensor=options.per_tensor, groups=members)
    return ClipResult(
        **call.statistics(selected, before, unscale=options.unscale, after=after, warnings=warnings),
        output=call.output_summary(),
        per_tensor=tuple(
            TensorClip(tensor.name, shard.name, tensor.dtype, tensor.shape, was, now, coef, clipped)
            # There are no norms of tensors unless `per_tensor` asks for them.
            for (shard, tensor), was, now, coef, clipped in zip(
                selected, norms.tensors, norms_after.tensors, decision.coefs, decision.clipped, strict=False
            )
        ),
        per_group=tuple(
            GroupClip(
                pattern,
                len(numbers),
                was,
                now,
                # Of tensors of several types, the coefficient may be 1 for some.
                coef=next((decision.coefs[n] for n in numbers if decision.clipped[n]), decision.coefs[numbers[0]]),
                clipped=any(decision.clipped[number] for number in numbers),
            )
            for (pattern, numbers), was, now in zip(groups, norms.groups, norms_after.groups, strict=True)
        ),
        **given,
        units=decision.units[0],
        units_clipped=decision.units[1],
        limit=decision.limit,
        steps=None if decision.state_file is None else decision.state_file.state.steps,
        norm_before=norms.whole,
        norm_after=norms_after.whole,
        coef=decision.coef,
        clipped=any(decision.clipped),
        zeros_before=before.stored_zeros,
        problems=tuple(decision.problems),
    )


def _write(call: Call, options: ClipOptions, decision: Decision) -> tuple[Measurement, Sequence[Problem]]:
    """Write what changes, and the state; return the statistics of all tensors now, and warnings."""
    if decision.scaling is None:
        return decision.before, ()
    work: Pass[Measurement] = decision.scaling
    targets, indexes = work.selected, None
    if options.dtype is None:
        files = call.output.files(targets)
    else:
        from gradtool.ops.clip.convert import convert  # only needed for this

        work, files, indexes = convert(call.output, decision.scaling, options.dtype)
        targets = work.targets
    state = None if decision.state_file is None else decision.state_file.content()
    with call.writing(files, indexes, state) as destination:
        after = call.run(work, destination)
        problems = overflow_problems(targets, after) if options.nonfinite != "propagate" else ()
        if problems:
            hint = say("use a larger {}", option("unscale"))
            raise NonFiniteError("results overflow their type; nothing written", problems, hint)
    # Where values are limited to 0, all are lost on purpose.
    losses = () if options.max_value == 0 else loss_warnings(targets, after)
    return decision.before.updated(decision.numbers, after), losses
