"""Measures the norm of gradients and changes nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradtool.backends.values import NormSpec
from gradtool.declare import operation
from gradtool.errors import Problem
from gradtool.ops.call import Call
from gradtool.ops.passes import Measure
from gradtool.ops.results import StatisticsResult, nonfinite_problems
from gradtool.options import NormOptions
from gradtool.store.format.selection import SHARED_NAMES, groups_of

if TYPE_CHECKING:
    from gradtool.ops.histogram import ExponentCount, FileNorm, StorageRange, TensorNorm
    from gradtool.ops.passes import Measurement


@dataclass(frozen=True)
class GroupNorm:
    """The norm of the tensors that a regular expression matches; without an expression, of those in no group."""

    group: str | None
    tensors: int
    norm: float


@dataclass(frozen=True, repr=False)
class NormResult(StatisticsResult):
    """Statistics of all selected tensors, taken as one vector.

    With `histogram`, there is a row for each exponent that occurs, and a row in `per_dtype` for each storage type that
    the values could be stored in. The rows of tensors and files then have histograms, too.
    """

    headline = ("norm", "max_abs")

    norm: float
    histogram: tuple[ExponentCount, ...]
    per_dtype: tuple[StorageRange, ...]
    per_tensor: tuple[TensorNorm, ...]
    per_file: tuple[FileNorm, ...]
    per_group: tuple[GroupNorm, ...]
    problems: tuple[Problem, ...]


@operation(NormOptions)
def norm(options: NormOptions) -> NormResult:
    """Compute the norm of all tensors of all paths as one vector, like torch.nn.utils.get_total_norm.

    The norm is (Σ|g|^p)^(1/p) with p = `norm_type`, or max|g| for p = inf. Sums are float64 in the canonical order of
    `gradtool.reduction`, so the bits are the same for any thread count, block size and shard layout.

    The same name in several paths is an error, unless `concat` says that such tensors are parts of one vector. With
    `by_file`, the norm of each path is reported too, and `fail_above` applies to these norms. With `group`, the norm of
    the tensors that each regular expression matches is reported too, and that of all other tensors. With `histogram`,
    the finite values other than zero are counted by the exponent e that `math.frexp` returns.

    Returns:
        The result. NaN, Inf and a norm above `fail_above` are not raised; they are its `problems`.

    Raises:
        UsageError: an option is invalid.
        BadInputError: a file, index or tensor is invalid, or a tensor is in two groups.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: a file cannot be read, changed during the call, or may be half changed.
    """
    limit, wants_tensors = options.fail_above, options.per_tensor or options.top is not None
    call = Call(options.named, options, unique_names=None if options.concat or options.by_file else SHARED_NAMES)
    with call.open_to_read(ignore_unfinished=options.allow_unfinished):
        selected, spec = call.selected, NormSpec(options.norm_type)
        groups = groups_of(selected, options.group)
        measurement: Measurement
        if options.histogram:
            from gradtool.ops.histogram import CountExponents  # imported only if a call needs it

            measurement = call.run(CountExponents(selected, spec))
        else:
            measurement = call.run(Measure(selected, spec))
        norms = measurement.norms(per_tensor=wants_tensors, groups=[group.numbers for group in groups])
        rows: dict[str, Any] = {"histogram": (), "per_dtype": (), "per_tensor": (), "per_file": ()}
        if options.histogram or wants_tensors or options.by_file:
            from gradtool.ops.histogram import rows_of

            rows |= rows_of(call.opened, call.inputs.paths, options, measurement, norms.tensors)
        limited = [(row.norm, row.file) for row in rows["per_file"]] if options.by_file else [(norms.whole, None)]
        problems = nonfinite_problems(selected, measurement)
        problems += [_above(value, limit, file) for value, file in limited if limit is not None and not value <= limit]
        return NormResult(
            **call.statistics(selected, measurement),
            norm=norms.whole,
            **rows,
            per_group=tuple(
                GroupNorm(group.pattern, len(group.numbers), value)
                for group, value in zip(groups, norms.groups, strict=True)
            ),
            problems=tuple(problems),
        )


def _above(norm: float, limit: float, file: str | None) -> Problem:
    message = f"the norm {norm!r} is above the limit {limit!r}"
    if math.isnan(norm):
        message = f"the norm is NaN, which is not within the limit {limit!r}"
    return Problem("above-limit", message, file)
