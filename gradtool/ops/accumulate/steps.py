"""The steps of accumulating: look at the gradients, add those that are taken, clip the sum, round it, write it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends import Rule
from gradtool.errors import BadInputError, NonFiniteError, Problem
from gradtool.ops.accumulate.add import NONFINITE_REMEDY, Accumulation
from gradtool.ops.measurement import Measurement
from gradtool.ops.output import NewFile
from gradtool.ops.passes import measure_norms
from gradtool.ops.results import nonfinite_problems
from gradtool.store.format.gradset import Selected
from gradtool.store.format.layout import Layout, lay_out
from gradtool.store.io.workers import copying

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradtool.ops.accumulate.match import Contribution
    from gradtool.ops.accumulate.policy import Policy
    from gradtool.ops.output import Output
    from gradtool.ops.passes import Session
    from gradtool.store.format.header import Shard
    from gradtool.store.fs import File


@dataclass(frozen=True)
class GradientRow:
    """What became of one gradient set; what was found in it is known where it was looked at before it was added."""

    weight: float
    taken: bool
    norm: float | None
    coef: float | None
    nan: int | None
    inf: int | None
    file: str


class Done(NamedTuple):
    """What was done, for the result; `found` is what the buffer holds now."""

    found: Measurement
    norm_before: float | None
    norm_after: float
    weight_sum: float
    rows: Sequence[GradientRow]
    sum_norm: float | None = None
    coef: float | None = None
    files_written: int = 0
    warnings: Sequence[Problem] = ()


def tensors_of(layout: Layout) -> list[Selected]:
    """The tensors of a file that is to be made."""
    return [Selected(layout.shard, tensor) for tensor in layout.shard.tensors]


def leave(
    session: Session,
    policy: Policy,
    targets: Sequence[Selected],
    contributions: Sequence[Contribution],
    *,
    output: Output,
    created: Layout | None,
) -> Done:
    """Add nothing; say what the buffer holds, and copy it where its output is wanted elsewhere."""
    policy.weight_sum([one.weight for one in contributions])
    found, norms = measure_norms(session, targets, policy.spec)
    files = output.arriving(())

    def fill(destinations: Mapping[Shard, File]) -> None:
        tasks = (task for shard, file in destinations.items() for task in copying(shard, [(0, shard.size, 0)], file))
        session.stream(tasks, sum(shard.size for shard in destinations))

    count = output.write(session, files, fill) if files else 0
    rows = [_row(one, taken=False) for one in contributions]
    return Done(found, None if created else norms.whole, norms.whole, 0.0, rows, files_written=count)


def add(
    session: Session,
    policy: Policy,
    targets: Sequence[Selected],
    contributions: Sequence[Contribution],
    *,
    output: Output,
    created: Layout | None,
) -> Done:
    """Add the contributions to the targets, or put them into the file that is `created`."""
    rows, taken, warnings = _screen(session, policy, contributions)
    weight_sum = policy.weight_sum([one.weight for one in taken])
    rule = Rule(policy.keeps, weight_sum if policy.mean else None)
    if created is not None and policy.weight_key is not None:
        metadata = {policy.weight_key: str(int(weight_sum) if weight_sum.is_integer() else weight_sum)}
        created = lay_out(created.shard.path, created.shard.tensors, created.shard.metadata | metadata)
        targets = tensors_of(created)
    may_be_nonfinite = policy.nonfinite == "propagate"
    work = Accumulation(session, policy.spec, targets, taken, created=created, may_be_nonfinite=may_be_nonfinite)
    before = sum_norm = coef = None
    if policy.max_norm is not None:
        before, sum_norm, found = work.measure_sums(rule)
        if found.is_finite and math.isinf(sum_norm) and policy.max_norm < math.inf:
            raise BadInputError("the norm of the sum is beyond float64, so it cannot be clipped")
        coef = policy.coef(policy.max_norm, sum_norm)
        rule = rule._replace(factor=coef)
    was = None
    if output.in_place and coef is None and rule.keeps and _may_be_measured_twice(policy, targets):
        # In place, what was there before cannot be looked at again.
        was, norms = measure_norms(session, targets, policy.spec)
        before = norms.whole
    looks_back = coef is None and was is None
    after, found = math.nan, Measurement((), policy.spec)

    def fill(destinations: Mapping[Shard, File]) -> None:
        nonlocal before, after, found
        then, after, found = work.run(rule, destinations, looks_back=looks_back, was=was)
        before = before if then is None else then

    files = [NewFile(created.shard, created.shard.size, replaces=False)] if created else output.arriving(work.touched)
    count = output.write(session, files, fill)
    return Done(found, before, after, weight_sum, rows, sum_norm, coef, count, warnings)


def _may_be_measured_twice(policy: Policy, targets: Sequence[Selected]) -> bool:
    """Whether a sum over finite values may overflow, or lose its terms to underflow."""
    return policy.norm_type not in (1, 2, math.inf) or any(one.tensor.dtype == "F64" for one in targets)


def _screen(
    session: Session, policy: Policy, contributions: Sequence[Contribution]
) -> tuple[list[GradientRow], list[Contribution], list[Problem]]:
    """Each gradient by itself, where that is asked for: its norm is limited, or it is left out."""
    if not policy.screens:
        return [_row(one, taken=True) for one in contributions], list(contributions), []
    rows, taken, warnings, problems = [], [], [], []
    for one in contributions:
        selected = list(one.tensors.values())
        found, norms = measure_norms(session, selected, policy.spec)
        norm = norms.whole
        bad = nonfinite_problems(selected, found)
        if policy.clip_each is not None and policy.clip_each < math.inf and not bad and math.isinf(norm):
            raise BadInputError("its norm is beyond float64, so it cannot be clipped", file=one.path)
        limited = one._replace(coef=policy.coef(policy.clip_each, norm))
        is_taken = not bad or policy.nonfinite != "skip"
        coef = None if policy.clip_each is None else limited.coef
        rows.append(_row(limited, taken=is_taken, norm=norm, coef=coef, found=found))
        problems += bad
        if is_taken:
            taken.append(limited)
        else:
            warnings.append(
                Problem("skipped", f"the whole gradient is left out: {bad[0].message}", str(one.path), bad[0].tensor)
            )
    if problems and (policy.nonfinite == "error" or not taken):
        why = "every gradient holds" if policy.nonfinite == "skip" else "there are"
        raise NonFiniteError(f"nothing was written, for {why} NaN or Inf values; {NONFINITE_REMEDY}", problems)
    return rows, taken, warnings


def _row(
    one: Contribution,
    *,
    taken: bool,
    norm: float | None = None,
    coef: float | None = None,
    found: Measurement | None = None,
) -> GradientRow:
    return GradientRow(
        weight=one.weight,
        taken=taken,
        norm=norm,
        coef=coef,
        nan=None if found is None else int(found.nan.sum()),
        inf=None if found is None else int(found.inf.sum()),
        file=str(one.path),
    )
