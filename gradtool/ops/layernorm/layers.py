"""The layers of a layer-norm backward pass: found by the names of their tensors, every type and size checked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError
from gradtool.store.format.gradset import Selected, refuse_dtypes
from gradtool.store.format.layout import new_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.format.tensors import Tensor


class Form(NamedTuple):
    """Which of the four backward passes it is, and what the tensors are called after a layer's prefix."""

    rms: bool
    invertible: bool
    axis: int
    suffixes: Mapping[str, str]

    @property
    def has_bias_grad(self) -> bool:
        """Whether there is a bias to have a gradient."""
        return not self.rms


class Layer(NamedTuple):
    """One layer: `x` is its input, or in the invertible form its output; (rows, columns) is how its shape is split.

    `mean` and `inv_std_dev` are None where they are to be computed, `mean` also where none is needed, and `bias` where
    the form does not read it.
    """

    name: str
    owner: GradientSet
    y_grad: Selected
    x: Selected
    scale: Selected
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


def find_layers(
    sets: Sequence[GradientSet], wanted: Sequence[Selected], form: Form, prefixes: Sequence[str]
) -> list[Layer]:
    """The layers whose gradient of the output is among the wanted tensors, in the order of the files.

    Raises:
        BadInputError: there is none, or none of a prefix that is asked for; a tensor is missing, or its type or size
            does not fit.
    """
    suffix = form.suffixes["y_grad"]
    layers, found = [], set()
    chosen = {(one.shard, one.tensor.name) for one in wanted}
    for owner in sets:
        home = {tensor.name: Selected(shard, tensor) for shard in owner.shards for tensor in shard.tensors}
        for name, one in home.items():
            prefix = name.removesuffix(suffix)
            if name.endswith(suffix) and _is_prefix(prefix, home, form) and (one.shard, name) in chosen:
                named = {prefix, _stem(prefix)}
                if not prefixes or not named.isdisjoint(prefixes):
                    found |= named
                    layers.append(_layer(owner, home, prefix, form))
    where = sets[0].path if len(sets) == 1 else None
    for prefix in prefixes:
        if prefix not in found:
            raise BadInputError(f"--prefix {prefix!r} has no tensor {suffix}", file=where, code="no-match")
    if not layers:
        message = f"no tensor name ends in {suffix}; use --y-grad to give its name"
        raise BadInputError(message, file=where, code="no-match")
    return layers


def _is_prefix(prefix: str, home: Mapping[str, Selected], form: Form) -> bool:
    """Whether a name is cut at a separator, and not in the middle of a word."""
    if prefix.endswith("_"):
        # It may be either; X decides.
        return prefix + form.suffixes["y" if form.invertible else "x"] in home
    return not prefix or not prefix[-1].isalnum()


def _stem(prefix: str) -> str:
    return prefix if prefix[-1:].isalnum() else prefix[:-1]


def _layer(owner: GradientSet, home: Mapping[str, Selected], prefix: str, form: Form) -> Layer:
    def find(role: str) -> Selected | None:
        return home.get(prefix + form.suffixes[role])

    y_grad = home[prefix + form.suffixes["y_grad"]]

    def need(role: str, why: str = "") -> Selected:
        found = find(role)
        if found is None:
            missing = prefix + form.suffixes[role]
            message = f"is missing, but needed with {y_grad.tensor.name!r}{why}; --{role.replace('_', '-')} names it"
            raise BadInputError(message, file=owner.path, tensor=missing, code="missing-tensor")
        return found

    x = need("y" if form.invertible else "x")
    rows, columns = _split(x, form.axis)
    _check_size(y_grad, x.tensor.shape, exact=True)
    scale = need("scale")
    _check_size(scale, x.tensor.shape[form.axis :])
    bias = need("bias", ", to invert the layer") if form.invertible and not form.rms else None
    mean = None if form.rms or form.invertible else find("mean")
    why = " because it cannot be computed without X" if form.invertible else ""
    inv_std_dev = need("inv_std_dev", why) if form.invertible else find("inv_std_dev")
    if bias is not None:
        _check_size(bias, x.tensor.shape[form.axis :])
    for one in (mean, inv_std_dev):
        if one is not None:
            _check_size(one, x.tensor.shape[: form.axis])
    outputs = [
        new_tensor(f"{prefix}X_grad", x.tensor.dtype, x.tensor.shape),
        new_tensor(f"{prefix}scale_grad", scale.tensor.dtype, scale.tensor.shape),
    ]
    if form.has_bias_grad:
        outputs.append(new_tensor(f"{prefix}bias_grad", scale.tensor.dtype, scale.tensor.shape))
    layer = Layer(_stem(prefix), owner, y_grad, x, scale, bias, mean, inv_std_dev, rows, columns, outputs)
    refuse_dtypes(layer.inputs, tuple(STORAGE), can_exclude=False)
    _refuse_overwritten(layer)
    return layer


def _refuse_overwritten(layer: Layer) -> None:
    """An input that was given an output's name may only be replaced by its like."""
    news = {output.name: output for output in layer.outputs}
    for one in layer.inputs:
        new = news.get(one.tensor.name)
        if new is not None and (new.dtype, new.shape) != (one.tensor.dtype, one.tensor.shape):
            message = f"is an input, and a result of {new.dtype} {list(new.shape)} would take its name"
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
    raise BadInputError(
        f"has shape {list(own)}, needs {list(shape)}",
        file=one.shard.path,
        tensor=one.tensor.name,
        code="shape",
    )


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
