"""What is added to a buffer: the gradients of a call, matched by name and weighted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, Problem, UsageError
from gradtool.ops.accumulate.broadcast import is_broadcastable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gradtool.store.format.gradset import GradientSet, Selected


class Contribution(NamedTuple):
    """One gradient set: its tensors by the number of the buffer's tensor that they are for, and its weight."""

    path: Path
    tensors: dict[int, Selected]
    weight: float
    # What clipping the gradient by itself multiplies it by.
    coef: float = 1.0

    @property
    def factor(self) -> float:
        """What its values are multiplied by."""
        return self.weight * self.coef


_REMEDY = "nothing written. Rename tensors, or use --missing skip to add only those whose names match"


def match(
    targets: Sequence[Selected],
    gradients: Sequence[tuple[GradientSet, Sequence[Selected]]],
    weights: Sequence[float],
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
    remedy = None
    contributions = []
    for (gradient, selected), weight in zip(gradients, weights, strict=True):
        home = {one.tensor.name: one for one in selected}
        unmatched = [] if skip else _unmatched(gradient, home, numbers)
        problems += unmatched
        remedy = remedy or (_REMEDY if unmatched else None)
        matched = {numbers[name]: one for name, one in home.items() if name in numbers}
        if skip and targets and not matched:
            message = "has no tensor of the buffer's; --missing skip needs at least one"
            problems.append(Problem("missing-tensor", message, str(gradient.path)))
        problems += [
            _misfit(one, targets[number])
            for number, one in matched.items()
            if not is_broadcastable(one.tensor.shape, targets[number].tensor.shape)
        ]
        contributions.append(Contribution(gradient.path, matched, weight))
    if problems:
        raise BadInputError.of(problems, remedy)
    return contributions


def _unmatched(gradient: GradientSet, home: Mapping[str, Selected], numbers: Mapping[str, int]) -> list[Problem]:
    missing = [name for name in numbers if name not in home]
    extra = [one for name, one in home.items() if name not in numbers]
    names = [one.tensor.name for one in extra]
    for without, with_it, these, those in ((missing, names, "have", "lack"), (names, missing, "lack", "have")):
        prefix = _common_prefix(without, with_it)
        if prefix is not None:
            message = f"{len(names)} tensor names {these} the prefix {prefix!r}, which those of the buffer {those}"
            return [Problem("extra-tensor", message, str(gradient.path))]
    return [
        *(Problem("missing-tensor", "is only in the buffer", str(gradient.path), name) for name in missing),
        *(Problem("extra-tensor", "is not in the buffer", str(one.shard.path), one.tensor.name) for one in extra),
    ]


def _common_prefix(names: Sequence[str], longer: Sequence[str]) -> str | None:
    """The prefix that makes all of the names the longer ones, such as the `module.` of a wrapped model."""
    if len(names) != len(longer):
        return None
    for one in longer:
        if names[0] and one.endswith(names[0]):
            prefix = one.removesuffix(names[0])
            if {prefix + name for name in names} == set(longer):
                return prefix
    return None


def _misfit(one: Selected, target: Selected) -> Problem:
    message = (
        f"shape {list(one.tensor.shape)} does not broadcast to the buffer's {list(target.tensor.shape)}; a gradient is "
        f"never larger than its buffer"
    )
    return Problem("shape", message, str(one.shard.path), one.tensor.name)


def weights_of(gradients: Sequence[GradientSet], weights: Sequence[float] | None, key: str | None) -> list[float]:
    """The weight of each gradient: as given, or as its files have it under `key`, or else 1.

    Raises:
        UsageError: the weights are not one for each gradient.
        BadInputError: a file has no such key, or no finite number under it, or shards of one set differ.
    """
    if key is not None:
        return [_weight_of(gradient, key) for gradient in gradients]
    if weights is None:
        return [1.0] * len(gradients)
    if len(weights) != len(gradients):
        given, wanted = len(weights), len(gradients)
        raise UsageError(f"--weight is given {given} times, and there are {wanted} gradients; give one for each")
    return list(weights)


def _weight_of(gradient: GradientSet, key: str) -> float:
    found: dict[float, Path] = {}
    for shard in gradient.shards:
        if key not in shard.metadata:
            raise BadInputError(f"no {key!r} in its metadata; use --weight", file=shard.path, code="weight")
        text = shard.metadata[key]
        try:
            # Python reads 1_000 and the digits of every script too; metadata that says so may mean something else.
            weight = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight):
            message = f"{key!r} = {text!r} in its metadata is not a number; use --weight"
            raise BadInputError(message, file=shard.path, code="weight")
        found[weight] = shard.path
    if len(found) > 1:
        (one, here), (other, there), *_ = found.items()
        message = (
            f"has {key!r} = {other:g} in its metadata, where {here.name} of the same set has {one:g}; use --weight"
        )
        raise BadInputError(message, file=there, code="weight")
    return next(iter(found))
