"""The steps of accumulating: screen the gradients, add them, clip the sum, write it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends.protocol import Rule
from gradtool.errors import BadInputError, NonFiniteError, Problem, number_of
from gradtool.ops.accumulate.add import Add
from gradtool.ops.accumulate.buffer import numbers_of
from gradtool.ops.accumulate.compare import compared
from gradtool.ops.accumulate.policy import added_up
from gradtool.ops.accumulate.reduce import refuse_nothing_left
from gradtool.ops.accumulate.screen import NONFINITE_REMEDY, GradientRow, screen
from gradtool.ops.accumulate.total import has_one_total, new_total, refuse_nonzero
from gradtool.ops.passes import Measure, TensorPass
from gradtool.ops.results import nonfinite_problems, overflow_problems
from gradtool.ops.totals import Total

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.accumulate.buffer import OpenBuffer
    from gradtool.ops.accumulate.match import Contribution
    from gradtool.ops.accumulate.policy import Policy
    from gradtool.ops.measurement import Measurement
    from gradtool.ops.session import Session
    from gradtool.store.format.gradset import Selected
    from gradtool.store.transaction.destination import Destination
    from gradtool.store.transaction.output import Output


class Done(NamedTuple):
    """What was done, for the result; `found` is what the targets, the tensors of the buffer, hold now."""

    targets: Sequence[Selected]
    found: Measurement
    destination: Destination
    norm_before: float | None
    zeros_before: int | None
    norm_after: float
    weight_sum: float
    rows: Sequence[GradientRow]
    sum_norm: float | None = None
    coef: float | None = None
    warnings: Sequence[Problem] = ()


def leave(
    session: Session, policy: Policy, buffer: OpenBuffer, contributions: Sequence[Contribution], output: Output
) -> Done:
    """Add nothing: measure the buffer, and copy it where its output is wanted elsewhere."""
    policy.weight_sum([one.weight for one in contributions])
    targets = () if policy.is_new else buffer.targets
    found = session.run(Measure(targets, policy.spec))
    norm = found.norms().whole
    files = [] if policy.is_new else buffer.files(output, ())
    with session.writing(output, files) as destination:
        session.run(TensorPass((), policy.spec), destination)
    rows = [GradientRow.unseen(one, taken=False) for one in contributions]
    before, zeros = (None, None) if policy.is_new else (norm, found.stored_zeros)
    return Done(targets, found, destination, before, zeros, norm, 0.0, rows)


def add(
    session: Session, policy: Policy, buffer: OpenBuffer, contributions: Sequence[Contribution], output: Output
) -> Done:
    """Add the contributions, and clip the sum where there is a limit."""
    screened = screen(session, policy, buffer.targets, contributions)
    if policy.trim is not None:
        refuse_nothing_left(policy.trim, buffer.targets, screened.taken, fills=policy.counts_zeros)
    weight_sum = policy.weight_sum([one.weight for one in screened.taken])
    if policy.weight_key is not None and has_one_total(buffer, policy, screened.taken):
        buffer = buffer.with_total(policy.weight_key, Total(weight_sum, is_sum=not policy.mean))
    (metadata, told), needs_zeros = new_total(buffer, policy, screened.taken)
    rule = Rule(policy.keeps, weight_sum if policy.mean else None)
    # Where zeros alone are added, a buffer that is kept stays as it is.
    fills = policy.counts_zeros and not policy.keeps
    numbers = list(range(len(buffer.targets))) if fills else numbers_of(screened.taken)
    adding = _adding(policy, buffer, screened.taken, rule, numbers)
    sum_norm = coef = None
    measured: list[Measurement] = []
    if policy.max_norm is not None:
        sums, *measured = session.run(replace(adding, rule=rule._replace(rounds=False))).each
        _refuse_nonfinite(session, policy, adding, sums, measured)
        sum_norm = sums.norms().whole
        coef = policy.sum_coef(sums, sum_norm)
        adding = replace(adding, rule=rule._replace(factor=coef), measures_before=False)
    rows = compared(session, adding, screened.rows) if policy.per_gradient else screened.rows
    files = buffer.files(output, adding.selected, metadata)
    with session.writing(output, files, buffer.indexes) as destination:
        added, *first = session.run(adding, destination).each
        _refuse_nonfinite(session, policy, adding, added, first)
        rest = buffer.measure_without(session, numbers, policy.spec)
        before = rest.updated(numbers, (measured or first)[0]) if measured or first else None
        if needs_zeros and before is not None:
            refuse_nonzero(buffer, policy.weight_key, before)
    after = rest.updated(numbers, added)
    return Done(
        targets=buffer.targets,
        found=after,
        destination=destination,
        norm_before=None if before is None else before.norms().whole,
        zeros_before=None if before is None else before.stored_zeros,
        norm_after=after.norms().whole,
        weight_sum=weight_sum,
        rows=rows,
        sum_norm=sum_norm,
        coef=coef,
        warnings=[*screened.warnings, *told, *_left_empty(buffer, numbers)],
    )


def _adding(
    policy: Policy, buffer: OpenBuffer, contributions: Sequence[Contribution], rule: Rule, numbers: Sequence[int]
) -> Add:
    """The pass over the targets that something is added to, which have these numbers."""
    place = {number: position for position, number in enumerate(numbers)}
    moved = [one._replace(tensors={place[n]: tensor for n, tensor in one.tensors.items()}) for one in contributions]
    targets = [buffer.targets[number] for number in numbers]
    divisors = _divisors(targets, moved) if policy.mean and policy.missing == "skip" else ()
    return Add(targets, policy.spec, moved, rule, policy.trim, divisors, policy.counts_zeros, policy.is_new, rule.keeps)


def _divisors(targets: Sequence[Selected], contributions: Sequence[Contribution]) -> list[float]:
    """What the sum of each target is divided by: the weights of those that have it; none if that is the same for all.

    Raises:
        BadInputError: such weights add up to 0.
    """
    if all(len(one.tensors) == len(targets) for one in contributions):
        return []
    divisors = []
    for number, target in enumerate(targets):
        divisors.append(added_up([one.weight for one in contributions if number in one.tensors]))
        if not divisors[-1]:
            message = "the weights of the gradients that have it add up to 0; there is no mean"
            raise BadInputError(message, file=target.shard.path, tensor=target.tensor.name, code="weight")
    return divisors


def _left_empty(buffer: OpenBuffer, numbers: Sequence[int]) -> list[Problem]:
    """A warning of tensors of a new set that only gradients have which were left out."""
    left = len(buffer.targets) - len(numbers)
    if not left or not buffer.layouts:
        return []
    message = f"{number_of(left, 'tensor')} only in gradients that were skipped; zeros in the new set"
    return [Problem("skipped", message)]


def _refuse_nonfinite(
    session: Session, policy: Policy, adding: Add, sums: Measurement, before: Sequence[Measurement]
) -> None:
    """Raise `NonFiniteError` for a NaN or Inf in a sum, naming the inputs that it comes from."""
    bad = [number for number in range(len(adding.selected)) if sums.nan[number] or sums.inf[number]]
    if policy.nonfinite == "propagate" or not bad:
        return
    problems, numbers = [], set(bad)
    for one in adding.contributions:
        suspects = [tensor for number, tensor in one.tensors.items() if number in numbers]
        problems += nonfinite_problems(suspects, session.run(Measure(suspects, policy.spec)))
    targets = [adding.selected[number] for number in bad]
    for buffer in before:
        problems += nonfinite_problems(targets, buffer.part(bad))
    if problems:
        raise NonFiniteError(f"input contains NaN or Inf; nothing written. {NONFINITE_REMEDY}", problems)
    raise NonFiniteError(
        "sums overflow their type; nothing written. Use --mean, --max-norm or smaller weights, or --nonfinite "
        "propagate to store Inf",
        overflow_problems(targets, sums.part(bad)),
    )
