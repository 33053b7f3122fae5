"""The layers of a call, by the names of their tensors, with every type and size checked.

A layer is a Y_grad and the tensors with the same prefix. Those missing from its gradient set are taken from the others.
"""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError, UsageError, option, say, shortened
from gradtool.store.format.gradset import Selected
from gradtool.store.format.layout import new_tensor
from gradtool.store.format.selection import check_dtypes, check_new_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.options import LayerNormOptions
    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.format.tensors import Tensor
    from gradtool.store.transaction.inputs import OpenSets

# The same for every batch, so that any path may have them; all else belongs to one Y_grad.
_WEIGHTS = ("scale", "bias")
# Sets that a message names one by one.
_MAX_NAMED = 5


class Layer(NamedTuple):
    """One layer: `x` is its input, or in the invertible form its output; (rows, columns) is how its shape is split.

    `scale` is None for a layer without weights. `mean` and `inv_std_dev` are None where they are to be computed, `mean`
    also where none is needed, and `bias` where the form does not read it. `outputs` begin with the gradient of X.
    """

    name: str
    owner: GradientSet
    y_grad: Selected
    x: Selected
    scale: Selected | None
    bias: Selected | None
    mean: Selected | None
    inv_std_dev: Selected | None
    rows: int
    columns: int
    outputs: Sequence[Tensor]

    @property
    def inputs(self) -> list[Selected]:
        """Every tensor that is read."""
        tensors = (self.y_grad, self.x, self.scale, self.bias, self.mean, self.inv_std_dev)
        return [tensor for tensor in tensors if tensor is not None]


def input_roles(options: LayerNormOptions) -> list[str]:
    """List what is read of a layer, if it is there, by the options that name the tensors."""
    is_read = {
        "y_grad": True,
        "x": not options.invertible,
        "y": options.invertible,
        "scale": options.affine,
        "bias": options.invertible and options.affine and options.kind == "layernorm",
        "mean": not options.invertible and options.kind == "layernorm",
        "inv_std_dev": True,
    }
    return [role for role, reads in is_read.items() if reads]


def output_roles(options: LayerNormOptions) -> list[str]:
    """List what is written of a layer, by the options that name the tensors."""
    is_written = {
        "x_grad": True,
        "scale_grad": options.affine,
        "bias_grad": options.affine and options.kind == "layernorm",
    }
    return [role for role, writes in is_written.items() if writes]


def check_names(options: LayerNormOptions, *, is_elsewhere: bool) -> None:
    """Raise `UsageError` if two results have one name, or a result beside the inputs has the name of one.

    X_grad may be called as Y_grad, which it replaces then.
    """
    outputs = output_roles(options)
    for role, other in [*combinations(outputs, 2), *(() if is_elsewhere else product(outputs, input_roles(options)))]:
        name = getattr(options, role)
        if name != getattr(options, other) or (role, other) == ("x_grad", "y_grad"):
            continue
        both = say("{} and {} are both {!r}", option(role), option(other), name)
        if other in outputs:
            raise UsageError(both, hint="give each result a name of its own")
        hint = say("choose another name, or use {} or {}", option("output"), option("output_dir"))
        raise UsageError(say("{}, so the result would replace the input", both), hint=hint)


class Match(NamedTuple):
    """The gradient of a layer's output: its set, by number too, the prefix of the layer, and the tensor."""

    number: int
    owner: GradientSet
    prefix: str
    y_grad: Selected

    @property
    def names(self) -> tuple[str, str]:
        """The prefix, and the layer's name: the prefix without the separator that it ends with."""
        return self.prefix, self.prefix if self.prefix[-1:].isalnum() else self.prefix[:-1]


class Lookup:
    """The tensors of all sets of a call that may be those of layers, by name and number of the set."""

    def __init__(self, opened: OpenSets, options: LayerNormOptions) -> None:
        self._opened, self._options = opened, options
        self._places: dict[str, dict[int, Selected]] = {}
        endings = tuple(getattr(options, role) for role in input_roles(options))
        for number, owner in enumerate(opened.sets):
            for selected in owner.tensors:
                if selected.tensor.name.endswith(endings):
                    self._places.setdefault(selected.tensor.name, {})[number] = selected

    def matches(self) -> Iterator[Match]:
        """Yield the selected gradients of layers' outputs, of the prefixes asked for or all, in their order."""
        suffix, wanted = self._options.y_grad, self._options.prefix
        selected = {(shard, tensor.name) for shard, tensor in self._opened.selected}
        for number, owner in enumerate(self._opened.sets):
            for shard, tensor in owner.tensors:
                if tensor.name.endswith(suffix) and (shard, tensor.name) in selected:
                    match = Match(number, owner, tensor.name.removesuffix(suffix), Selected(shard, tensor))
                    if self._is_prefix(match.prefix) and (not wanted or not set(wanted).isdisjoint(match.names)):
                        yield match

    def find(self, match: Match, role: str) -> Selected | None:
        """Find a tensor of a layer, if there is one.

        Raises:
            BadInputError: the set of Y_grad does not have it, and several others do.
        """
        name = match.prefix + getattr(self._options, role)
        places = self._places.get(name, {})
        if match.number in places:
            return places[match.number]
        # A set with such a Y_grad has a layer of its own, whose X and statistics are not those of this one.
        foreign = () if role in _WEIGHTS else self._places[match.y_grad.tensor.name]
        others = [place for number, place in places.items() if number not in foreign]
        if len(others) > 1:
            where = _listed([other.shard.name for other in others])
            message = f"is missing here, and in several of the other files: {where}"
            hint = "name only one of them"
            raise BadInputError(message, file=match.owner.name, tensor=name, code="duplicate-name", hint=hint)
        return others[0] if others else None

    def require(self, match: Match, role: str, why: str = "") -> Selected:
        """Find a tensor of a layer that must be there; `why` says what for.

        Raises:
            BadInputError: it is missing, or several sets have it.
        """
        tensor = self.find(match, role)
        if tensor is not None:
            return tensor
        others = [owner.name for number, owner in enumerate(self._opened.sets) if number != match.number]
        where = f", here and in {_listed(others)}," if others else ","
        message = f"is missing{where} but needed with {match.y_grad.tensor.name!r}{why}"
        hint = say("use {} if it has another name", option(role, "NAME"))
        if role == "scale":
            hint = say("{}, or {} for layers without weights", hint, option("affine", False))
        missing = match.prefix + getattr(self._options, role)
        raise BadInputError(message, file=match.owner.name, tensor=missing, code="missing-tensor", hint=hint)

    def _is_prefix(self, prefix: str) -> bool:
        """Check whether a name is cut at a separator, and not in the middle of a word."""
        if prefix.endswith("_"):
            # It may be either; X decides.
            return prefix + (self._options.y if self._options.invertible else self._options.x) in self._places
        return not prefix or not prefix[-1].isalnum()


