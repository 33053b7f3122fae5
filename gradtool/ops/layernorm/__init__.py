"""The backward pass of layer normalization: standard, RMSNorm, and both from the layer's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool import wording
from gradtool.declare import operation
from gradtool.errors import UsageError, changed_meanwhile
from gradtool.ops.layernorm.backward import Backward, LayerPlan
from gradtool.ops.layernorm.forms import Form, refuse_equal_names
from gradtool.ops.layernorm.index import new_indexes, refuse_foreign_index
from gradtool.ops.layernorm.layers import files_with_layers, find_layers, refuse_overwritten_inputs
from gradtool.ops.layernorm.patches import Options, Patches
from gradtool.ops.layernorm.placement import apart, beside
from gradtool.ops.layernorm.rows import LayerRow, refuse_new_headers, refuse_nonfinite_results, rows_of
from gradtool.ops.layernorm.wide_rows import sum_wide_rows
from gradtool.ops.passes import in_file_order
from gradtool.ops.results import OutputSummary, Result, call_summary, output_summary
from gradtool.ops.session import Call, refuse_engine
from gradtool.options import LayerNormOptions
from gradtool.store.transaction.inputs import WritePlan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gradtool.ops.layernorm.layers import Layer
    from gradtool.ops.layernorm.placement import Files
    from gradtool.ops.session import Session


@dataclass(frozen=True, repr=False)
class LayerNormResult(Result):
    """What was computed; `tensors`, `elements` and `bytes` are those that were read."""

    headline = ("layers",)

    output: OutputSummary
    kind: str
    invertible: bool
    layers: int
    per_layer: tuple[LayerRow, ...]


@operation(LayerNormOptions)
def layernorm_backward(options: LayerNormOptions) -> LayerNormResult:
    """Compute X_grad, scale_grad and bias_grad of every layer whose Y_grad is in the files, and add them there.

    With xh = (X - mean) · inv_std_dev, g = scale, and M the mean over the axes from `axis` on,
    X_grad = inv_std_dev · (Y_grad·g - M(Y_grad·g) - xh · M(Y_grad·g·xh)); over the other axes,
    scale_grad = Σ Y_grad·xh and bias_grad = Σ Y_grad. RMSNorm leaves out mean, M(Y_grad·g) and bias_grad; the
    invertible form takes xh = (Y - bias) / g. Arithmetic is float64, each value is rounded once. X_grad has the type
    of X (of Y), the others that of scale. As ONNX Runtime's LayerNormalizationGrad, SimplifiedLayerNormalizationGrad
    and InvertibleLayerNormalizationGrad.

    The tensors of a layer share a prefix, such as `blocks.0.norm.`: `Y_grad`, `X`, `scale`, and `mean` and
    `inv_std_dev` unless they are to be computed. Tensors missing from the Y_grad file are looked up in the other paths,
    which are never modified. `include` and `exclude` select layers by the name of their Y_grad. With `output` or
    `output_dir`, only the gradients are written, and the inputs stay unchanged. Without `affine`, a layer has no scale,
    which counts as 1, and no bias; X_grad is the only result.

    Raises:
        NonFiniteError: a result is NaN or Inf; nothing is written.
        UsageError: an option is invalid, or contradicts another one.
        BadInputError: a file, index or layer is invalid.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: reading or writing failed; nothing is written.
    """
    refuse_engine(options, wording.call("layernorm_backward"))
    form = Form.of(options)
    settings = Options(form, options.norm_eps, options.scale_offset)
    x_grad_in_place = options.x_grad_in_place
    if x_grad_in_place and options.is_elsewhere:
        raise UsageError("--x-grad-in-place changes the input, which --output leaves alone")
    refuse_equal_names(form, is_elsewhere=options.is_elsewhere)
    call = Call.of(options.named, options, dtypes=None)
    opened = output_files = None
    if len(call.inputs.paths) > 1 or options.output is not None:
        # Only the files with a Y_grad get results, and are locked.
        opened = call.open_unlocked(options)
        output_files = files_with_layers(opened, form, options.prefix) or None
    with call.open_to_write(options, WritePlan(output_files=output_files), opened) as (session, output):
        layers = find_layers(session.opened, form, options.prefix)
        _check_output_files(layers, output_files)
        files = apart(layers) if output.is_elsewhere else beside(layers, x_grad_in_place=x_grad_in_place)
        if not output.is_elsewhere:
            refuse_overwritten_inputs(layers)
            refuse_foreign_index(files, layers)
        if options.in_place:
            refuse_new_headers(files, layers)
        else:
            files = files.with_inputs(layers)
        with session.writing(output, files.new_files, new_indexes(files, output)) as destination:
            found = session.run(_backward(session, settings, layers, files), destination)
            if options.nonfinite == "error":
                refuse_nonfinite_results(session, layers, files, found)
            rows = rows_of(layers, found)
    return LayerNormResult(
        call=call_summary(session, in_file_order(one for layer in layers for one in layer.inputs)),
        output=output_summary(session, output, destination),
        kind=options.kind,
        invertible=form.invertible,
        layers=len(layers),
        per_layer=tuple(rows),
    )


def _check_output_files(layers: Sequence[Layer], files: set[Path] | None) -> None:
    """Raise `SystemRefusedError` for a layer in a file that had none when the files to be locked were options."""
    for layer in layers:
        if files is not None and layer.y_grad.shard.path not in files:
            raise changed_meanwhile(layer.y_grad.shard.path)


def _backward(session: Session, options: Options, layers: Sequence[Layer], files: Files) -> Backward:
    """The pass over all layers; what wide rows need is summed first."""
    patches = [Patches(options, layer) for layer in layers]
    both = list(zip(layers, patches, strict=True))
    plain = [
        LayerPlan(layer, one, None, places, inputs)
        for (layer, one), places, inputs in zip(both, files.places, files.inputs, strict=True)
    ]
    rows = [sum_wide_rows(session, options, layer, one) for layer, one in both]
    return Backward(options, [plan._replace(rows=own) for plan, own in zip(plain, rows, strict=True)])
