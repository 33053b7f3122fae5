"""The weight of a gradient set, in its metadata: a number that a trainer wrote, or a total that gradtool stored.

A set whose metadata has KEY = n counts with the weight n. Its content is a mean, unless it is marked as a weighted sum:
with a total, gradtool stores the key, and whether the content is a sum or a mean.
"""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool import validators
from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError, Problem, UsageError, option, say, shortened
from gradtool.reduction import total
from gradtool.store.format.paths import read_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.format.tensors import Shard, Tensor
    from gradtool.store.transaction.output import Metadata

# Only gradtool writes keys with this prefix.
PREFIX = "gradtool."
_KEY, _CONTENT = PREFIX + "weight_key", PREFIX + "weighted"
_SUM, _MEAN = "sum", "mean"
# Larger whole numbers are written with an exponent.
_LARGEST_WHOLE = 1 << 63
_HINT = say("use {} to give the weights", option("weight"))


class Weight(NamedTuple):
    """A weight, and whether the content is a weighted sum or a mean."""

    value: float
    is_sum: bool = False

    @property
    def content(self) -> str:
        """The kind of content, in a word."""
        return _SUM if self.is_sum else _MEAN

    def entries(self, key: str) -> dict[str, str]:
        """Return the metadata entries that store this weight under a key."""
        whole = self.value.is_integer() and abs(self.value) < _LARGEST_WHOLE
        text = str(int(self.value)) if whole else repr(self.value)
        return {key: text, _KEY: key, _CONTENT: self.content}


def sum_of(weights: Sequence[float]) -> float:
    """Add up weights; raise `BadInputError` if that overflows."""
    weight_sum = total(weights)
    if math.isinf(weight_sum):
        raise BadInputError("the sum of the weights overflows float64", code="weight")
    return weight_sum


def divisor_of(weight_sum: float, unscale: float) -> float:
    """Return what a sum is divided by: its weights times the loss scale; raise `BadInputError` if out of range."""
    divisor = weight_sum * unscale
    if unscale != 1 and not sys.float_info.min <= abs(divisor) < math.inf:
        message = say("the weights add up to {!r}, out of range for {}", weight_sum, option("unscale", unscale))
        raise BadInputError(message, code="weight")
    return divisor


def read_weight(gradients: GradientSet, key: str) -> Weight:
    """Read the weight of a set from its metadata.

    Raises:
        BadInputError: a file has no such key, no finite number under it, or a sum of other weights; or shards differ.
    """
    (weight, shard), *conflicts = {_weight_of(shard, key): shard for shard in gradients.shards}.items()
    if not conflicts:
        return weight
    conflict, file = conflicts[0][0], conflicts[0][1].name
    texts = [f"{key!r} = {entry.value:g} of a {entry.content}" for entry in (conflict, weight)]
    message = f"has {texts[0]} in its metadata, but {shard.file_name} of the same set has {texts[1]}"
    raise BadInputError(message, file=file, code="weight", hint=_HINT)


def _weight_of(shard: Shard, key: str) -> Weight:
    text, content = shard.metadata.get(key), shard.metadata.get(_CONTENT, _MEAN)
    value, sum_key = _number(text), shard.metadata.get(_KEY, key)
    if text is None:
        message = f"no {key!r} in its metadata"
    elif not math.isfinite(value):
        message = f"{key!r} = {shortened(text)!r} in its metadata is not a number"
    elif content not in {_SUM, _MEAN}:
        message = f"{_CONTENT!r} = {shortened(content)!r} in its metadata is neither {_SUM!r} nor {_MEAN!r}"
    elif content == _SUM and sum_key != key:
        message = f"is a sum weighted by {shortened(sum_key)!r}, so {key!r} is not its weight"
    else:
        return Weight(value, content == _SUM)
    raise BadInputError(message, file=shard.name, code="weight", hint=_HINT)


def _number(text: str | None) -> float:
    """Return the number that a text is, or NaN."""
    try:
        return validators.number_from("", text or "")
    except UsageError:
        return math.nan


class WeightList(NamedTuple):
    """The weights in a file or stream, as texts, by the paths that they are for; None where a path has none."""

    where: str
    texts: dict[str, str | None]

    @classmethod
    def read(cls, source: str) -> Self:
        """Read a list of paths, each with its weight behind it; raise `BadInputError` if a path occurs twice."""
        listed = read_list(source)
        texts: dict[str, str | None] = {}
        for path, *number in (line.rsplit(None, 1) for line in listed.paths if line.strip()):
            name = str(Path(path.strip()))
            if name in texts:
                raise BadInputError(f"names {name} twice", file=listed.where, code="weight")
            texts[name] = number[0] if number else None
        return cls(listed.where, texts)

    def weights_of(self, paths: Sequence[str]) -> tuple[list[float], dict[int, Problem]]:
        """Return the weights of paths and, by the place of each path that has no finite one, why.

        Raises:
            BadInputError: the list names another path.
        """
        names = [str(Path(path)) for path in paths]
        if unknown := self.texts.keys() - set(names):
            message = f"names {shortened(min(unknown))}, which is not among the gradients"
            raise BadInputError(message, file=self.where, code="weight")
        weights, problems = [_number(self.texts.get(name)) for name in names], dict[int, Problem]()
        for place, name in enumerate(names):
            if not math.isfinite(weights[place]):
                text = self.texts.get(name)
                reason = "has no weight" if text is None else f"{shortened(text)!r} is not a weight"
                problems[place] = Problem("weight", f"{reason} in {self.where}", name)
        return weights, problems


def stored_key(shards: Iterable[Shard]) -> str | None:
    """Return the key of the total that gradtool stored in a set; None without one."""
    return next((shard.metadata[_KEY] for shard in shards if _KEY in shard.metadata), None)


def stored_sum(gradients: GradientSet) -> float | None:
    """Return the total that gradtool stored in a set; None without one, or if the content is a mean."""
    key = stored_key(gradients.shards)
    with contextlib.suppress(BadInputError):
        if key is not None and (weight := read_weight(gradients, key)).is_sum:
            return weight.value
    return None


def has_values(tensor: Tensor) -> bool:
    """Check whether a tensor has values that a weight applies to; integers and empty tensors have none."""
    return tensor.dtype in STORAGE and tensor.nbytes > 0


def replace_total(
    gradients: GradientSet | None, key: str | None, new: Weight | None, hint: str | None
) -> tuple[Metadata, list[Problem]]:
    """Return the metadata that store a total under a key in all shards of a set, and a warning if an old one is lost.

    Without a key, and without a total that gradtool stored, nothing changes. A new set is None, with nothing to remove.
    """
    shards = () if gradients is None else gradients.shards
    stored = stored_key(shards)
    if key is None and stored is None:
        return {}, []
    entries = {} if key is None or new is None else new.entries(key)
    keys = [name for name in (key, stored) if name is not None and name not in entries]
    lost = {name: shard.metadata[name] for name in keys for shard in shards if name in shard.metadata}
    changes = dict.fromkeys([*keys, *({_KEY, _CONTENT} - entries.keys())]) | entries
    changed = [shard for shard in shards if any(shard.metadata.get(name) != text for name, text in changes.items())]
    message = f"no total weight stored under {key!r}"
    if lost:
        removed = ", ".join(f"{name!r} = {shortened(text)!r}" for name, text in lost.items())
        message = f"total weight removed, because it does not match the new content: {removed}"
    elif entries or key is None:
        return dict.fromkeys(changed, changes), []
    file = None if gradients is None else gradients.name
    return dict.fromkeys(changed, changes), [Problem("weight-dropped", message, file, hint=hint)]