def _listed(paths: Sequence[str]) -> str:
    named = ", ".join(map(shortened, paths[:_MAX_NAMED]))
    return f"{named} and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else named


def files_with_layers(opened: OpenSets, options: LayerNormOptions) -> set[str]:
    """Find the files that have a layer's gradient of the output, which are those that get results."""
    return {match.y_grad.shard.name for match in Lookup(opened, options).matches()}


def find_layers(opened: OpenSets, options: LayerNormOptions) -> list[Layer]:
    """Find the layers whose gradient of the output is among the selected tensors, in the order of the files.

    Raises:
        BadInputError: there is none, or none of a prefix that is asked for; a tensor is missing, or its type or size
            does not fit; two results would have one name.
    """
    lookup = Lookup(opened, options)
    matches = list(lookup.matches())
    layers = [_layer(match, lookup, options) for match in matches]
    where = opened.sets[0].name if len(opened.sets) == 1 else None
    names = {name for match in matches for name in match.names}
    for prefix in options.prefix:
        if prefix not in names:
            message = say("{} has no tensor {}", option("prefix", prefix), options.y_grad)
            raise BadInputError(message, file=where, code="no-match")
    if not layers:
        hint = say("use {} to give its name", option("y_grad", "NAME"))
        raise BadInputError(f"no tensor name ends in {options.y_grad}", file=where, code="no-match", hint=hint)
    _check_result_names(layers)
    return layers


def _layer(match: Match, lookup: Lookup, options: LayerNormOptions) -> Layer:
    x = lookup.require(match, "y" if options.invertible else "x")
    shape, axis, inputs = x.tensor.shape, options.axis, input_roles(options)
    if not -len(shape) <= axis < len(shape):
        message = f"shape {list(shape)} has no axis {axis}"
        raise BadInputError(message, file=x.shard.name, tensor=x.tensor.name, code="axis")
    _check_shape(match.y_grad, shape, exact=True)
    scale = lookup.require(match, "scale") if options.affine else None
    bias = lookup.require(match, "bias", " to invert the layer") if "bias" in inputs else None
    mean = lookup.find(match, "mean") if "mean" in inputs else None
    why = " because it cannot be computed without X"
    inv_std_dev = lookup.require(match, "inv_std_dev", why) if options.invertible else lookup.find(match, "inv_std_dev")
    for tensor, part in (
        (scale, shape[axis:]),
        (bias, shape[axis:]),
        (mean, shape[:axis]),
        (inv_std_dev, shape[:axis]),
    ):
        if tensor is not None:
            _check_shape(tensor, part)
    # The gradient of X is like X, those of scale and bias are like scale.
    outputs = []
    for role in output_roles(options):
        like = x if role == "x_grad" else scale
        if like is not None:
            name = match.prefix + getattr(options, role)
            check_new_name(like.shard.name, like.tensor.name, name, option(role))
            outputs.append(new_tensor(name, like.tensor.dtype, like.tensor.shape))
    rows, columns = math.prod(shape[:axis]), math.prod(shape[axis:])
    name = match.names[1]
    layer = Layer(name, match.owner, match.y_grad, x, scale, bias, mean, inv_std_dev, rows, columns, outputs)
    check_dtypes(layer.inputs, tuple(STORAGE), can_exclude=False)
    return layer


def _check_result_names(layers: Sequence[Layer]) -> None:
    """Raise `BadInputError` if two results of a set have one name, as prefixes within prefixes may make them have."""
    results: dict[tuple[str, str], Layer] = {}
    for layer in layers:
        for output in layer.outputs:
            other = results.setdefault((layer.owner.name, output.name), layer)
            if other is not layer:
                message = f"would be a result of both {other.name!r} and {layer.name!r}"
                raise BadInputError(message, file=layer.owner.name, tensor=output.name, code="duplicate-name")


def _check_shape(selected: Selected, expected: tuple[int, ...], *, exact: bool = False) -> None:
    """Check the shape of a tensor; unless `exact`, dimensions of 1 do not count, and it may be flat."""
    shape = selected.tensor.shape
    is_alike = shape == (math.prod(expected),) or [n for n in shape if n != 1] == [n for n in expected if n != 1]
    if shape != expected and (exact or not is_alike):
        message = f"has shape {list(shape)}, expected {list(expected)}"
        raise BadInputError(message, file=selected.shard.name, tensor=selected.tensor.name, code="shape")
