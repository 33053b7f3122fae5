"""Each gradient by itself, before it is added: its norm is limited, or it is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends.protocol import Rule
from gradtool.errors import NonFiniteError, Problem
from gradtool.ops.accumulate.add import Add
from gradtool.ops.passes import Measure
from gradtool.ops.results import nonfinite_problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.accumulate.match import Contribution
    from gradtool.ops.accumulate.policy import Policy
    from gradtool.ops.measurement import Measurement
    from gradtool.ops.session import Session
    from gradtool.store.format.gradset import Selected

NONFINITE_REMEDY = "Use --nonfinite skip to leave out such gradients, or --overwrite to drop such a buffer"


@dataclass(frozen=True)
class GradientRow:
    """One gradient set: its weight, and whether it was added; what was found in it, if it was looked at before.

    `norm` is that of what it adds, as it is broadcast, without its weight and `coef`. `cosine` and `distance` are
    between that and the sum, mean or median of all, before that is clipped; a tensor that it lacks counts as zeros.
    `missing` and `extra` count the tensors that it lacks, and those that the buffer lacks.
    """

    weight: float
    taken: bool
    norm: float | None
    coef: float | None
    nan: int | None
    inf: int | None
    cosine: float | None
    distance: float | None
    missing: int
    extra: int
    file: str

    @classmethod
    def unseen(cls, one: Contribution, *, taken: bool) -> GradientRow:
        """A gradient that was not looked at by itself."""
        return cls(one.weight, taken, None, None, None, None, None, None, one.missing, one.extra, str(one.path))


class Screened(NamedTuple):
    """The gradients that are added, a row for each that was given, and warnings of those that are left out."""

    taken: Sequence[Contribution]
    rows: Sequence[GradientRow]
    warnings: Sequence[Problem] = ()


def screen(
    session: Session, policy: Policy, targets: Sequence[Selected], contributions: Sequence[Contribution]
) -> Screened:
    """Look at each gradient, where the policy asks for that.

    Raises:
        NonFiniteError: a gradient holds NaN or Inf and may not be left out, or every one does.
        BadInputError: a norm is beyond float64, or a coefficient underflows.
    """
    if not policy.screens:
        return Screened(contributions, [GradientRow.unseen(one, taken=True) for one in contributions])
    taken, rows, warnings, problems = [], [], [], []
    for one in contributions:
        selected = list(one.tensors.values())
        found = session.run(Measure(selected, policy.spec))
        bad = nonfinite_problems(selected, found)
        norm = _added(session, policy, targets, one, found).norms(unscale=abs(one.unscale)).whole
        limited, row = _limited(policy, one, found, norm, is_taken=not bad or policy.nonfinite != "skip")
        rows.append(row)
        problems += bad
        if row.taken:
            taken.append(limited)
        else:
            why = f"whole gradient skipped: {bad[0].message}"
            warnings.append(Problem("skipped", why, str(one.path), bad[0].tensor))
    if problems and (policy.nonfinite == "error" or not taken):
        if policy.nonfinite == "skip":
            raise NonFiniteError("every gradient contains NaN or Inf; nothing written", problems)
        raise NonFiniteError(f"input contains NaN or Inf; nothing written. {NONFINITE_REMEDY}", problems)
    return Screened(taken, rows, warnings)


def _added(
    session: Session, policy: Policy, targets: Sequence[Selected], one: Contribution, found: Measurement
) -> Measurement:
    """Measure what a gradient adds, without its weight; unless it broadcasts, that is what was found in its files."""
    pairs = [(tensor, targets[number]) for number, tensor in sorted(one.tensors.items())]
    if all(tensor.tensor.elements == target.tensor.elements for tensor, target in pairs):
        return found
    alone = one._replace(tensors={number: tensor for number, (tensor, _) in enumerate(pairs)}, weight=1.0)
    measures = Rule(keeps=False, rounds=False)
    added = Add([target for _, target in pairs], policy.spec, [alone], measures, is_new=True)
    measured: Measurement = session.run(added).each[0]
    return measured


def _limited(
    policy: Policy, one: Contribution, found: Measurement, norm: float, *, is_taken: bool
) -> tuple[Contribution, GradientRow]:
    """A gradient with the coefficient that limits its norm, and its row."""
    limited = one._replace(coef=policy.each_coef(one, found, norm))
    return limited, GradientRow(
        weight=one.weight,
        taken=is_taken,
        norm=norm,
        coef=None if policy.clip_each is None else limited.coef,
        nan=sum(found.nan),
        inf=sum(found.inf),
        cosine=None,
        distance=None,
        missing=one.missing,
        extra=one.extra,
        file=str(one.path),
    )
