"""Adds up gradients: any number of sets, weighted, in one pass, with one rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends.values import AddMode, NormSpec, Trim
from gradtool.declare import operation
from gradtool.engines.passes import Pass
from gradtool.errors import BadInputError, NonFiniteError, Problem, UsageError, number_of, option, say
from gradtool.ops.accumulate.buffer import Add, Buffer, existing_buffer, new_set
from gradtool.ops.accumulate.gradients import SKIP_HINT, coef_for, compare, match, screen
from gradtool.ops.aligned_read import Operand
from gradtool.ops.call import Call
from gradtool.ops.passes import Measure
from gradtool.ops.results import OutputSummary, StatisticsResult, loss_warnings, nonfinite_problems, overflow_problems
from gradtool.ops.weights import PREFIX, Weight, divisor_of, has_values, replace_total, stored_key, stored_sum, sum_of
from gradtool.options import AccumulateOptions
from gradtool.store.format.selection import Renames
from gradtool.store.transaction.inputs import WritePlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.engines.passes import Tally
    from gradtool.ops.accumulate.gradients import Contribution, GradientRow
    from gradtool.ops.passes import Measurement
    from gradtool.store.format.gradset import Selected


@dataclass(frozen=True, repr=False)
class AccumulateResult(StatisticsResult):
    """The result of `accumulate`: what was added, and statistics of the buffer after the sum, or of the new set.

    `norm_before` and `zeros_before` are None if the old content was not read. `sum_norm` is the norm of the float64
    sums before they were clipped, and `coef` is the factor that clipped them; both are None without `max_norm`.
    `missing` counts tensors of the buffer that gradients lack, and `extra` tensors of gradients that the buffer lacks.
    """

    headline = ("norm_before", "norm_after", "sum_norm", "coef", "clipped", "taken", "skipped", "weight_sum", "updated")

    output: OutputSummary
    norm_before: float | None
    norm_after: float
    max_norm: float | None
    unscale: float
    sum_norm: float | None
    coef: float | None
    clipped: bool
    zeros_before: int | None
    taken: int
    skipped: int
    missing: int
    extra: int
    weight_sum: float
    updated: bool
    per_gradient: tuple[GradientRow, ...]


class _Outcome(NamedTuple):
    """The result of adding: measurements of the targets as they are now and, if the old content was read, before."""

    targets: Sequence[Selected]
    after: Measurement
    before: Measurement | None
    contributions: Sequence[Contribution]
    weight_sum: float = 0.0
    sum_norm: float | None = None
    coef: float | None = None
    warnings: Sequence[Problem] = ()


@operation(AccumulateOptions)
def accumulate(options: AccumulateOptions) -> AccumulateResult:
    """Add gradients to the tensors of the same names, in place: into ← round(into + Σ w · g).

    With `output` or `output_dir` instead of `into`, Σ w · g alone becomes a new file or set, which is made or replaced
    as a whole. With both, the new set is the sum of `into` and the gradients, and `into` is only read. Gradients are
    never modified.

    Sums are float64, in the order given, and rounded once to the type of the buffer. A gradient may have any type that
    carries values, and any shape that broadcasts to the buffer's. This is ONNX Runtime's InPlaceAccumulator for files,
    with `overwrite` and `update` as in V2.

    Raises:
        NonFiniteError: a value is NaN or Inf, or a sum overflows its type; nothing is written.
        UsageError: an option is invalid, or contradicts another option.
        BadInputError: a file, index, tensor or weight is invalid.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: reading or writing failed; nothing is written, unless the message names `recover`.
    """
    _check_options(options)
    into = [] if options.into is None else [existing_buffer(options.into)]
    created = new_set(options) if options.is_new else None
    renames = Renames.parse(options.map, slice(len(into), None))
    call = Call([*into, *options.named], options, renames=renames)
    with call.open_to_write(options, WritePlan(len(into), created)):
        gradients = call.opened.sets[len(into) :]
        _check_count(options, len(gradients))
        if created is None:
            buffer = Buffer(call.opened.selected_in(call.output.sets[0]), call.output.sets[0])
        else:
            buffer = Buffer.create(created, call.opened.selected, gradients[0].shards[0].metadata)
        contributions, gaps = match(options, buffer.targets, call.opened, gradients)
        outcome = (_add if options.update else _skip_update)(call, options, buffer, contributions)
    before, after = outcome.before, outcome.after
    # No option changes the type of a buffer.
    remedies = () if options.is_new else ("use a buffer of {} to keep them",)
    warnings = [*gaps, *outcome.warnings, *loss_warnings(outcome.targets, after, *remedies)]
    rows = [contribution.row for contribution in outcome.contributions]
    return AccumulateResult(
        **call.statistics(outcome.targets, after, warnings=warnings),
        output=call.output_summary(),
        norm_before=None if before is None else before.norms().whole,
        norm_after=after.norms().whole,
        max_norm=options.max_norm,
        unscale=options.unscale,
        sum_norm=outcome.sum_norm,
        coef=outcome.coef,
        clipped=outcome.coef is not None and outcome.coef != 1,
        zeros_before=None if before is None else before.stored_zeros,
        taken=sum(row.taken for row in rows),
        skipped=sum(not row.taken for row in rows),
        missing=sum(row.missing for row in rows),
        extra=sum(row.extra for row in rows),
        weight_sum=outcome.weight_sum,
        updated=options.update,
        per_gradient=tuple(rows if options.per_gradient else ()),
    )


def _check_options(options: AccumulateOptions) -> None:
    """Raise `UsageError` if options contradict each other."""
    key, weighs, is_new = options.weight_key, bool(options.weight), options.is_new
    limits = options.max_norm is not None or options.clip_each is not None
    shard_like, max_size = options.shard_like is not None, options.max_shard_size is not None
    is_nowhere = is_new and options.output is None and options.output_dir is None
    for is_wrong, template, *names in (
        (key and key.startswith(PREFIX), f"{{}}: keys that begin with {PREFIX!r} are reserved", "weight_key"),
        (key and weighs, "{} and {} exclude each other", "weight", "weight_key"),
        (options.mean and options.reduce not in (None, "mean"), "{} excludes any other {}", "mean", "reduce"),
        (_trim(options) and (key or weighs), "{} and {} require a sum or a mean", "weight", "weight_key"),
        (is_nowhere, "{}, {} or {} is required", "into", "output", "output_dir"),
        (is_new and options.overwrite, "{} requires {}, whose old content it drops", "overwrite", "into"),
        (not is_new and options.dtype, "{} requires a new set, without {}", "dtype", "into"),
        (not is_new and shard_like, "{} requires a new set, without {}", "shard_like", "into"),
        (not is_new and max_size, "{} requires a new set, without {}", "max_shard_size", "into"),
        (shard_like and options.output_dir is None, "{} requires {}", "shard_like", "output_dir"),
        (max_size and options.output_dir is None, "{} requires {}", "max_shard_size", "output_dir"),
        (shard_like and max_size, "{} and {} exclude each other", "shard_like", "max_shard_size"),
        (not limits and not options.is_default("eps"), "{} requires {} or {}", "eps", "max_norm", "clip_each"),
    ):
        if is_wrong:
            raise UsageError(say(template, *map(option, names)))


def _check_count(options: AccumulateOptions, count: int) -> None:
    """Raise `UsageError` if there is no gradient, or no value is left when the largest and smallest are dropped."""
    if not count:
        raise UsageError(
            "no gradient given", hint=say("name a file, a folder or an index, or use {}", option("files_from"))
        )
    if count < _min_count(options):
        needed = f"{_min_count(options)} gradients, but {count} {'was' if count == 1 else 'were'} given"
        raise UsageError(say("{} needs at least {}", option("reduce", options.reduce), needed))


def _trim(options: AccumulateOptions) -> Trim | None:
    """Return how values are trimmed before their mean is taken; None for sums and for plain means."""
    if options.reduce in (None, "sum", "mean"):
        return None
    dropped = None if options.reduce == "median" else int(options.reduce.removeprefix("trimmed="))
    return Trim(dropped, finite=options.nonfinite != "propagate")


def _min_count(options: AccumulateOptions) -> int:
    """Return how many values a trimmed mean needs; 0 for other reductions."""
    trim = _trim(options)
    return 0 if trim is None or trim.dropped is None else 2 * trim.dropped + 1


def _skip_update(
    call: Call, options: AccumulateOptions, buffer: Buffer, contributions: Sequence[Contribution]
) -> _Outcome:
    """Add nothing: measure the buffer, and copy it where its output is wanted elsewhere."""
    _sum_of_weights(options, contributions)
    targets, spec = () if options.is_new else buffer.targets, NormSpec(options.norm_type)
    measurement = call.run(Measure(targets, spec))
    files = [] if options.is_new else buffer.files(call.output, ())
    with call.writing(files) as destination:
        copying: Pass[Tally] = Pass((), spec)
        call.run(copying, destination)
    skipped = [contribution.with_row(taken=False) for contribution in contributions]
    return _Outcome(targets, measurement, None if options.is_new else measurement, skipped)


def _add(call: Call, options: AccumulateOptions, buffer: Buffer, contributions: Sequence[Contribution]) -> _Outcome:
    """Add the gradients, and clip the sum where there is a limit."""
    contributions, warnings = screen(call, options, buffer.targets, contributions)
    accepted = [contribution for contribution in contributions if contribution.row.taken]
    _check_counts(options, buffer.targets, accepted)
    weight_sum = _sum_of_weights(options, accepted)
    total, hint = _total(options, buffer, accepted)
    metadata, notes = replace_total(buffer.existing, options.weight_key, total, hint)
    if total is not None and options.weight_key is not None and options.is_new:
        buffer = buffer.with_metadata(total.entries(options.weight_key))
    numbers, adding = _adding(options, buffer.targets, accepted, weight_sum)
    sum_norm = coef = None
    before: list[Measurement] = []
    if options.max_norm is not None:
        sums, *before = call.run(replace(adding, mode=adding.mode._replace(rounds=False))).each
        _check_finite(call, options, adding, sums, before)
        sum_norm = sums.norms().whole
        coef = coef_for(options, "max_norm", sums, sum_norm)
        adding = replace(adding, mode=adding.mode._replace(factor=coef), measures_before=False)
    if options.per_gradient:
        contributions = compare(call, options, adding, contributions)
    with call.writing(buffer.files(call.output, adding.selected, metadata), buffer.indexes) as destination:
        after, *measured = call.run(adding, destination).each
        _check_finite(call, options, adding, after, measured)
        unchanged = buffer.measure_without(call, numbers, adding.spec)
    before = before or measured
    if options.is_new and len(numbers) < len(buffer.targets):
        tensors = number_of(len(buffer.targets) - len(numbers), "tensor")
        notes = [*notes, Problem("skipped", f"{tensors} only in skipped gradients; zeros in the new set")]
    return _Outcome(
        targets=buffer.targets,
        after=unchanged.updated(numbers, after),
        before=unchanged.updated(numbers, before[0]) if before else None,
        contributions=contributions,
        weight_sum=weight_sum,
        sum_norm=sum_norm,
        coef=coef,
        warnings=[*warnings, *notes],
    )


def _adding(
    options: AccumulateOptions, targets: Sequence[Selected], accepted: Sequence[Contribution], weight_sum: float
) -> tuple[list[int], Add]:
    """Return the numbers of the targets that something is added to, and the pass over these; check their divisors."""
    numbers = sorted({number for contribution in accepted for number in contribution.tensors})
    if options.missing == "zero" and not options.adds_to_old:
        # Zeros change what replaces old content; added to old content, they change nothing.
        numbers = list(range(len(targets)))
    targets = [targets[number] for number in numbers]
    divisors: list[float] = []
    if options.is_mean and options.missing == "skip" and any(len(grad.tensors) < len(targets) for grad in accepted):
        divisors = [sum_of([grad.row.weight for grad in accepted if number in grad.tensors]) for number in numbers]
    if 0 in divisors:
        target = targets[divisors.index(0)]
        message = "the weights of the gradients that have it add up to 0, so the mean is undefined"
        raise BadInputError(message, file=target.shard.name, tensor=target.tensor.name, code="weight")
    divisor = None
    if options.is_mean or options.unscale != 1:
        divisor = divisor_of(weight_sum if options.is_mean else 1.0, options.unscale)
    places = {number: place for place, number in enumerate(numbers)}
    return numbers, Add(
        targets,
        NormSpec(options.norm_type),
        # In the order of their files, in which they may have to be measured.
        [Operand({places[number]: tensor for number, tensor in grad.tensors.items()}, grad.scale) for grad in accepted],
        AddMode(options.adds_to_old, divisor),
        _trim(options),
        [divisor_of(weights, options.unscale) for weights in divisors],
        fills=options.missing == "zero",
        is_new=options.is_new,
        measures_before=options.adds_to_old,
    )


def _sum_of_weights(options: AccumulateOptions, contributions: Sequence[Contribution]) -> float:
    """Add up weights; raise `BadInputError` if a mean cannot be divided by their sum."""
    weight_sum = sum_of([contribution.row.weight for contribution in contributions])
    if options.is_mean and weight_sum == 0:
        raise BadInputError("the weights add up to 0, so the mean is undefined", code="weight")
    return weight_sum


def _total(
    options: AccumulateOptions, buffer: Buffer, accepted: Sequence[Contribution]
) -> tuple[Weight | None, str | None]:
    """Return the total weight of the new content; None where it has none, with a hint."""
    key, existing, weights = options.weight_key, buffer.existing, [grad.row.weight for grad in accepted]
    stored = None if existing is None else stored_key(existing.shards)
    old = None if existing is None or options.is_mean or _trim(options) is not None else stored_sum(existing)
    if key is None:
        helps = old is not None or (options.overwrite and _trim(options) is None)
        return None, say("use {}", option("weight_key", stored)) if stored is not None and helps else None
    numbers = {number for number, target in enumerate(buffer.targets) if has_values(target.tensor)}
    if options.missing == "skip" and not all(numbers <= grad.tensors.keys() for grad in accepted):
        return None, say("use {} for a total of all gradients", option("missing", "zero"))
    tensors = [tensor for _, tensor in existing.tensors] if existing is not None else []
    if existing is not None and sum(map(has_values, tensors)) != len(numbers):
        return None, "add to all tensors to keep a total"
    if not options.adds_to_old:
        return Weight(sum_of(weights), is_sum=not options.is_mean), None
    if old is not None and stored == key:
        return Weight(sum_of([old, *weights]), is_sum=True), None
    return None, say("use {} to start a new total", option("overwrite", True))


def _check_counts(options: AccumulateOptions, targets: Sequence[Selected], accepted: Sequence[Contribution]) -> None:
    """Raise `BadInputError` if too few gradients have some tensor for a trimmed mean."""
    needed = _min_count(options)
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
    """Raise `NonFiniteError` for NaN or Inf in a sum; name the inputs that it comes from."""
    nonfinite = [number for number in range(len(adding.selected)) if sums.nan[number] or sums.inf[number]]
    if options.nonfinite == "propagate" or not nonfinite:
        return
    problems, numbers = [], set(nonfinite)
    for gradient in adding.gradients:
        suspects = [selected for number, selected in gradient.tensors.items() if number in numbers]
        problems += nonfinite_problems(suspects, call.run(Measure(suspects, adding.spec)))
    targets = [adding.selected[number] for number in nonfinite]
    for measurement in before:
        problems += nonfinite_problems(targets, measurement.part(nonfinite))
    if problems:
        raise NonFiniteError("input contains NaN or Inf; nothing written", problems, SKIP_HINT)
    hint = say(
        "use {}, {} or smaller weights, or {} to store Inf",
        option("mean", True),
        option("max_norm"),
        option("nonfinite", "propagate"),
    )
    raise NonFiniteError(
        "sums overflow their type; nothing written", overflow_problems(targets, sums.part(nonfinite)), hint
    )
