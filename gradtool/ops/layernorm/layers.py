"""The layers of a layer-norm backward pass: found by the names of their tensors, every type and size checked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError
from gradtool.ops.layernorm.lookup import Lookup, stem
from gradtool.store.format.gradset import Selected, check_dtypes
from gradtool.store.format.layout import new_tensor
from gradtool.store.format.limits import check_new_name
from gradtool.wording import option

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gradtool.ops.layernorm.forms import Form
    from gradtool.ops.layernorm.lookup import Found
    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.format.tensors import Tensor
    from gradtool.store.transaction.inputs import OpenSets


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
        parts = (self.y_grad, self.x, self.scale, self.bias, self.mean, self.inv_std_dev)
        return [one for one in parts if one is not None]


def files_with_layers(opened: OpenSets, form: Form, prefixes: Sequence[str]) -> set[Path]:
    """Find the files that have a layer's gradient of the output, which are those that get results."""
    return {one.y_grad.shard.path for one in Lookup(opened.sets, form).gradients(opened.selected, prefixes)}


def find_layers(opened: OpenSets, form: Form, prefixes: Sequence[str]) -> list[Layer]:
    """The layers whose gradient of the output is among the selected tensors, in the order of the files.

    Raises:
        BadInputError: there is none, or none of a prefix that is asked for; a tensor is missing, or its type or size
            does not fit; two results would have one name.
    """
    lookup, suffix = Lookup(opened.sets, form), form.suffixes["y_grad"]
    gradients = list(lookup.gradients(opened.selected, prefixes))
    found = {name for one in gradients for name in (one.prefix, stem(one.prefix))}
    layers = [_layer(one, lookup, form) for one in gradients]
    where = opened.sets[0].path if len(opened.sets) == 1 else None
    for prefix in prefixes:
        if prefix not in found:
            raise BadInputError(f"--prefix {prefix!r} has no tensor {suffix}", file=where, code="no-match")
    if not layers:
        message = f"no tensor name ends in {suffix}; use --y-grad to give its name"
        raise BadInputError(message, file=where, code="no-match")
    _refuse_equal_results(layers)
    return layers


def _layer(one: Found, lookup: Lookup, form: Form) -> Layer:
    x = lookup.need(one, form.x)
    rows, columns = _split(x, form.axis)
    of_row, of_column = x.tensor.shape[: form.axis], x.tensor.shape[form.axis :]
    _check_size(one.y_grad, x.tensor.shape, exact=True)
    scale = lookup.need(one, "scale") if form.affine else None
    bias = lookup.need(one, "bias", ", to invert the layer") if "bias" in form.inputs else None
    mean = lookup.find(one, "mean") if "mean" in form.inputs else None
    why = " because it cannot be computed without X"
    inv_std_dev = lookup.need(one, "inv_std_dev", why) if form.invertible else lookup.find(one, "inv_std_dev")
    for part, shape in ((scale, of_column), (bias, of_column), (mean, of_row), (inv_std_dev, of_row)):
        if part is not None:
            _check_size(part, shape)
    # The gradient of X is like X, those of scale and bias are like scale.
    like = {"x_grad": x, "scale_grad": scale, "bias_grad": scale}
    outputs = []
    for role, of in like.items():
        if of is not None and role in form.results:
            name = one.prefix + form.suffixes[role]
            check_new_name(of.shard.path, of.tensor.name, name, option(role))
            outputs.append(new_tensor(name, of.tensor.dtype, of.tensor.shape))
    layer = Layer(stem(one.prefix), one.owner, one.y_grad, x, scale, bias, mean, inv_std_dev, rows, columns, outputs)
    check_dtypes(layer.inputs, tuple(STORAGE), can_exclude=False)
    return layer


def _refuse_equal_results(layers: Sequence[Layer]) -> None:
    """Raise `BadInputError` if two results of a set have one name, as prefixes within prefixes may make them have."""
    results: dict[tuple[Path, str], Layer] = {}
    for layer in layers:
        for output in layer.outputs:
            other = results.setdefault((layer.owner.path, output.name), layer)
            if other is not layer:
                message = f"would be a result of both {other.name!r} and {layer.name!r}"
                raise BadInputError(message, file=layer.owner.path, tensor=output.name, code="duplicate-name")


def refuse_overwritten_inputs(layers: Sequence[Layer]) -> None:
    """Raise `BadInputError` if a result beside the inputs has the name of one, but for an X_grad like its Y_grad."""
    owners = {layer.owner.path: layer.owner for layer in layers}
    sets = {shard: owner.path for owner in owners.values() for shard in owner.shards}
    results = {(layer.owner.path, output.name): (layer, output) for layer in layers for output in layer.outputs}
    for layer in layers:
        for one in layer.inputs:
            if one.shard not in sets or (sets[one.shard], one.tensor.name) not in results:
                continue
            other, new = results[sets[one.shard], one.tensor.name]
            if other is layer and (new.dtype, new.shape) == (one.tensor.dtype, one.tensor.shape):
                continue
            whose = "an input" if other is layer else f"an input of {layer.name!r}"
            result = f"a result of {new.dtype} {list(new.shape)}" if other is layer else f"a result of {other.name!r}"
            message = f"is {whose}, and {result} would take its name"
            raise BadInputError(message, file=one.shard.path, tensor=one.tensor.name)


def _split(x: Selected, axis: int) -> tuple[int, int]:
    shape = x.tensor.shape
    if not -len(shape) <= axis < len(shape):
        raise BadInputError(
            f"shape {list(shape)} has no axis {axis}", file=x.shard.path, tensor=x.tensor.name, code="axis"
        )
    return math.prod(shape[:axis]), math.prod(shape[axis:])


def _check_size(one: Selected, shape: tuple[int, ...], *, exact: bool = False) -> None:
    """Whether a tensor has the given shape; unless `exact`, dimensions of 1 do not count, and it may be flat."""
    own = one.tensor.shape
    if own == shape:
        return
    if not exact and (_squeezed(own) == _squeezed(shape) or own == (math.prod(shape),)):
        return
    message = f"has shape {list(own)}, needs {list(shape)}"
    raise BadInputError(message, file=one.shard.path, tensor=one.tensor.name, code="shape")


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
