"""The layers of a call, by the names of their tensors, with every type and size checked.

A layer is a Y_grad and the tensors with the same prefix. Those missing from its gradient set are taken from the others.
"""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError, UsageError, option, say, shortened
from gradtool.store.format.layout import new_tensor
from gradtool.store.format.selection import check_dtypes, check_new_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.options import LayerNormOptions
    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.format.tensors import Tensor
    from gradtool.store.transaction.inputs import OpenSets

# The same for every batch, so that any path may have them; all else belongs to one Y_grad.
_WEIGHTS = ("scale", "bias")
_STATISTICS = ("mean", "inv_std_dev")
# Why some forms need tensors that others do not.
_PURPOSES = {"bias": " to invert the layer", "inv_std_dev": " because it cannot be computed without X"}
# Sets that a message names.
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
    form = ("y_grad", "y", "scale", "bias") if options.invertible else ("y_grad", "x", "scale", "mean")
    return [role for role in (*form, "inv_std_dev") if _has_role(options, role)]


def output_roles(options: LayerNormOptions) -> list[str]:
    """List what is written of a layer, by the options that name the tensors."""
    return [f"{role}_grad" for role in ("x", "scale", "bias") if _has_role(options, role)]


def _has_role(options: LayerNormOptions, role: str) -> bool:
    if role in _WEIGHTS and not options.affine:
        return False
    return role not in {"mean", "bias"} or options.kind == "layernorm"


def check_options(options: LayerNormOptions) -> None:
    """Raise `UsageError` if options contradict each other, or a result has the name of another result or of an input.

    X_grad may have the name of Y_grad, which it then replaces. Results elsewhere may have names of inputs.
    """
    if not options.affine and options.scale_offset:
        raise UsageError(say("{} requires a scale, and {} has none", option("scale_offset"), option("affine", False)))
    if options.x_grad_in_place and options.is_elsewhere:
        template = "{} changes the input, and cannot be combined with {} or {}"
        raise UsageError(say(template, option("x_grad_in_place", True), option("output"), option("output_dir")))
    outputs, inputs = output_roles(options), [] if options.is_elsewhere else input_roles(options)
    for a, b in [*combinations(outputs, 2), *product(outputs, inputs)]:
        name = getattr(options, a)
        if name != getattr(options, b) or (a, b) == ("x_grad", "y_grad"):
            continue
        both = say("{} and {} are both {!r}", option(a), option(b), name)
        if b in outputs:
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
    def layer_name(self) -> str:
        """The prefix without the separator that it ends with."""
        return self.prefix if self.prefix[-1:].isalnum() else self.prefix[:-1]


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
        """Yield the selected Y_grads, of the requested prefixes or of all, in their order."""
        suffix, prefixes = self._options.y_grad, self._options.prefix
        selected = set(self._opened.selected)
        for number, owner in enumerate(self._opened.sets):
            for y_grad in owner.tensors:
                if y_grad.tensor.name.endswith(suffix) and y_grad in selected:
                    match = Match(number, owner, y_grad.tensor.name.removesuffix(suffix), y_grad)
                    is_wanted = not prefixes or match.prefix in prefixes or match.layer_name in prefixes
                    if is_wanted and self._is_prefix(match.prefix):
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
        candidates = [selected for number, selected in places.items() if number not in foreign]
        if len(candidates) > 1:
            where = _listed([shard.name for shard, _ in candidates])
            message = f"is missing here, and in several of the other files: {where}"
            hint = "name only one of them"
            raise BadInputError(message, file=match.owner.name, tensor=name, code="duplicate-name", hint=hint)
        return candidates[0] if candidates else None

    def missing_error(self, match: Match, role: str) -> BadInputError:
        """Return the error for a tensor of a layer that must be there."""
        sets = [owner.name for number, owner in enumerate(self._opened.sets) if number != match.number]
        where = f", here and in {_listed(sets)}," if sets else ","
        message = f"is missing{where} but needed with {match.y_grad.tensor.name!r}{_PURPOSES.get(role, '')}"
        template = "use {} if it has another name"
        if role == "scale":
            template += ", or {} for layers without weights"
        hint = say(template, option(role, "NAME"), option("affine", False))
        name = match.prefix + getattr(self._options, role)
        return BadInputError(message, file=match.owner.name, tensor=name, code="missing-tensor", hint=hint)

    def _is_prefix(self, prefix: str) -> bool:
        """Check whether a name is cut at a separator, and not in the middle of a word."""
        if prefix.endswith("_"):
            # The underscore may be part of a word: it is a separator if there is an X with this prefix.
            return prefix + (self._options.y if self._options.invertible else self._options.x) in self._places
        return not prefix or not prefix[-1].isalnum()


