"""Clips each unit of gradients by the norm of its own parameters: `clip --agc`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradtool.ops.agc import AgcPolicy, measure_units, parameters_of
from gradtool.ops.clip import ClipResult
from gradtool.ops.results import facts, refuse_overflow, written
from gradtool.ops.session import Call, output_options_of, refuse_engine
from gradtool.ops.units import FactorFile, ScaleUnits, units_of

if TYPE_CHECKING:
    from gradtool.options import ClipOptions, Paths


def clip_units(paths: Paths, chosen: ClipOptions) -> ClipResult:
    """Clip each unit by the norm of its parameters.

    Raises:
        UsageError: the options contradict each other.
        BadInputError: a tensor has no parameters, or they do not fit it.
    """
    policy = AgcPolicy.of(chosen)
    refuse_engine(chosen, "clip --agc")
    output_options = output_options_of(chosen)
    call = Call.of(paths, chosen, unique_names=not chosen["concat"])
    with call.open_to_write(output_options) as (session, output):
        params = parameters_of(policy, session.selected, output.targets)
        with FactorFile.create(session.selected) as file:
            sums = measure_units(session, policy, params, file)
            before, changed = sums.measurement, sorted(sums.changed)
            selected = [session.selected[number] for number in changed]
            made = output.made_of(dict.fromkeys(param.shard for param in params))
            with session.writing(made, output.files(selected)) as destination:
                after = session.run(ScaleUnits(selected, policy.spec, changed, file), destination)
                if policy.nonfinite != "propagate":
                    refuse_overflow(selected, after)
                norm_after = before.updated(changed, after).norms().whole
    return ClipResult(
        **facts(session, session.selected, before, unscale=policy.unscale),
        **written(session, output, destination),
        per_tensor=(),
        per_group=(),
        max_norm=None,
        max_value=None,
        total_norm=None,
        unscale=policy.unscale,
        agc=policy.ratio,
        units=sum(units_of(one)[0] for one in session.selected),
        units_clipped=sums.clipped,
        limit=None,
        state=None,
        steps=None,
        norm_before=before.norms(unscale=policy.unscale).whole,
        norm_after=norm_after,
        coef=None,
        clipped=sums.clipped > 0,
        problems=(),
    )
