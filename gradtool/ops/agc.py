"""Adaptive gradient clipping: each unit is limited by the norm of its own parameters."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.arrays import np
from gradtool.backends.protocol import NormSpec, UnitLimits
from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError, NonFiniteError, Problem, UsageError
from gradtool.ops.passes import Measure
from gradtool.ops.results import nonfinite_problems, refuse_nonfinite
from gradtool.ops.units import ComputeUnitFactors
from gradtool.store.transaction.inputs import Inputs, open_to_read
from gradtool.store.transaction.output_checks import check_not_replaced

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gradtool.ops.measurement import Measurement
    from gradtool.ops.session import Session
    from gradtool.ops.units import FactorFile, UnitTally
    from gradtool.options import ClipOptions
    from gradtool.store.format.gradset import GradientSet, Selected


class AgcPolicy(NamedTuple):
    """The options of adaptive clipping."""

    ratio: float
    params: str
    eps: float
    unscale: float
    nonfinite: str

    @classmethod
    def of(cls, options: ClipOptions) -> Self:
        """The policy of complete options; `UsageError` where they contradict each other."""
        ratio, params = options.agc, options.params
        if ratio is None:
            raise UsageError("--params and --agc-eps are for --agc; give --agc, too")
        if params is None:
            raise UsageError("--agc needs the parameters of the gradients; give them with --params")
        others = {
            "--max-norm": options.max_norm is not None,
            "--max-value": options.max_value is not None,
            "--eps": not options.is_default("eps"),
            "--per-tensor": options.per_tensor,
            "--total-norm": options.total_norm is not None,
            "--group": bool(options.group),
            "--limit": options.limit is not None,
            "--state": options.state is not None,
            "--warmup": options.warmup is not None,
            "--window": options.window is not None,
            "--skip-above": options.skip_above is not None,
        }
        for option, is_given in others.items():
            if is_given:
                raise UsageError(f"--agc has a limit for each unit and does not take {option}")
        if options.norm_type != 2:  # noqa: PLR2004
            raise UsageError("--agc is about norms of order 2; leave out --norm-type")
        if options.nonfinite == "zero":
            raise UsageError("--agc does not take --nonfinite zero; use error or propagate")
        return cls(ratio, os.fspath(params), options.agc_eps, options.unscale, options.nonfinite)

    @property
    def spec(self) -> NormSpec:
        """The norm that is measured."""
        return NormSpec()

    @property
    def limits(self) -> UnitLimits:
        """The limits of units."""
        return UnitLimits(self.ratio, self.eps, self.unscale)


def parameters_of(
    policy: AgcPolicy, selected: Sequence[Selected], targets: Sequence[Path]
) -> tuple[list[GradientSet], list[Selected]]:
    """The parameters of gradients that are written to the targets, and their set: tensors of the same names and shapes.

    Raises:
        UsageError: a target is a file of the parameters.
        BadInputError: a file is invalid, or a tensor is missing or has another shape or a type without values.
        SystemRefusedError: a file cannot be read, or may be half changed.
    """
    from gradtool.store.format.gradset import check_dtypes, require_unique_names

    opened = open_to_read(Inputs([policy.params]))
    check_not_replaced(opened.sets, "params", targets)
    require_unique_names(opened.selected)
    home = {one.tensor.name: one for one in opened.selected}
    problems = []
    for one in selected:
        own = home.get(one.tensor.name)
        if own is None:
            message = f"is not among the parameters in {policy.params}"
            problems.append(Problem("missing-tensor", message, str(one.shard.path), one.tensor.name))
        elif own.tensor.shape != one.tensor.shape:
            message = f"shape {list(own.tensor.shape)} is not that of the gradient, {list(one.tensor.shape)}"
            problems.append(Problem("shape", message, str(own.shard.path), one.tensor.name))
    if problems:
        raise BadInputError.from_problems(problems, "nothing written. Leave tensors out with --exclude")
    params = [home[one.tensor.name] for one in selected]
    check_dtypes(params, tuple(STORAGE))
    return opened.sets, params


def measure_units(
    session: Session, policy: AgcPolicy, params: Sequence[Selected], file: FactorFile
) -> tuple[Measurement, UnitTally]:
    """Measure gradients, and write the factors of their units to a file.

    Raises:
        NonFiniteError: a gradient or a parameter is NaN or Inf.
        BadInputError: a coefficient is out of range for its type.
    """
    grads = session.selected
    sums, units = session.run(ComputeUnitFactors(grads, policy.spec, params, policy.limits, file))
    if policy.nonfinite == "error":
        refuse_nonfinite(grads, sums, "Use --nonfinite propagate to continue")
        suspects = [param for param, count in zip(params, units.nonfinite, strict=True) if count]
        problems = nonfinite_problems(suspects, session.run(Measure(suspects, policy.spec))) if suspects else ()
        if problems:
            raise NonFiniteError("a parameter is NaN or Inf; nothing written. Use --nonfinite propagate", problems)
    for number, unit in enumerate(units.beyond):
        if unit >= 0:
            factor = memoryview(bytearray(8)).cast("d")
            file.read(number, unit, factor)
            raise _out_of_range(grads[number], factor[0])
    return sums, units


def _out_of_range(one: Selected, factor: float) -> BadInputError:
    work = np.finfo(STORAGE[one.tensor.dtype].work)
    return BadInputError(
        f"the coefficient {factor!r} of a unit is out of range for {work.dtype} ({work.tiny:.3g} to {work.max:.3g}), "
        f"its type for {one.tensor.dtype}; nothing written. Use a larger --agc, or clip in several steps",
        file=one.shard.path,
        tensor=one.tensor.name,
    )
