"""Clips each unit of gradients by the norm of its own parameters: `clip --agc`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradtool.ops.agc import AgcPolicy, measure_units, parameters_of
from gradtool.ops.clip import ClipResult, write_scaled
from gradtool.ops.results import output_summary, statistics
from gradtool.ops.session import Call, refuse_engine
from gradtool.ops.units import FactorFile, ScaleUnits, units_of
from gradtool.wording import option

if TYPE_CHECKING:
    from gradtool.options import ClipOptions


def clip_units(options: ClipOptions) -> ClipResult:
    """Clip each unit by the norm of its parameters.

    Raises:
        UsageError: the options contradict each other.
        BadInputError: a tensor has no parameters, or they do not fit it.
    """
    policy = AgcPolicy.of(options)
    refuse_engine(options, option("agc"))
    call = Call.of(options.named, options, unique_names=not options.concat)
    with call.open_to_write(options) as (session, output):
        sets, params = parameters_of(policy, session.selected, output.targets)
        with FactorFile.create(session.selected) as file:
            before, units = measure_units(session, policy, params, file)
            dtype = options.dtype
            changed = [number for number, count in enumerate(units.changed) if count or dtype is not None]
            selected = [session.selected[number] for number in changed]
            scale = ScaleUnits(selected, policy.spec, changed, file)
            may_overflow = policy.nonfinite == "propagate"
            made = output.made_of(sets)
            destination, scaled, losses = write_scaled(session, made, scale, dtype, may_overflow=may_overflow)
        after = before.updated(changed, scaled)
    return ClipResult(
        **statistics(session, session.selected, before, unscale=policy.unscale, after=after, warnings=losses),
        output=output_summary(session, output, destination),
        unscale=policy.unscale,
        agc=policy.ratio,
        units=sum(units_of(one)[0] for one in session.selected),
        units_clipped=sum(units.clipped),
        norm_before=before.norms(unscale=policy.unscale).whole,
        norm_after=after.norms().whole,
        clipped=any(units.clipped),
        zeros_before=before.stored_zeros,
    )