def _listed(paths: Sequence[str]) -> str:
    names = ", ".join(map(shortened, paths[:_MAX_NAMED]))
    return f"{names} and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else names


def files_with_layers(opened: OpenSets, options: LayerNormOptions) -> set[str]:
    """Return the files that have a layer's Y_grad: only these get results."""
    return {match.y_grad.file.name for match in Lookup(opened, options).matches()}


def find_layers(opened: OpenSets, options: LayerNormOptions) -> list[Layer]:
    """Return the layers whose Y_grad is among the selected tensors, in the order of the files.

    Raises:
        BadInputError: there is no layer, or no layer of a requested prefix; a tensor is missing, or its type or size
            does not fit; two results would have the same name.
    """
    lookup = Lookup(opened, options)
    matches = list(lookup.matches())
    layers = [_layer(match, lookup, options) for match in matches]
    where = opened.sets[0].name if len(opened.sets) == 1 else None
    names = {name for match in matches for name in (match.prefix, match.layer_name)}
    for prefix in options.prefix:
        if prefix not in names:
            unmatched = say("{} matches no tensor {}", option("prefix", prefix), options.y_grad)
            raise BadInputError(unmatched, file=where, code="no-match")
    if not layers:
        hint = say("use {} to give its name", option("y_grad", "NAME"))
        raise BadInputError(f"no tensor name ends in {options.y_grad}", file=where, code="no-match", hint=hint)
    # Prefixes within prefixes may give two results of a set the same name.
    results: dict[tuple[str, str], Layer] = {}
    for layer in layers:
        for output in layer.outputs:
            first = results.setdefault((layer.owner.name, output.name), layer)
            if first is not layer:
                message = f"would be a result of both {first.name!r} and {layer.name!r}"
                raise BadInputError(message, file=layer.owner.name, tensor=output.name, code="duplicate-name")
    return layers


def _layer(match: Match, lookup: Lookup, options: LayerNormOptions) -> Layer:
    inputs: dict[str, Selected] = {}
    for role in input_roles(options):
        tensor = lookup.find(match, role)
        if tensor is not None:
            inputs[role] = tensor
        elif role not in _STATISTICS or options.invertible:
            raise lookup.missing_error(match, role)
    x, scale = inputs["y" if options.invertible else "x"], inputs.get("scale")
    shape, axis = x.tensor.shape, options.axis
    if not -len(shape) <= axis < len(shape):
        message = f"shape {list(shape)} has no axis {axis}"
        raise BadInputError(message, file=x.shard.name, tensor=x.tensor.name, code="axis")
    outer, inner = shape[:axis], shape[axis:]
    shapes = dict.fromkeys(_STATISTICS, outer) | dict.fromkeys(_WEIGHTS, inner)
    for role, selected in inputs.items():
        _check_shape(selected, shapes.get(role, shape), exact=role not in shapes)
    outputs = []
    for role in output_roles(options):
        # The gradient of X is like X, those of scale and bias are like scale.
        like = x if scale is None or role == "x_grad" else scale
        name = match.prefix + getattr(options, role)
        check_new_name(like.shard.name, like.tensor.name, name, option(role))
        outputs.append(new_tensor(name, like.tensor.dtype, like.tensor.shape))
    check_dtypes(inputs.values(), tuple(STORAGE), can_exclude=False)
    bias, mean, inv_std_dev = inputs.get("bias"), inputs.get("mean"), inputs.get("inv_std_dev")
    name, rows, columns = match.layer_name, math.prod(outer), math.prod(inner)
    return Layer(name, match.owner, match.y_grad, x, scale, bias, mean, inv_std_dev, rows, columns, outputs)


def _check_shape(selected: Selected, expected: tuple[int, ...], *, exact: bool = False) -> None:
    """Check the shape of a tensor; unless `exact`, dimensions of 1 do not count, and it may be flat."""
    shape = selected.tensor.shape
    is_alike = shape == (math.prod(expected),) or [n for n in shape if n != 1] == [n for n in expected if n != 1]
    if shape != expected and (exact or not is_alike):
        message = f"has shape {list(shape)}, expected {list(expected)}"
        raise BadInputError(message, file=selected.shard.name, tensor=selected.tensor.name, code="shape")
