"""Adds up gradients: any number of sets, weighted, in one pass, with one rounding."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends.values import NormSpec
from gradtool.declare import operation
from gradtool.engines.passes import Pass
from gradtool.errors import NonFiniteError, Problem, UsageError, number_of, option, say
from gradtool.ops.accumulate.adding import adding_pass, check_count, check_counts, sum_of_weights, trim_of
from gradtool.ops.accumulate.buffer import Add, Buffer, existing_buffer, new_set
from gradtool.ops.accumulate.gradients import SKIP_HINT, apply_nonfinite, coef_for, compare, match
from gradtool.ops.accumulate.screening import COMPLETE, FINITE, WEIGHTED, ScreenedRow, Screening, buffer_in, rules_of
from gradtool.ops.call import Call
from gradtool.ops.passes import Measure
from gradtool.ops.results import OnceResult, OutputSummary, loss_warnings, nonfinite_problems, overflow_problems
from gradtool.ops.weights import PREFIX, Weight, WeightList, has_values, replace_total, stored_key, stored_sum, sum_of
from gradtool.options import AccumulateOptions
from gradtool.store.format.selection import Renames
from gradtool.store.transaction.inputs import WritePlan
from gradtool.store.transaction.once import Once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.engines.passes import Tally
    from gradtool.ops.accumulate.gradients import Contribution, GradientRow
    from gradtool.ops.passes import Measurement
    from gradtool.store.format.gradset import Selected


@dataclass(frozen=True, repr=False, kw_only=True)
class AccumulateResult(OnceResult):
    """The result of `accumulate`: what was added, and statistics of the buffer after the sum, or of the new set.

    `norm_before` and `zeros_before` are None if the old content was not read. `sum_norm` is the norm of the float64
    sums before they were clipped, and `coef` is the factor that clipped them; both are None without `max_norm`.
    `missing` counts tensors of the buffer that gradients lack, and `extra` tensors of gradients that the buffer lacks.
    `copied` counts the integer tensors of the new set, which are in no other number. `skipped` also counts the
    gradients that `screen` left out. If they are `already_done`, an earlier call with the same ID added them: this call
    took none, and what was not measured is None.
    """

    headline = ("norm_before", "norm_after", "sum_norm", "coef", "clipped", "taken", "skipped", "weight_sum", "updated")

    output: OutputSummary
    norm_before: float | None = None
    norm_after: float | None = None
    max_norm: float | None
    unscale: float
    into_weight: float
    sum_norm: float | None = None
    coef: float | None = None
    clipped: bool = False
    zeros_before: int | None = None
    taken: int = 0
    skipped: int = 0
    missing: int = 0
    extra: int = 0
    copied: int = 0
    weight_sum: float = 0.0
    updated: bool = False
    already_done: bool = False
    per_gradient: tuple[GradientRow, ...] = ()
    per_screened: tuple[ScreenedRow, ...] = ()


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
    """Add gradients to the tensors of the same names, in place: into ← round(W · into + Σ w · g).

    With `output` or `output_dir` instead of `into`, Σ w · g alone becomes a new file or set, which is made or replaced
    as a whole. With both, the new set is the sum of `into` and the gradients, and `into` is only read. Gradients are
    never modified.

    Sums are float64, in the order given, and rounded once to the type of the buffer. W is `into_weight`, 1 by default.
    A gradient may have any type that carries values, and any shape that broadcasts to the buffer's. This is ONNX
    Runtime's InPlaceAccumulator for files, with `overwrite` and `update` as in V2.

    Raises:
        NonFiniteError: a value is NaN or Inf, or a sum overflows its type; nothing is written.
        TooFewError: fewer gradients passed `screen` than are needed; nothing is written.
        UsageError: an option is invalid, or contradicts another option.
        BadInputError: a file, index, tensor or weight is invalid.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: reading or writing failed; nothing is written, unless the message names `recover`.
    """
    _check_options(options)
    into = [] if options.into is None else [existing_buffer(options.into)]
    # What is only checked may be checked again.
    once = Once.from_options(options) if options.update else None
    if into and once is not None and (done := _done_before(options, into, once)) is not None:
        return done
    created = new_set(options) if options.is_new else None
    renames = Renames.parse(options.map, slice(len(into), None))
    listed = None if options.weights is None else WeightList.read(os.fspath(options.weights))
    named = options.named or (list(listed.texts) if listed and options.files_from is None else [])
    others = options.others if options.is_new else None
    call = Call([*into, *named], options, renames=renames, others=others)
    screening = Screening(call, options, len(into), listed)
    opened = screening.opened(created)
    options = screening.remaining_options
    with call.open_to_write(options, WritePlan(len(into), created, once=once), opened):
        if call.output.is_done():
            return _already_done(call, options)
        screening.require_unchanged()
        gradients = call.opened.sets[len(into) :]
        check_count(options, len(gradients))
        buffer = buffer_in(call.opened, created)
        contributions, gaps = match(options, buffer.targets, call.opened, gradients)
        outcome = (_add if options.update else _skip_update)(call, options, buffer, contributions)
    before, after = outcome.before, outcome.after
    # No option changes the type of a buffer.
    remedies = () if options.is_new else ("use a buffer of {} to keep them",)
    warnings = [*screening.warnings, *gaps, *outcome.warnings, *loss_warnings(outcome.targets, after, *remedies)]
    rows = screening.all_rows([contribution.row for contribution in outcome.contributions])
    return AccumulateResult(
        **call.statistics(outcome.targets, after, warnings=warnings),
        output=call.output_summary(),
        norm_before=None if before is None else before.norms().whole,
        norm_after=after.norms().whole,
        max_norm=options.max_norm,
        unscale=options.unscale,
        into_weight=options.buffer_weight,
        sum_norm=outcome.sum_norm,
        coef=outcome.coef,
        clipped=outcome.coef is not None and outcome.coef != 1,
        zeros_before=None if before is None else before.stored_zeros,
        taken=sum(row.taken for row in rows),
        skipped=sum(not row.taken for row in rows),
        missing=sum(row.missing or 0 for row in rows if row.screened is None),
        extra=sum(row.extra or 0 for row in rows if row.screened is None),
        copied=len(buffer.others) if options.update else 0,
        weight_sum=outcome.weight_sum,
        updated=options.update,
        per_gradient=tuple(rows if options.per_gradient else ()),
        per_screened=tuple(screening.screened),
    )


def _done_before(options: AccumulateOptions, into: Sequence[str], once: Once) -> AccumulateResult | None:
    """Return the result if the buffer has the ID, whether the gradients still exist or not; else None.

    So nothing is read for screening either. Another run may yet add the same before this call locks the buffer again.
    """
    call = Call(into, options.replace(files_from=None, engine="threads"))
    with call.open_to_write(options, WritePlan(once=once)):
        return _already_done(call, options) if call.output.is_done() else None


def _already_done(call: Call, options: AccumulateOptions) -> AccumulateResult:
    given = {name: getattr(options, name) for name in ("norm_type", "max_norm", "unscale")}
    return AccumulateResult(**call.already_done(), **given, into_weight=options.buffer_weight)


def _check_options(options: AccumulateOptions) -> None:
    """Raise `UsageError` if options contradict each other."""
    key, weighs, lists, is_new = options.weight_key, bool(options.weight), options.weights is not None, options.is_new
    kinds, exclude = {rule.kind for rule in rules_of(options)}, "{} and {} exclude each other"
    unweighted = WEIGHTED in kinds and not key and not lists
    limits = options.max_norm is not None or options.clip_each is not None
    shard_like, max_size = options.shard_like is not None, options.max_shard_size is not None
    scales = options.into_weight is not None
    is_nowhere = is_new and options.output is None and options.output_dir is None
    for is_wrong, template, *names in (
        (key and key.startswith(PREFIX), f"{{}}: keys that begin with {PREFIX!r} are reserved", "weight_key"),
        (key and weighs, exclude, "weight", "weight_key"),
        (lists and weighs, exclude, "weights", "weight"),
        (lists and key, exclude, "weights", "weight_key"),
        (unweighted, "{} requires {} or {}", f"screen={WEIGHTED}", "weight_key", "weights"),
        (COMPLETE in kinds and options.missing != "error", exclude, f"screen={COMPLETE}", f"missing={options.missing}"),
        (FINITE in kinds and options.nonfinite == "skip", exclude, f"screen={FINITE}", "nonfinite=skip"),
        (options.at_least and not kinds, "{} requires {}", "at_least", "screen"),
        (options.mean and options.reduce not in (None, "mean"), "{} excludes any other {}", "mean", "reduce"),
        (trim_of(options) and (key or weighs), "{} and {} require a sum or a mean", "weight", "weight_key"),
        (trim_of(options) and lists, "{} requires a sum or a mean", "weights"),
        (is_nowhere, "{}, {} or {} is required", "into", "output", "output_dir"),
        (is_new and options.overwrite, "{} requires {}, whose old content it drops", "overwrite", "into"),
        (is_new and scales, "{} requires {}, whose old content it multiplies", "into_weight", "into"),
        (options.overwrite and scales, exclude, "overwrite", "into_weight"),
        (not is_new and options.dtype, "{} requires a new set, without {}", "dtype", "into"),
        (not is_new and shard_like, "{} requires a new set, without {}", "shard_like", "into"),
        (not is_new and max_size, "{} requires a new set, without {}", "max_shard_size", "into"),
        (not is_new and options.others == "copy", "{} requires a new set, without {}", "others=copy", "into"),
        (shard_like and options.output_dir is None, "{} requires {}", "shard_like", "output_dir"),
        (max_size and options.output_dir is None, "{} requires {}", "max_shard_size", "output_dir"),
        (shard_like and max_size, exclude, "shard_like", "max_shard_size"),
        (not limits and not options.is_default("eps"), "{} requires {} or {}", "eps", "max_norm", "clip_each"),
    ):
        if is_wrong:
            raise UsageError(say(template, *(option(*name.split("=")) for name in names)))


def _skip_update(
    call: Call, options: AccumulateOptions, buffer: Buffer, contributions: Sequence[Contribution]
) -> _Outcome:
    """Add nothing: measure the buffer, and copy it where its output is wanted elsewhere."""
    sum_of_weights(options, contributions)
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
    contributions, warnings = apply_nonfinite(call, options, buffer.targets, contributions)
    accepted = [contribution for contribution in contributions if contribution.row.taken]
    check_counts(options, buffer.targets, accepted)
    weight_sum = sum_of_weights(options, accepted)
    total, hint = _total(options, buffer, accepted)
    metadata, notes = replace_total(buffer.existing, options.weight_key, total, hint)
    if total is not None and options.weight_key is not None and options.is_new:
        buffer = buffer.with_metadata(total.entries(options.weight_key))
    numbers, adding = adding_pass(options, buffer.targets, accepted, weight_sum)
    sum_norm = coef = None
    before: list[Measurement] = []
    if options.max_norm is not None:
        sums, *before = call.run(replace(adding, mode=adding.mode._replace(rounds=False))).each
        _check_finite(call, options, adding, sums, before)
        sum_norm = sums.norms().whole
        coef = coef_for(options, "max_norm", sum_norm, sums.is_finite)
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


def _total(
    options: AccumulateOptions, buffer: Buffer, accepted: Sequence[Contribution]
) -> tuple[Weight | None, str | None]:
    """Return the total weight of the new content; None where it has none, with a hint."""
    key, existing, weights = options.weight_key, buffer.existing, [grad.weight.value for grad in accepted]
    stored = None if existing is None else stored_key(existing.shards)
    old = None if existing is None or options.is_mean or trim_of(options) is not None else stored_sum(existing)
    if key is None:
        helps = old is not None or (not options.adds_to_old and trim_of(options) is None)
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
        return Weight(sum_of([options.buffer_weight * old, *weights]), is_sum=True), None
    return None, say("use {} to start a new total", option("overwrite", True))


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
