"""Finds the tensors of a layer by their names, in the gradient set of its Y_grad first, then in the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, shortened
from gradtool.ops.layernorm.forms import flag_of
from gradtool.store.format.gradset import Selected

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from gradtool.ops.layernorm.forms import Form
    from gradtool.store.format.gradset import GradientSet

# The same for every batch, so that any path may have them; all else belongs to one Y_grad.
_WEIGHTS = ("scale", "bias")
# Sets that a message names one by one.
_MAX_NAMED = 5


class Found(NamedTuple):
    """The gradient of a layer's output: its set, by number too, the prefix of the layer, and the tensor."""

    number: int
    owner: GradientSet
    prefix: str
    y_grad: Selected


class Lookup:
    """The tensors of all sets of a call that may be those of layers, by name and number of the set."""

    def __init__(self, sets: Sequence[GradientSet], form: Form) -> None:
        self._sets, self._form = sets, form
        self._places: dict[str, dict[int, Selected]] = {}
        endings = tuple(form.suffixes[role] for role in form.inputs)
        for number, one in enumerate(sets):
            for shard in one.shards:
                for tensor in shard.tensors:
                    if tensor.name.endswith(endings):
                        self._places.setdefault(tensor.name, {})[number] = Selected(shard, tensor)

    def gradients(self, wanted: Iterable[Selected], prefixes: Sequence[str]) -> Iterator[Found]:
        """The wanted tensors that are gradients of layers' outputs, of these prefixes or all, in their order."""
        suffix, chosen = self._form.suffixes["y_grad"], {(one.shard, one.tensor.name) for one in wanted}
        for number, owner in enumerate(self._sets):
            for shard in owner.shards:
                for tensor in shard.tensors:
                    prefix = tensor.name.removesuffix(suffix)
                    if (
                        tensor.name.endswith(suffix)
                        and (shard, tensor.name) in chosen
                        and self._is_prefix(prefix)
                        and (not prefixes or not {prefix, stem(prefix)}.isdisjoint(prefixes))
                    ):
                        yield Found(number, owner, prefix, Selected(shard, tensor))

    def find(self, layer: Found, role: str) -> Selected | None:
        """A tensor of a layer, if there is one.

        Raises:
            BadInputError: the set of Y_grad does not have it, and several others do.
        """
        name = layer.prefix + self._form.suffixes[role]
        places = self._places.get(name, {})
        if layer.number in places:
            return places[layer.number]
        # A set with such a Y_grad has a layer of its own, whose X and statistics are not those of this one.
        foreign: Container[int] = () if role in _WEIGHTS else self._places[layer.y_grad.tensor.name]
        others = [one for number, one in places.items() if number not in foreign]
        if len(others) > 1:
            where = _listed(str(one.shard.path) for one in others)
            message = f"is missing, and in several of the other files: {where}; name only one of them"
            raise BadInputError(message, file=layer.owner.path, tensor=name, code="duplicate-name")
        return others[0] if others else None

    def need(self, layer: Found, role: str, why: str = "") -> Selected:
        """A tensor of a layer that must be there; `why` says what for.

        Raises:
            BadInputError: it is missing, or several sets have it.
        """
        found = self.find(layer, role)
        if found is not None:
            return found
        others = [str(one.path) for number, one in enumerate(self._sets) if number != layer.number]
        where = f"is missing, here and in {_listed(others)}," if others else "is missing,"
        message = f"{where} but needed with {layer.y_grad.tensor.name!r}{why}; {flag_of(role)} names it"
        if role == "scale":
            message += ", --no-affine is for layers without weights"
        missing = layer.prefix + self._form.suffixes[role]
        raise BadInputError(message, file=layer.owner.path, tensor=missing, code="missing-tensor")

    def _is_prefix(self, prefix: str) -> bool:
        """Whether a name is cut at a separator, and not in the middle of a word."""
        if prefix.endswith("_"):
            # It may be either; X decides.
            return prefix + self._form.suffixes[self._form.x] in self._places
        return not prefix or not prefix[-1].isalnum()


def stem(prefix: str) -> str:
    """A prefix without the separator that it ends with."""
    return prefix if prefix[-1:].isalnum() else prefix[:-1]


def _listed(paths: Iterable[str]) -> str:
    named = list(map(shortened, paths))
    more = len(named) - _MAX_NAMED
    return ", ".join(named) if more <= 0 else f"{', '.join(named[:_MAX_NAMED])} and {more} more"
