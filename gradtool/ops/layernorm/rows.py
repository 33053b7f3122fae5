"""What is reported of each layer, and what is refused before and after the work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.backends.protocol import NormSpec
from gradtool.errors import BadInputError, NonFiniteError
from gradtool.ops.passes import Measure, in_file_order
from gradtool.ops.results import nonfinite_problems, overflow_problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.layernorm.gradients import Gradients
    from gradtool.ops.layernorm.layers import Layer
    from gradtool.ops.layernorm.placement import Files
    from gradtool.ops.session import Session


@dataclass(frozen=True)
class LayerRow:
    """One layer: its shape as `rows` of `columns` elements, the norms of its gradients, and how long it took.

    `scale_grad_norm` is None where there is no scale, and `bias_grad_norm` where there is no bias. GB/s counts what was
    read and written for the layer.
    """

    shape: tuple[int, ...]
    rows: int
    columns: int
    x_grad_norm: float
    scale_grad_norm: float | None
    bias_grad_norm: float | None
    seconds: float
    gb_per_s: float
    name: str
    file: str


def rows_of(layers: Sequence[Layer], gradients: Gradients) -> list[LayerRow]:
    """One row for each layer."""
    norms, rows = iter(gradients.measurement.norms(per_tensor=True).tensors), []
    for layer, seconds in zip(layers, gradients.seconds, strict=True):
        x_grad, *own = [next(norms) for _ in layer.outputs]
        scale_grad, bias_grad = [*own, None, None][:2]
        nbytes = sum(one.tensor.nbytes for one in layer.inputs) + sum(output.nbytes for output in layer.outputs)
        rows.append(
            LayerRow(
                shape=layer.x.tensor.shape,
                rows=layer.rows,
                columns=layer.columns,
                x_grad_norm=x_grad,
                scale_grad_norm=scale_grad,
                bias_grad_norm=bias_grad,
                seconds=seconds,
                gb_per_s=nbytes / seconds / 1e9 if seconds else 0.0,
                name=layer.name,
                file=str(layer.y_grad.shard.path),
            )
        )
    return rows


def refuse_new_headers(files: Files, layers: Sequence[Layer]) -> None:
    """Raise `BadInputError` for what cannot be done in place: tensors that are added, inputs that are overwritten."""
    inputs = {(one.shard, one.tensor.name): layer for layer in layers for one in layer.inputs}
    for layer, places in zip(layers, files.places, strict=True):
        for shard, selected in places:
            if not files.shards[shard].keeps_header:
                message = (
                    "is not in the file yet, and cannot be added in place; leave out --write inplace the first time"
                )
                raise BadInputError(message, file=shard.path, tensor=selected.tensor.name, code="header")
            if (shard, selected.tensor.name) in inputs:
                message = f"is an input of {layer.name!r} and would be overwritten; leave out --write inplace"
                raise BadInputError(message, file=shard.path, tensor=selected.tensor.name, code="header")


def refuse_nonfinite_results(session: Session, layers: Sequence[Layer], files: Files, gradients: Gradients) -> None:
    """Raise `NonFiniteError` for results that are NaN or Inf, naming the inputs that they come from."""
    if gradients.measurement.is_finite:
        return
    inputs = in_file_order(one for layer in layers for one in layer.inputs)
    problems = nonfinite_problems(inputs, session.run(Measure(inputs, NormSpec(math.inf))))
    if problems:
        raise NonFiniteError(
            "input contains NaN or Inf; nothing written. Use --nonfinite propagate to continue", problems
        )
    outputs = [place.selected for places in files.places for place in places]
    raise NonFiniteError(
        "gradients overflow their type; nothing written. Use --nonfinite propagate to store Inf",
        overflow_problems(outputs, gradients.measurement),
    )
