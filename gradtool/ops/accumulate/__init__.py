"""Adds up gradients: any number of sets, weighted, in one pass, with one rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.declare import operation
from gradtool.errors import UsageError
from gradtool.ops.accumulate.buffer import OpenBuffer, existing_buffer, new_set
from gradtool.ops.accumulate.match import match, weights_of
from gradtool.ops.accumulate.policy import Policy
from gradtool.ops.accumulate.reduce import refuse_too_few
from gradtool.ops.accumulate.steps import add, leave
from gradtool.ops.results import OutputSummary, Statistics, loss_warnings, output_summary, statistics
from gradtool.ops.session import Call
from gradtool.options import AccumulateOptions
from gradtool.store.format.rename import Renames
from gradtool.store.transaction.inputs import WritePlan

if TYPE_CHECKING:
    from gradtool.ops.accumulate.screen import GradientRow


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
    policy = Policy.of(options)
    into = [] if options.into is None else [existing_buffer(options.into)]
    created = new_set(policy, options) if policy.is_new else None
    renames = Renames.parse(options.map, slice(len(into), None))
    call = Call.of([*into, *options.named], options, renames=renames)
    with call.open_to_write(options, WritePlan(len(into), created)) as (session, output):
        offered = session.opened.sets[len(into) :]
        if not offered:
            raise UsageError("no gradient is given; name a file, a folder or an index, or use --files-from")
        if policy.trim is not None:
            refuse_too_few(policy.trim, len(offered))
        selected = [session.opened.selected_in(one.shards) for one in offered]
        if created is None:
            buffer = OpenBuffer(session.opened.selected_in(output.shards), there=output.sets[0])
        else:
            buffer = OpenBuffer.create(created, session.opened.selected, offered[0].shards[0].metadata)
        weights = weights_of(offered, policy.weights, policy.weight_key)
        matched, gaps = match(buffer.targets, list(zip(offered, selected, strict=True)), weights, policy)
        done = (add if options.update else leave)(session, policy, buffer, matched, output)
    # The type of a buffer is its own.
    remedies = () if policy.is_new else ("Use a buffer of {} to keep them",)
    losses = loss_warnings(done.targets, done.found, *remedies)
    return AccumulateResult(
        **statistics(session, done.targets, done.found, warnings=[*gaps, *done.warnings, *losses]),
        output=output_summary(session, output, done.destination),
        norm_before=done.norm_before,
        norm_after=done.norm_after,
        max_norm=policy.max_norm,
        sum_norm=done.sum_norm,
        coef=done.coef,
        clipped=done.coef is not None and done.coef != 1,
        zeros_before=done.zeros_before,
        taken=sum(row.taken for row in done.rows),
        skipped=sum(not row.taken for row in done.rows),
        missing=sum(row.missing for row in done.rows),
        extra=sum(row.extra for row in done.rows),
        weight_sum=done.weight_sum,
        updated=options.update,
        per_gradient=tuple(done.rows if options.per_gradient else ()),
    )
