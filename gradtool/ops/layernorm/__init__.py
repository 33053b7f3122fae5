"""The backward pass of layer normalization: standard, RMSNorm, and both from the layer's output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool import errors
from gradtool.backends.values import NormSpec
from gradtool.declare import operation
from gradtool.errors import NonFiniteError, changed_meanwhile, option, say
from gradtool.ops.call import Call, require_this_machine
from gradtool.ops.layernorm.backward import Backward
from gradtool.ops.layernorm.layers import check_options, files_with_layers, find_layers
from gradtool.ops.layernorm.patches import Patches
from gradtool.ops.layernorm.placement import place_results
from gradtool.ops.passes import Measure, in_file_order
from gradtool.ops.results import OutputSummary, Result, nonfinite_problems, overflow_problems
from gradtool.options import LayerNormOptions
from gradtool.store.transaction.inputs import WritePlan
from gradtool.store.transaction.open import open_unlocked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.layernorm.backward import Gradients
    from gradtool.ops.layernorm.layers import Layer
    from gradtool.store.format.gradset import Selected


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


@dataclass(frozen=True, repr=False)
class LayerNormResult(Result):
    """The result of `layernorm_backward`; `tensors`, `elements` and `bytes` count what was read."""

    headline = ("layers",)

    output: OutputSummary
    kind: str
    invertible: bool
    layers: int
    per_layer: tuple[LayerRow, ...]


@operation(LayerNormOptions)
def layernorm_backward(options: LayerNormOptions) -> LayerNormResult:
    """Compute X_grad, scale_grad and bias_grad of every layer whose Y_grad is in the files, and add them there.

    With xh = (X - mean) · inv_std_dev, g = scale, and M the mean over the axes from `axis` on, X_grad = inv_std_dev ·
    (Y_grad·g - M(Y_grad·g) - xh · M(Y_grad·g·xh)); over the other axes, scale_grad = Σ Y_grad·xh and bias_grad = Σ
    Y_grad. RMSNorm leaves out mean, M(Y_grad·g) and bias_grad; the invertible form takes xh = (Y - bias) / g.
    Arithmetic is float64, and each value is rounded once. X_grad gets the type of X or Y, the other gradients that of
    scale. The formulas are those of ONNX Runtime's LayerNormalizationGrad, SimplifiedLayerNormalizationGrad and
    InvertibleLayerNormalizationGrad.

    The tensors of a layer share a prefix, such as `blocks.0.norm.`: `Y_grad`, `X`, `scale`, `mean` and `inv_std_dev`.
    Tensors missing from the Y_grad file are looked up in the other paths, which are never modified. If the last two are
    missing there too, they are computed. `include` and `exclude` select layers by the name of their Y_grad. With
    `output` or `output_dir`, only the gradients are written, and the inputs stay unchanged. Without `affine`, a layer
    has no scale, which counts as 1, and no bias; X_grad is the only result.

    Raises:
        NonFiniteError: a result is NaN or Inf; nothing is written.
        UsageError: an option is invalid, or contradicts another one.
        BadInputError: a file, index or layer is invalid.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: reading or writing failed; nothing is written, unless the message names `recover`.
    """
    require_this_machine(options, errors.call("layernorm_backward"))
    check_options(options)
    call = Call(options.named, options, dtypes=None)
    opened = output_files = None
    if len(call.inputs.paths) > 1 or options.output is not None:
        # Only the files with a Y_grad get results, and are locked.
        opened = open_unlocked(call.inputs, options)
        output_files = files_with_layers(opened, options) or None
    with call.open_to_write(options, WritePlan(output_files=output_files), opened):
        layers = find_layers(call.opened, options)
        for layer in layers:
            if output_files is not None and layer.y_grad.file.name not in output_files:
                # When the files to be locked were chosen, it had no Y_grad.
                raise changed_meanwhile(layer.y_grad.file.name)
        results, plan = place_results(layers, options)
        inputs = in_file_order(tensor for layer in layers for tensor in layer.inputs)
        indexes = plan.indexes(call.output.sets, is_elsewhere=options.is_elsewhere)
        with call.writing(list(plan.files.values()), indexes) as destination:
            patches = [Patches(options, *entry, plan.places) for entry in zip(layers, results, strict=True)]
            for entry in patches:
                entry.sum_wide_rows(call)
            reads = [tensor for entry in patches for tensor in entry.reads]
            gradients = call.run(Backward(reads, NormSpec(), patches), destination)
            if options.nonfinite == "error" and not gradients.is_finite:
                raise _nonfinite_error(call, inputs, gradients)
    return LayerNormResult(
        call=call.summary(inputs),
        output=call.output_summary(),
        kind=options.kind,
        invertible=options.invertible,
        layers=len(layers),
        per_layer=tuple(_rows(layers, gradients)),
    )


def _nonfinite_error(call: Call, inputs: Sequence[Selected], gradients: Gradients) -> NonFiniteError:
    """Return the error for results that are NaN or Inf, which names the inputs that they come from."""
    problems = nonfinite_problems(inputs, call.run(Measure(inputs, NormSpec(math.inf))))
    if problems:
        message, effect = "input contains NaN or Inf; nothing written", "continue"
    else:
        problems = overflow_problems(gradients.selected, gradients)
        message, effect = "gradients overflow their type; nothing written", "store Inf"
    return NonFiniteError(message, problems, say("use {} to {}", option("nonfinite", "propagate"), effect))


def _rows(layers: Sequence[Layer], gradients: Gradients) -> list[LayerRow]:
    norms, rows = iter(gradients.norms(per_tensor=True).tensors), []
    for layer, seconds in zip(layers, gradients.seconds, strict=True):
        x_grad, *weight_grads = [next(norms) for _ in layer.outputs]
        scale_grad, bias_grad = [*weight_grads, None, None][:2]
        nbytes = sum(tensor.nbytes for _, tensor in layer.inputs) + sum(output.nbytes for output in layer.outputs)
        size, speed = (layer.x.tensor.shape, layer.rows, layer.columns), nbytes / seconds / 1e9 if seconds else 0.0
        place = layer.name, layer.y_grad.shard.name
        rows.append(LayerRow(*size, x_grad, scale_grad, bias_grad, seconds, speed, *place))
    return rows
