"""The backward pass of layer normalization: standard, RMSNorm, and both from the layer's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from gradtool.errors import UsageError
from gradtool.ops.layernorm.layers import Form, find_layers
from gradtool.ops.layernorm.patches import Options
from gradtool.ops.layernorm.placement import apart, beside
from gradtool.ops.layernorm.work import LayerRow, LayerWork, refuse_foreign_index, refuse_new_headers
from gradtool.ops.output import Choices, opened
from gradtool.ops.passes import Inputs
from gradtool.ops.results import Call, call_facts
from gradtool.options import LayerNormOptions, Sets
from gradtool.signatures import complete, documented


@dataclass(frozen=True)
class LayerNormResult(Call):
    """What was computed; `tensors`, `elements` and `bytes` are those that were read."""

    kind: str
    invertible: bool
    layers: int
    dry_run: bool
    files_written: int
    bytes_written: int
    per_layer: tuple[LayerRow, ...]


@documented
def layernorm_backward(paths: Sets = (), **options: Unpack[LayerNormOptions]) -> LayerNormResult:
    """Compute X_grad, scale_grad and bias_grad of every layer whose Y_grad is in the files, and add them there.

    With xh = (X - mean) · inv_std_dev, g = scale, and M the mean over the axes from `axis` on,
    X_grad = inv_std_dev · (Y_grad·g - M(Y_grad·g) - xh · M(Y_grad·g·xh)); over the other axes,
    scale_grad = Σ Y_grad·xh and bias_grad = Σ Y_grad. RMSNorm leaves out mean, M(Y_grad·g) and bias_grad; the
    invertible form takes xh = (Y - bias) / g. Arithmetic is float64, each value is rounded once. X_grad has the type
    of X (of Y), the others that of scale. As ONNX Runtime's LayerNormalizationGrad, SimplifiedLayerNormalizationGrad
    and InvertibleLayerNormalizationGrad.

    The tensors of a layer share a prefix, such as `blocks.0.norm.`: `Y_grad`, `X`, `scale`, and `mean` and
    `inv_std_dev` unless they are to be computed. `include` and `exclude` select layers by the name of their Y_grad.
    With `output` or `output_dir`, only the gradients are written, and the inputs stay unchanged.

    Raises:
        NonFiniteError: a result is NaN or Inf; nothing is written.
        UsageError: an option is invalid, or contradicts another one.
        BadInputError: a file, index or layer is invalid.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: reading or writing failed; nothing is written.
    """
    chosen = complete("layernorm_backward", LayerNormOptions, options)
    names = {
        "y_grad": chosen["y_grad"],
        "x": chosen["x"],
        "y": chosen["y"],
        "scale": chosen["scale"],
        "bias": chosen["bias"],
        "mean": chosen["mean"],
        "inv_std_dev": chosen["inv_std_dev"],
    }
    form = Form(chosen["kind"] == "rmsnorm", chosen["invertible"], chosen["axis"], names)
    settings = Options(form, chosen["norm_eps"], chosen["scale_offset"])
    x_grad_in_place = chosen["x_grad_in_place"]
    inputs, choices = Inputs.of(paths, chosen, dtypes=None), Choices.of(chosen)
    with opened(inputs, choices) as (session, destination):
        if x_grad_in_place and destination.is_elsewhere:
            raise UsageError("--x-grad-in-place changes the input, which --output leaves alone")
        layers = find_layers(session.sets, session.selected, form, chosen["prefix"])
        files = apart(layers) if destination.is_elsewhere else beside(layers, x_grad_in_place=x_grad_in_place)
        if not destination.is_elsewhere:
            refuse_foreign_index(files, layers)
        if destination.in_place:
            refuse_new_headers(files, layers)
        work = LayerWork(session, settings, layers, files)
        count = work.write(destination, may_be_nonfinite=chosen["nonfinite"] == "propagate")
    return LayerNormResult(
        **call_facts(session, [one for layer in layers for one in layer.inputs]),
        kind=chosen["kind"],
        invertible=form.invertible,
        layers=len(layers),
        dry_run=choices.dry_run,
        files_written=count,
        bytes_written=session.timings.write_bytes,
        per_layer=tuple(work.rows()),
    )
