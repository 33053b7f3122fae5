"""What is added to a buffer: the gradients of a call, matched by name and weighted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, Problem, UsageError, number_of
from gradtool.ops.broadcast import is_broadcastable
from gradtool.ops.names import prefix_between
from gradtool.ops.totals import Total, total_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

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

    @property
    def factor(self) -> float:
        """What its values are multiplied by."""
        return self.coef if self.is_sum else self.weight * self.coef

    @property
    def unscale(self) -> float:
        """What its values are divided by to get the gradient; a sum of weight 0 stays as it is."""
        return abs(self.weight) or 1.0 if self.is_sum else 1.0


_RENAME = "nothing written. Rename tensors"
_RENAME_OR_SKIP = f"{_RENAME}, or use --missing skip to add only those whose names match"


def match(
    targets: Sequence[Selected],
    gradients: Sequence[tuple[GradientSet, Sequence[Selected]]],
    weights: Sequence[Total],
    *,
    skip: bool,
) -> list[Contribution]:
    """The contributions of each gradient set, with its weight, to the buffer's tensors.

    Raises:
        BadInputError: a gradient lacks a tensor of the buffer or has one that the buffer lacks, unless `skip`; or its
            shape does not broadcast to the buffer's. Every such tensor is named.
    """
    numbers = {target.tensor.name: number for number, target in enumerate(targets)}
    problems: list[Problem] = []
    has_unmatched = False
    contributions = []
    for (gradient, selected), weight in zip(gradients, weights, strict=True):
        home = {one.tensor.name: one for one in selected}
        unmatched = [] if skip else _unmatched(gradient, home, numbers)
        problems += unmatched
        has_unmatched |= bool(unmatched)
        matched = {numbers[name]: one for name, one in home.items() if name in numbers}
        if skip and targets and not matched:
            message = "has no tensor of the buffer's; --missing skip needs at least one"
            problems.append(Problem("missing-tensor", message, str(gradient.path)))
        problems += [
            _misfit(one, targets[number])
            for number, one in matched.items()
            if not is_broadcastable(one.tensor.shape, targets[number].tensor.shape)
        ]
        contributions.append(Contribution(gradient.path, matched, weight.weight, is_sum=weight.is_sum))
    if problems:
        # A gradient without any such name cannot be added in part either.
        remedy = _RENAME_OR_SKIP if all(one.tensors for one in contributions) else _RENAME
        raise BadInputError.of(problems, remedy if has_unmatched else None)
    return contributions


def _unmatched(gradient: GradientSet, home: Mapping[str, Selected], numbers: Mapping[str, int]) -> list[Problem]:
    missing = [name for name in numbers if name not in home]
    extra = [one for name, one in home.items() if name not in numbers]
    found = prefix_between([one.tensor.name for one in extra], missing)
    if found is not None:
        have, lack = ("have", "lack") if found.is_extra else ("lack", "have")
        message = f"{len(extra)} tensor names {have} the prefix {found.prefix!r}, which those of the buffer {lack}"
        return [Problem("extra-tensor", f"{message}; {found.remedy}", str(gradient.path))]
    return [
        *(Problem("missing-tensor", "is only in the buffer", str(gradient.path), name) for name in missing),
        *(Problem("extra-tensor", "is not in the buffer", str(one.shard.path), one.tensor.name) for one in extra),
    ]


def _misfit(one: Selected, target: Selected) -> Problem:
    message = (
        f"shape {list(one.tensor.shape)} does not broadcast to the buffer's {list(target.tensor.shape)}; a gradient is "
        f"never larger than its buffer"
    )
    return Problem("shape", message, str(one.shard.path), one.tensor.name)


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
