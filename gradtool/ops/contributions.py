"""What is added to a buffer: the gradients of a call, matched by name, weighted, and read block by block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends import Addend
from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError, Problem, UsageError
from gradtool.ops.broadcast import is_broadcastable, spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from gradtool.store.blocks import Block, Span
    from gradtool.store.channel import Channel
    from gradtool.store.gradset import GradientSet, Selected
    from gradtool.store.header import Shard

# Of gradients read before they are added.
_BATCH_BYTES = 2 << 20


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
    contributions = []
    for (gradient, selected), weight in zip(gradients, weights, strict=True):
        home = {one.tensor.name: one for one in selected}
        if not skip:
            problems += [
                Problem("missing-tensor", "is only in the buffer; --missing skip goes on", str(gradient.path), name)
                for name in numbers
                if name not in home
            ]
            problems += [
                Problem("extra-tensor", "is not in the buffer; --missing skip goes on", str(one.shard.path), name)
                for name, one in home.items()
                if name not in numbers
            ]
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
        raise BadInputError.of(problems)
    return contributions


def _misfit(one: Selected, target: Selected) -> Problem:
    message = (
        f"has shape {list(one.tensor.shape)}, which does not broadcast to the buffer's {list(target.tensor.shape)}; "
        f"a gradient is never larger than its buffer"
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
            raise BadInputError(f"has no {key!r} in its metadata; use --weight", file=shard.path, code="weight")
        text = shard.metadata[key]
        try:
            # Python reads 1_000 and the digits of every script too; metadata that says so may mean something else.
            weight = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight):
            message = f"has {key!r} = {text!r} in its metadata, which is no number; use --weight"
            raise BadInputError(message, file=shard.path, code="weight")
        found[weight] = shard.path
    if len(found) > 1:
        (one, here), (other, there), *_ = found.items()
        message = (
            f"has {key!r} = {other:g} in its metadata, where {here.name} of the same set has {one:g}; use --weight"
        )
        raise BadInputError(message, file=there, code="weight")
    return next(iter(found))


def read(
    contributions: Iterable[Contribution], targets: Sequence[Selected], block: Block, channel: Channel, bulk: int
) -> Iterator[tuple[memoryview, list[Addend]]]:
    """What the contributions have for the spans of a block, in order, a few of them (times `bulk`) at a time."""
    batch: list[_Part] = []
    nbytes = 0
    for one in contributions:
        parts = _parts(one, block)
        size = sum(part.nbytes for part in parts)
        if batch and nbytes + size > _BATCH_BYTES * bulk:
            yield _read_batch(batch, nbytes, targets, channel)
            batch, nbytes = [], 0
        batch += parts
        nbytes += size
    if batch:
        yield _read_batch(batch, nbytes, targets, channel)


class _Part(NamedTuple):
    """What one contribution has for one span, whose first sum is number `at`."""

    span: Span
    at: int
    selected: Selected
    factor: float
    nbytes: int


def _parts(contribution: Contribution, block: Block) -> list[_Part]:
    parts, at = [], 0
    for span in block.spans:
        selected = contribution.tensors.get(span.tensor)
        if selected is not None:
            nbytes = span.elements * STORAGE[selected.tensor.dtype].itemsize
            parts.append(_Part(span, at, selected, contribution.factor, nbytes))
        at += span.elements
    return parts


def _read_batch(
    parts: Sequence[_Part], nbytes: int, targets: Sequence[Selected], channel: Channel
) -> tuple[memoryview, list[Addend]]:
    addends, runs, offset = [], _Runs(), 0
    view = channel.memory("gradients", nbytes)
    for part in parts:
        span, tensor = part.span, part.selected.tensor
        addends.append(Addend(tensor.dtype, offset, span.elements, part.at, part.factor))
        target = targets[span.tensor].tensor
        if tensor.elements == target.elements:
            runs.add(part.selected, span.start * (part.nbytes // span.elements), part.nbytes, offset)
        else:
            spread(part.selected, target.shape, span, view[offset:], channel)
        offset += part.nbytes
    for shard, begin, end, to in runs:
        channel.read(shard, begin, view[to : to + end - begin])
    # Side by side what is added to the same sums, still in the order given: the kernels then pass over the sums once.
    return view, sorted(addends, key=lambda addend: addend.at)


class _Runs(list[tuple["Shard", int, int, int]]):
    """Bytes of shards and where they go; neighbours in the buffer are mostly neighbours here, and read in one go."""

    def add(self, one: Selected, start: int, size: int, to: int) -> None:
        begin = one.tensor.begin + start
        if self:
            shard, first, end, at = self[-1]
            if shard is one.shard and end == begin and at + end - first == to:
                self[-1] = (shard, first, end + size, at)
                return
        self.append((one.shard, begin, begin + size, to))
