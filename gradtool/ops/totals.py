"""The total weight of a gradient set: what its content is a sum of, or the mean.

A set with KEY = n in its metadata stands for the weight n. Its content is a mean, unless it is marked as a weighted
sum: with each total that gradtool stores, it stores the key, and whether the content is a sum or a mean.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from gradtool import validators
from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError, Problem, UsageError, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.format.header import Shard
    from gradtool.store.format.tensors import Tensor

_PREFIX = "gradtool."
_KEY, _CONTENT = _PREFIX + "weight_key", _PREFIX + "weighted"
_SUM, _MEAN = "sum", "mean"
# Larger whole numbers are written with an exponent.
_LARGEST_WHOLE = 1 << 63


class Total(NamedTuple):
    """A weight, and whether the content is the sum that has it, or a mean."""

    weight: float
    is_sum: bool = False

    @property
    def content(self) -> str:
        """What the content is, in a word."""
        return _SUM if self.is_sum else _MEAN

    def entries(self, key: str) -> dict[str, str]:
        """The metadata that say so, under a key."""
        whole = self.weight.is_integer() and abs(self.weight) < _LARGEST_WHOLE
        text = str(int(self.weight)) if whole else repr(self.weight)
        return {key: text, _KEY: key, _CONTENT: self.content}


class NewMetadata(NamedTuple):
    """What becomes of metadata: the entries that change, by file, and what is warned of."""

    entries: Mapping[Shard, Mapping[str, str | None]]
    warnings: Sequence[Problem] = ()


def checked_key(key: str | None) -> str | None:
    """A key of metadata that may hold a weight, or none; raises `UsageError` for one that gradtool writes itself."""
    if key is not None and key.startswith(_PREFIX):
        raise UsageError(f"--weight-key {key}: keys that begin with {_PREFIX!r} are gradtool's own")
    return key


def total_of(one: GradientSet, key: str) -> Total:
    """The total weight of a set, as its metadata have it.

    Raises:
        BadInputError: a file has no such key, no finite number under it, or a sum of other weights; or shards differ.
    """
    found = {_total_of(shard, key): shard for shard in one.shards}
    if len(found) > 1:
        (total, here), (other, there), *_ = found.items()
        what, own = f"has {key!r} = {other.weight:g} in its metadata", f"{total.weight:g}"
        if total.weight == other.weight:
            what, own = f"has a {other.content} by its metadata", f"a {total.content}"
        message = f"{what}, where {here.path.name} of the same set has {own}; use --weight"
        raise BadInputError(message, file=there.path, code="weight")
    return next(iter(found))


def _total_of(shard: Shard, key: str) -> Total:
    metadata = shard.metadata
    if key not in metadata:
        raise BadInputError(f"no {key!r} in its metadata; use --weight", file=shard.path, code="weight")
    try:
        weight = validators.number(key, metadata[key])
    except UsageError:
        weight = math.nan
    content, own = metadata.get(_CONTENT, _MEAN), metadata.get(_KEY, key)
    if not math.isfinite(weight):
        message = f"{key!r} = {shortened(metadata[key])!r} in its metadata is not a number; use --weight"
    elif content not in {_SUM, _MEAN}:
        message = f"{_CONTENT!r} = {content!r} in its metadata is neither {_SUM!r} nor {_MEAN!r}; use --weight"
    elif content == _SUM and own != key:
        message = f"is a sum weighted by {own!r}, so {key!r} is not its weight; use --weight-key {own} or --weight"
    else:
        return Total(weight, content == _SUM)
    raise BadInputError(message, file=shard.path, code="weight")


def stored_key(one: GradientSet) -> str | None:
    """The key of the total that gradtool stored in a set; None without one."""
    return next((shard.metadata[_KEY] for shard in one.shards if _KEY in shard.metadata), None)


def has(one: GradientSet, key: str) -> bool:
    """Whether a shard of a set has a key."""
    return any(key in shard.metadata for shard in one.shards)


def is_whole(one: GradientSet, selected: Iterable[Selected]) -> bool:
    """Whether selected tensors of a set are all that it has with values."""
    everything = sum(has_values(tensor) for shard in one.shards for tensor in shard.tensors)
    return everything == sum(has_values(chosen.tensor) for chosen in selected)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor is part of what a total is about: neither empty, nor of a type that carries no values."""
    return tensor.dtype in STORAGE and tensor.nbytes > 0


def changed(one: GradientSet, entries: Mapping[str, str | None]) -> NewMetadata:
    """Those entries in every shard of a set, as far as they change anything."""
    shards = [shard for shard in one.shards if any(shard.metadata.get(key) != text for key, text in entries.items())]
    return NewMetadata(dict.fromkeys(shards, entries))


def without(
    one: GradientSet, key: str | None, why: str, remedy: str, *, instead: Mapping[str, str] | None = None
) -> NewMetadata:
    """Remove the total under a key, and the one that gradtool stored, from a set of which they are no longer true.

    That is warned of. `instead` are entries that are set at the same time.
    """
    instead = instead or {}
    keys = [name for name in dict.fromkeys((key, stored_key(one))) if name is not None and name not in instead]
    lost = {name: shard.metadata[name] for name in keys for shard in one.shards if name in shard.metadata}
    removed = {name: None for name in (*keys, _KEY, _CONTENT) if name not in instead}
    entries, _ = changed(one, {**removed, **instead})
    said = ", ".join(f"{name!r} = {shortened(text)!r}" for name, text in lost.items())
    warning = Problem("weight-dropped", f"{why}; left out of the new metadata: {said}. {remedy}", str(one.path))
    return NewMetadata(entries, [warning] if lost else [])
