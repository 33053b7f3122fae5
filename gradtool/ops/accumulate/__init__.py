"""Adds up gradients: any number of sets, weighted, in one pass, with one rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.declare import operation
from gradtool.errors import UsageError, option, say
from gradtool.ops.accumulate.match import Buffer, existing_buffer, match, new_set, weights_of
from gradtool.ops.accumulate.run import add, skip_update, trim_of
from gradtool.ops.call import Call
from gradtool.ops.results import OutputSummary, Statistics, loss_warnings
from gradtool.ops.weights import PREFIX
from gradtool.options import AccumulateOptions
from gradtool.store.format.selection import Renames
from gradtool.store.transaction.inputs import WritePlan

if TYPE_CHECKING:
    from gradtool.ops.accumulate.match import GradientRow


@dataclass(frozen=True, repr=False)
class AccumulateResult(Statistics):
    """What was added and what came of it. The facts are those of the buffer as it is now, or of the new set.

    `norm_before` and `zeros_before` are None where the old content was not read. `sum_norm` is the norm of the float64
    sums that were clipped, and `coef` what they were multiplied by; None without `max_norm`. `missing` counts the
    tensors that gradients lack, and `extra` those of gradients that the buffer lacks.
    """

    headline = ("norm_before", "norm_after", "sum_norm", "coef", "clipped", "taken", "skipped", "weight_sum", "updated")

    output: OutputSummary
    norm_before: float | None
    norm_after: float
    max_norm: float | None
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


@operation(AccumulateOptions)
def accumulate(options: AccumulateOptions) -> AccumulateResult:
    """Add up gradients, tensor by tensor of the same name: into ← round(into + Σ w · g), in place.

    With `output` or `output_dir` instead of `into`, Σ w · g alone becomes a new file or set, which is made or replaced
    as a whole; with both, `into` is only read. Gradients are never written.

    Sums are float64, in the order given, and rounded once to the type of the buffer. A gradient may have any type that
    carries values, and any shape that broadcasts to the buffer's. This is ONNX Runtime's InPlaceAccumulator (with
    `overwrite` and `update` as in V2) over files.

    Raises:
        NonFiniteError: a value is NaN or Inf, or a sum overflows its type; nothing is written.
        UsageError: an option is invalid, or contradicts another one.
        BadInputError: a file, index, tensor or weight is invalid.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: reading or writing failed; nothing is written.
    """
    _check(options)
    into = [] if options.into is None else [existing_buffer(options.into)]
    created = new_set(options) if options.is_new else None
    renames = Renames.parse(options.map, slice(len(into), None))
    call = Call([*into, *options.named], options, renames=renames)
    with call.open_to_write(options, WritePlan(len(into), created)) as output:
        gradients = call.opened.sets[len(into) :]
        _check_count(options, len(gradients))
        selected = [call.opened.selected_in(gradient) for gradient in gradients]
        if created is None:
            buffer = Buffer(call.opened.selected_in(output.sets[0]), output.sets[0])
        else:
            buffer = Buffer.create(created, call.opened.selected, gradients[0].shards[0].metadata)
        weights = weights_of(options, gradients)
        matched, gaps = match(options, buffer.targets, list(zip(gradients, selected, strict=True)), weights)
        done = (add if options.update else skip_update)(call, options, buffer, matched, output)
    # The type of a buffer cannot be changed by an option.
    remedies = () if options.is_new else ("use a buffer of {} to keep them",)
    warnings = [*gaps, *done.warnings, *loss_warnings(done.targets, done.after, *remedies)]
    rows = [contribution.row for contribution in done.contributions]
    return AccumulateResult(
        **call.statistics(done.targets, done.after, warnings=warnings),
        output=call.output_summary(output, done.destination),
        norm_before=None if done.before is None else done.before.norms().whole,
        norm_after=done.after.norms().whole,
        max_norm=options.max_norm,
        sum_norm=done.sum_norm,
        coef=done.coef,
        clipped=done.coef is not None and done.coef != 1,
        zeros_before=None if done.before is None else done.before.stored_zeros,
        taken=sum(row.taken for row in rows),
        skipped=sum(not row.taken for row in rows),
        missing=sum(row.missing for row in rows),
        extra=sum(row.extra for row in rows),
        weight_sum=done.weight_sum,
        updated=options.update,
        per_gradient=tuple(rows if options.per_gradient else ()),
    )


def _check(options: AccumulateOptions) -> None:
    """Raise `UsageError` if options contradict each other."""
    key, weighs, is_new = options.weight_key, bool(options.weight), options.is_new
    limits = options.max_norm is not None or options.clip_each is not None
    shard_like, max_size = options.shard_like is not None, options.max_shard_size is not None
    is_nowhere = is_new and options.output is None and options.output_dir is None
    for is_wrong, template, *names in (
        (key and key.startswith(PREFIX), f"{{}}: keys that begin with {PREFIX!r} are reserved", "weight_key"),
        (key and weighs, "{} and {} exclude each other", "weight", "weight_key"),
        (options.mean and options.reduce not in (None, "mean"), "{} excludes any other {}", "mean", "reduce"),
        (trim_of(options) and (key or weighs), "{} and {} require a sum or a mean", "weight", "weight_key"),
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
    """Raise `UsageError` if there is no gradient, or nothing is left when the largest and smallest are dropped."""
    if not count:
        raise UsageError(
            "no gradient given", hint=say("name a file, a folder or an index, or use {}", option("files_from"))
        )
    trim = trim_of(options)
    if trim is not None and trim.dropped is not None and count <= 2 * trim.dropped:
        needed = f"{2 * trim.dropped + 1} gradients, but {count} {'was' if count == 1 else 'were'} given"
        raise UsageError(say("{} needs at least {}", option("reduce", options.reduce), needed))
