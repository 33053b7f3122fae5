"""The steps of accumulating: measure the gradients by themselves, add them, clip the sum, write it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends.protocol import AddMode, NormSpec, Trim
from gradtool.engines.passes import Pass
from gradtool.errors import BadInputError, NonFiniteError, Problem, number_of, option, say
from gradtool.ops.accumulate.passes import Add, Compare
from gradtool.ops.aligned_read import Operand
from gradtool.ops.passes import SMALLEST_NORMAL, Measure, clip_coef, is_limit
from gradtool.ops.results import nonfinite_problems, overflow_problems
from gradtool.ops.weights import Weight, has_values, replace_total, stored_key, stored_sum, sum_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.engines.passes import Tally
    from gradtool.ops.accumulate.match import Buffer, Contribution
    from gradtool.ops.call import Call
    from gradtool.ops.passes import Measurement
    from gradtool.options import AccumulateOptions
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.destination import WrittenFiles
    from gradtool.store.transaction.output import Output

_SKIP = say(
    "use {} to leave out such gradients, or {} to drop such a buffer",
    option("nonfinite", "skip"),
    option("overwrite", True),
)


class Outcome(NamedTuple):
    """What was done: measurements of the targets as they are now, and as they were if that was read."""

    targets: Sequence[Selected]
    after: Measurement
    before: Measurement | None
    destination: WrittenFiles
    contributions: Sequence[Contribution]
    weight_sum: float = 0.0
    sum_norm: float | None = None
    coef: float | None = None
    warnings: Sequence[Problem] = ()


def trim_of(options: AccumulateOptions) -> Trim | None:
    """Return what is dropped before the mean of values; None for sums, and for means of all."""
    if options.reduce in (None, "sum", "mean"):
        return None
    dropped = None if options.reduce == "median" else int(options.reduce.removeprefix("trimmed="))
    return Trim(dropped, finite=options.nonfinite != "propagate")


def skip_update(
    call: Call, options: AccumulateOptions, buffer: Buffer, contributions: Sequence[Contribution], output: Output
) -> Outcome:
    """Add nothing: measure the buffer, and copy it where its output is wanted elsewhere."""
    _sum_of_weights(options, contributions)
    targets, spec = () if options.is_new else buffer.targets, NormSpec(options.norm_type)
    measurement = call.run(Measure(targets, spec))
    files = [] if options.is_new else buffer.files(output, ())
    with call.writing(output, files) as destination:
        copying: Pass[Tally] = Pass((), spec)
        call.run(copying, destination)
    skipped = [contribution.with_row(taken=False) for contribution in contributions]
    return Outcome(targets, measurement, None if options.is_new else measurement, destination, skipped)


def add(
    call: Call, options: AccumulateOptions, buffer: Buffer, contributions: Sequence[Contribution], output: Output
) -> Outcome:
    """Add the gradients, and clip the sum where there is a limit."""
    contributions, warnings = _screen(call, options, buffer.targets, contributions)
    accepted = [contribution for contribution in contributions if contribution.row.taken]
    _check_left(options, buffer.targets, accepted)
    weight_sum = _sum_of_weights(options, accepted)
    total, hint = _total(options, buffer, accepted)
    metadata, dropped = replace_total(buffer.existing, options.weight_key, total, hint)
    if total is not None and options.weight_key is not None and options.is_new:
        buffer = buffer.with_metadata(total.entries(options.weight_key))
    numbers = sorted({number for contribution in accepted for number in contribution.tensors})
    if options.missing == "zero" and not options.adds_to_old:
        # Where zeros alone are added, a buffer that is kept stays as it is.
        numbers = list(range(len(buffer.targets)))
    adding = _adding(options, [buffer.targets[number] for number in numbers], numbers, accepted, weight_sum)
    sum_norm = coef = None
    before: list[Measurement] = []
    if options.max_norm is not None:
        sums, *before = call.run(replace(adding, rule=adding.rule._replace(rounds=False))).each
        _check_finite(call, options, adding, sums, before)
        sum_norm = sums.norms().whole
        coef = _coef(options, "max_norm", sums, sum_norm)
        adding = replace(adding, rule=adding.rule._replace(factor=coef), measures_before=False)
    if options.per_gradient:
        contributions = _compare(call, adding, contributions)
    with call.writing(output, buffer.files(output, adding.selected, metadata), buffer.indexes) as destination:
        after, *measured = call.run(adding, destination).each
        _check_finite(call, options, adding, after, measured)
        rest = buffer.measure_without(call, numbers, adding.spec)
    before = before or measured
    if options.is_new and len(numbers) < len(buffer.targets):
        left = number_of(len(buffer.targets) - len(numbers), "tensor")
        dropped = [*dropped, Problem("skipped", f"{left} only in gradients that were skipped; zeros in the new set")]
    return Outcome(
        targets=buffer.targets,
        after=rest.updated(numbers, after),
        before=rest.updated(numbers, before[0]) if before else None,
        destination=destination,
        contributions=contributions,
        weight_sum=weight_sum,
        sum_norm=sum_norm,
        coef=coef,
        warnings=[*warnings, *dropped],
    )


def _adding(
    options: AccumulateOptions,
    targets: Sequence[Selected],
    numbers: Sequence[int],
    accepted: Sequence[Contribution],
    weight_sum: float,
) -> Add:
    """Return the pass over the targets that something is added to, which have these numbers; check their divisors."""
    divisors: list[float] = []
    if options.is_mean and options.missing == "skip" and any(len(each.tensors) < len(targets) for each in accepted):
        divisors = [sum_of([each.row.weight for each in accepted if number in each.tensors]) for number in numbers]
    if 0 in divisors:
        target = targets[divisors.index(0)]
        message = "the weights of the gradients that have it add up to 0, so that there is no mean"
        raise BadInputError(message, file=target.shard.name, tensor=target.tensor.name, code="weight")
    places = {number: place for place, number in enumerate(numbers)}
    return Add(
        targets,
        NormSpec(options.norm_type),
        # In the order of their files, in which they may have to be measured.
        [Operand({places[number]: each.tensors[number] for number in each.tensors}, each.scale) for each in accepted],
        AddMode(options.adds_to_old, weight_sum if options.is_mean else None),
        trim_of(options),
        divisors,
        fills=options.missing == "zero",
        is_new=options.is_new,
        measures_before=options.adds_to_old,
    )


def _screen(
    call: Call, options: AccumulateOptions, targets: Sequence[Selected], contributions: Sequence[Contribution]
) -> tuple[Sequence[Contribution], list[Problem]]:
    """Measure each gradient by itself where an option asks for that: limit its norm, or skip it with a warning.

    Raises:
        NonFiniteError: a gradient holds NaN or Inf and may not be skipped, or every one does.
        BadInputError: a norm is beyond float64, or a coefficient underflows.
    """
    if options.clip_each is None and options.nonfinite != "skip" and not options.per_gradient:
        return contributions, []
    screened, warnings, problems = [], [], []
    for contribution in contributions:
        selected = list(contribution.tensors.values())
        sums = call.run(Measure(selected, NormSpec(options.norm_type)))
        bad = nonfinite_problems(selected, sums)
        norm = _broadcast(call, targets, contribution, sums).norms(unscale=abs(contribution.unscale)).whole
        coef = None if options.clip_each is None else _coef(options, "clip_each", sums, norm, contribution)
        taken = not bad or options.nonfinite != "skip"
        row = {"taken": taken, "norm": norm, "coef": coef, "nan": sum(sums.nan), "inf": sum(sums.inf)}
        screened.append(contribution.with_row(**row))
        problems += bad
        if not taken:
            message = f"whole gradient skipped: {bad[0].message}"
            warnings.append(Problem("skipped", message, contribution.row.file, bad[0].tensor))
    if problems and options.nonfinite == "error":
        raise NonFiniteError("input contains NaN or Inf; nothing written", problems, _SKIP)
    if len(warnings) == len(contributions):
        raise NonFiniteError("every gradient contains NaN or Inf; nothing written", problems)
    return screened, warnings


def _broadcast(call: Call, targets: Sequence[Selected], contribution: Contribution, sums: Measurement) -> Measurement:
    """Measure what a gradient adds, without its weight; unless it broadcasts, that is what is in its files."""
    numbers = sorted(contribution.tensors)
    gradient, targets = Operand(contribution.tensors).restricted_to(numbers), [targets[number] for number in numbers]
    if all(gradient.tensors[at].tensor.elements == target.tensor.elements for at, target in enumerate(targets)):
        return sums
    added = Add(targets, sums.spec, [gradient], AddMode(include_buffer=False, rounds=False), is_new=True)
    measurement: Measurement = call.run(added).each[0]
    return measurement


def _coef(
    options: AccumulateOptions, name: str, sums: Measurement, norm: float, gradient: Contribution | None = None
) -> float:
    """Return what clips a norm to the limit of an option; 1 where there is nothing to clip. NaN goes through."""
    limit, file, factor = getattr(options, name), None, 1.0
    if gradient is not None:
        file, factor = gradient.row.file, gradient.factor
    if is_limit(limit) and sums.is_finite and math.isinf(norm):
        raise BadInputError("the norm overflows float64 and cannot be clipped; nothing written", file=file)
    coef = clip_coef(limit, norm, options.eps)
    if coef >= 1:
        return 1.0
    smaller = coef if coef < SMALLEST_NORMAL else abs(factor * coef)
    # A weight alone is taken as it is given.
    if coef > 0 and (coef < SMALLEST_NORMAL or (factor and smaller < SMALLEST_NORMAL)):
        message = (
            f"the coefficient {smaller!r} is out of range for float64 (from {SMALLEST_NORMAL:.3g}); nothing written"
        )
        raise BadInputError(message, file=file, hint=say("use a larger {}", option(name)))
    return coef


def _compare(call: Call, adding: Add, contributions: Sequence[Contribution]) -> list[Contribution]:
    """Fill in the cosine and the distance of the gradients that are added."""
    unscales = [contribution.unscale for contribution in contributions if contribution.row.taken]
    comparisons = iter(call.run(Compare(**vars(adding), unscales=unscales)).each)
    compared = []
    for contribution in contributions:
        if contribution.row.taken:
            comparison = next(comparisons)
            cosine = distance = math.nan
            if not any(map(any, (comparison.nonfinite_a, comparison.nonfinite_b, comparison.nonfinite_both))):
                cosine, distance = comparison.metrics().cosine, comparison.distance()
            contribution = contribution.with_row(cosine=cosine, distance=distance)  # noqa: PLW2901
        compared.append(contribution)
    return compared


def _sum_of_weights(options: AccumulateOptions, contributions: Sequence[Contribution]) -> float:
    """Add up weights; raise `BadInputError` where nothing can be divided by their sum that must be."""
    weight_sum = sum_of([contribution.row.weight for contribution in contributions])
    if options.is_mean and weight_sum == 0:
        raise BadInputError("the weights add up to 0, so that there is no mean", code="weight")
    return weight_sum


def _total(
    options: AccumulateOptions, buffer: Buffer, accepted: Sequence[Contribution]
) -> tuple[Weight | None, str | None]:
    """Return the total weight of what is written; or None where it has none, and what helps."""
    key, existing, weights = options.weight_key, buffer.existing, [each.row.weight for each in accepted]
    stored = None if existing is None else stored_key(existing.shards)
    old = None if existing is None or options.is_mean or trim_of(options) is not None else stored_sum(existing)
    if key is None:
        helps = old is not None or (options.overwrite and trim_of(options) is None)
        return None, say("use {}", option("weight_key", stored)) if stored is not None and helps else None
    numbers = {number for number, target in enumerate(buffer.targets) if has_values(target.tensor)}
    if options.missing == "skip" and not all(numbers <= each.tensors.keys() for each in accepted):
        return None, say("use {} for a total of all gradients", option("missing", "zero"))
    tensors = [tensor for _, tensor in existing.tensors] if existing is not None else []
    if existing is not None and sum(map(has_values, tensors)) != len(numbers):
        return None, "add to all tensors to keep a total"
    if not options.adds_to_old:
        return Weight(sum_of(weights), is_sum=not options.is_mean), None
    if old is not None and stored == key:
        return Weight(sum_of([old, *weights]), is_sum=True), None
    return None, say("use {} to start a new total", option("overwrite", True))


def _check_left(options: AccumulateOptions, targets: Sequence[Selected], accepted: Sequence[Contribution]) -> None:
    """Raise `BadInputError` for a tensor that too few of the gradients have for a trimmed mean."""
    trim = trim_of(options)
    needed = 0 if trim is None or trim.dropped is None else 2 * trim.dropped + 1
    for number, target in enumerate(targets if needed else ()):
        count = sum(options.missing == "zero" or number in contribution.tensors for contribution in accepted)
        if 0 < count < needed:
            message = say("{} needs {} gradients with this tensor", option("reduce", options.reduce), needed)
            message = say("{}, but {} {} left; nothing written", message, count, "is" if count == 1 else "are")
            hint = say("use a smaller K, or {}", option("reduce", "median"))
            file, name = target.shard.name, target.tensor.name
            raise BadInputError(message, file=file, tensor=name, code="too-few", hint=hint)


def _check_finite(
    call: Call, options: AccumulateOptions, adding: Add, sums: Measurement, before: Sequence[Measurement]
) -> None:
    """Raise `NonFiniteError` for a NaN or Inf in a sum, naming the inputs that it comes from."""
    bad = [number for number in range(len(adding.selected)) if sums.nan[number] or sums.inf[number]]
    if options.nonfinite == "propagate" or not bad:
        return
    problems, numbers = [], set(bad)
    for gradient in adding.gradients:
        suspects = [selected for number, selected in gradient.tensors.items() if number in numbers]
        problems += nonfinite_problems(suspects, call.run(Measure(suspects, adding.spec)))
    targets = [adding.selected[number] for number in bad]
    for measurement in before:
        problems += nonfinite_problems(targets, measurement.part(bad))
    if problems:
        raise NonFiniteError("input contains NaN or Inf; nothing written", problems, _SKIP)
    hint = say(
        "use {}, {} or smaller weights, or {} to store Inf",
        option("mean", True),
        option("max_norm"),
        option("nonfinite", "propagate"),
    )
    raise NonFiniteError("sums overflow their type; nothing written", overflow_problems(targets, sums.part(bad)), hint)
