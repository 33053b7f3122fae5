"""What is added to a buffer: the gradients of a call, matched by name and weighted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, Problem, UsageError, number_of, shortened
from gradtool.ops.broadcast import is_broadcastable
from gradtool.ops.totals import Total, total_of
from gradtool.store.format.rename import prefix_problem

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gradtool.ops.accumulate.policy import Policy
    from gradtool.store.format.gradset import GradientSet, Selected


class Contribution(NamedTuple):
    """One gradient set: its tensors by the number of the buffer's tensor that they are for, and its weight.

    A sum is the gradient times its weight already.
    """

    path: Path
    tensors: dict[int, Selected]
    weight: float
    # What clipping the gradient by itself multiplies it by.
    coef: float = 1.0
    is_sum: bool = False
    # How many tensors of the buffer or the new set it lacks, and how many of its own the buffer lacks.
    missing: int = 0
    extra: int = 0

    @property
    def factor(self) -> float:
        """What its values are multiplied by."""
        return self.coef if self.is_sum else self.weight * self.coef

    @property
    def unscale(self) -> float:
        """What its values are divided by to get the gradient; a sum of weight 0 stays as it is."""
        return self.weight or 1.0 if self.is_sum else 1.0


_RENAME = "nothing written. Rename tensors"
_RENAME_OR_SKIP = f"{_RENAME}, or use --missing skip to count only what is there, or --missing zero to count zeros"
# Of the names in a warning.
_NAMES = 3


def match(
    targets: Sequence[Selected],
    gradients: Sequence[tuple[GradientSet, Sequence[Selected]]],
    weights: Sequence[Total],
    policy: Policy,
) -> tuple[list[Contribution], list[Problem]]:
    """Return what each gradient set contributes to the targets, and a warning for each whose tensors are others.

    The targets are the tensors of the buffer; or of a new set, which has those of all gradients.

    Raises:
        BadInputError: a gradient lacks a tensor of the buffer or has one that the buffer lacks, unless the policy
            allows that; or its shape does not broadcast to the buffer's. Every such tensor is named. The first gradient
            stands for the buffer where there is none.
    """
    numbers = {target.tensor.name: number for number, target in enumerate(targets)}
    expected = {one.tensor.name: None for one in (gradients[0][1] if policy.is_new else targets)}
    problems: list[Problem] = []
    warnings: list[Problem] = []
    contributions: list[Contribution] = []
    for (gradient, selected), weight in zip(gradients, weights, strict=True):
        by_name = {one.tensor.name: one for one in selected}
        missing = [name for name in expected if name not in by_name]
        extra = [one for one in selected if one.tensor.name not in expected]
        if policy.missing == "error" or (expected and len(missing) == len(expected)):
            problems += _unmatched(gradient, missing, extra, policy)
        if policy.is_new and policy.missing != "error":
            missing, extra = [name for name in numbers if name not in by_name], []
        if missing or extra:
            warnings.append(_gap(gradient, missing, extra, policy))
        matched = {numbers[name]: one for name, one in by_name.items() if name in numbers}
        problems += [
            _misfit(one, targets[number], policy)
            for number, one in matched.items()
            if not is_broadcastable(one.tensor.shape, targets[number].tensor.shape)
        ]
        counts = len(missing), len(extra)
        contributions.append(Contribution(gradient.path, matched, weight.weight, 1.0, weight.is_sum, *counts))
    if problems:
        # A gradient that shares no name cannot be added in part either.
        remedy = _RENAME_OR_SKIP if all(one.missing < len(expected) for one in contributions) else _RENAME
        raise BadInputError.from_problems(problems, remedy if warnings and policy.missing == "error" else None)
    return contributions, warnings


def _unmatched(
    gradient: GradientSet, missing: Sequence[str], extra: Sequence[Selected], policy: Policy
) -> list[Problem]:
    """Return a problem for each tensor on one side only; or, if some are allowed, for a gradient that shares none."""
    whole = _whole(policy)
    prefix = prefix_problem([one.tensor.name for one in extra], missing, gradient.path, whole)
    if prefix is not None:
        return [prefix]
    if policy.missing != "error":
        message = f"has no tensor of the buffer's; --missing {policy.missing} needs at least one"
        return [] if policy.is_new else [Problem("missing-tensor", message, str(gradient.path))]
    return [
        *(Problem("missing-tensor", f"is only in {whole}", str(gradient.path), name) for name in missing),
        *(Problem("extra-tensor", f"is not in {whole}", str(one.shard.path), one.tensor.name) for one in extra),
    ]


def _gap(gradient: GradientSet, missing: Sequence[str], extra: Sequence[Selected], policy: Policy) -> Problem:
    """Return the warning about tensors that are on one side only."""
    parts = []
    if missing:
        what = "counted as zeros" if policy.counts_zeros else "not counted there"
        parts.append(f"lacks {number_of(len(missing), 'tensor')} ({_some(missing)}), {what}")
    if extra:
        names = _some([one.tensor.name for one in extra])
        parts.append(f"has {number_of(len(extra), 'tensor')} that the buffer lacks ({names}), not added")
    return Problem("unmatched", "; ".join(parts), str(gradient.path))


def _some(names: Sequence[str]) -> str:
    """Return the first of the names, in quotes."""
    return ", ".join([repr(shortened(name)) for name in names[:_NAMES]] + ["…"] * (len(names) > _NAMES))


def _misfit(one: Selected, target: Selected, policy: Policy) -> Problem:
    message = (
        f"shape {list(one.tensor.shape)} does not broadcast to {_whole(policy)}'s {list(target.tensor.shape)}; a "
        f"gradient is never larger than what it is added to"
    )
    return Problem("shape", message, str(one.shard.path), one.tensor.name)


def _whole(policy: Policy) -> str:
    """Return what the tensors of a gradient are compared with, in words."""
    return "the first gradient" if policy.is_new else "the buffer"


def weights_of(gradients: Sequence[GradientSet], weights: Sequence[float] | None, key: str | None) -> list[Total]:
    """The weight of each gradient: as given, or as its files have it under `key`, or else 1.

    Raises:
        UsageError: the weights are not one for each gradient.
        BadInputError: a file has no such key, or no finite number under it, or shards of one set differ.
    """
    if key is not None:
        return [total_of(gradient, key) for gradient in gradients]
    if weights is None:
        return [Total(1.0)] * len(gradients)
    if len(weights) != len(gradients):
        given, wanted = number_of(len(weights), "weight"), number_of(len(gradients), "gradient")
        raise UsageError(f"--weight gives {given} for {wanted}; it needs one for each")
    return [Total(weight) for weight in weights]
