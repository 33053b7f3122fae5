"""The backward pass of layer normalization: standard, RMSNorm, and both from the layer's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.errors import UsageError
from gradtool.ops import arguments
from gradtool.ops.layernorm.backward import Backward, LayerPlan
from gradtool.ops.layernorm.index import new_indexes, refuse_foreign_index
from gradtool.ops.layernorm.layers import Form, find_layers
from gradtool.ops.layernorm.patches import Options, Patches
from gradtool.ops.layernorm.placement import apart, beside
from gradtool.ops.layernorm.rows import LayerRow, refuse_new_headers, refuse_nonfinite_results, rows_of
from gradtool.ops.layernorm.wide_rows import nbytes_of_sums, sum_wide_rows
from gradtool.ops.results import CallFacts, call_facts
from gradtool.ops.session import Call, output_options

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from gradtool.engines.threads import Progress
    from gradtool.ops.layernorm.layers import Layer
    from gradtool.ops.layernorm.placement import Files
    from gradtool.ops.session import Session
    from gradtool.store.transaction.destination import Destination


@dataclass(frozen=True)
class LayerNormResult(CallFacts):
    """What was worked out; `tensors`, `elements` and `bytes` are those that were read."""

    kind: str
    invertible: bool
    layers: int
    dry_run: bool
    files_written: int
    bytes_written: int
    per_layer: tuple[LayerRow, ...]


def layernorm_backward(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
    *,
    kind: str = "layernorm",
    invertible: bool = False,
    axis: int = -1,
    norm_eps: float = 1e-5,
    scale_offset: float = 0.0,
    nonfinite: str = "error",
    prefix: Sequence[str] = (),
    y_grad: str = "Y_grad",
    x: str = "X",
    y: str = "Y",
    scale: str = "scale",
    bias: str = "bias",
    mean: str = "mean",
    inv_std_dev: str = "inv_std_dev",
    x_grad_in_place: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    files_from: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    write: str = "replace",
    fsync: bool = True,
    lock_timeout: float = 0.0,
    backend: str | None = None,
    device: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> LayerNormResult:
    """Work out X_grad, scale_grad and bias_grad of every layer whose Y_grad is in the files, and add them there.

    With xh = (X - mean) · inv_std_dev, g = scale, and M the mean over the axes from `axis` on,
    X_grad = inv_std_dev · (Y_grad·g - M(Y_grad·g) - xh · M(Y_grad·g·xh)); over the other axes,
    scale_grad = Σ Y_grad·xh and bias_grad = Σ Y_grad. RMSNorm leaves out mean, M(Y_grad·g) and bias_grad; the
    invertible form takes xh = (Y - bias) / g. Arithmetic is float64, each value is rounded once. X_grad has the type
    of X (of Y), the others that of scale. As ONNX Runtime's LayerNormalizationGrad, SimplifiedLayerNormalizationGrad
    and InvertibleLayerNormalizationGrad.

    Args:
        paths: files, folders or index files. A layer is a common prefix, such as `blocks.0.norm.`, of `Y_grad`, `X`,
            `scale`, and, where they are not to be computed, `mean` and `inv_std_dev`.
        kind: "layernorm" or "rmsnorm".
        invertible: take the normalized input from `Y` (and `bias`) instead of `X`.
        axis: the first of the axes that are normalized over; negative ones count from the end.
        norm_eps: what the variance was increased by, for statistics that are computed.
        scale_offset: added to scale, such as 1 where weights are stored as gamma - 1.
        nonfinite: "error" writes nothing when a result is NaN or Inf; "propagate" goes on.
        prefix: only the layers of these prefixes.
        y_grad: the name of the gradient of the output, after the prefix; and so on for the other inputs:
        x: the input.
        y: the output, in the invertible form.
        scale: the weight.
        bias: the bias, in the invertible form.
        mean: the mean of each row.
        inv_std_dev: 1 / sqrt(variance + eps) of each row.
        x_grad_in_place: put X_grad in the place of Y_grad, which goes.
        include: regular expressions; only layers whose Y_grad's name one of them finds.
        exclude: regular expressions; no layer whose Y_grad's name one of them finds.
        files_from: a file of further paths, separated by newline or NUL; "-" is standard input.
        output: write the gradients, and nothing else, here, and leave the one input file alone.
        output_dir: write the gradients, and nothing else, into files of the same names in this folder.
        dry_run: do everything but write.
        write: "replace" builds new files that take the place of the old ones; "inplace" overwrites what changes in the
            files that are there, and saves it to a journal first.
        fsync: have what is written on the disk before what was there goes.
        lock_timeout: seconds to wait for other runs that are about to write the same files.
        backend: "auto", "cpu" or "cuda"; by default what GRADTOOL_BACKEND says, or else "auto".
        device: the number of the GPU, from 0; only with "cuda".
        threads: worker threads; by default one for each core, at most 16.
        progress: called with the bytes done and the bytes in all.

    Raises:
        NonFiniteError: a result is NaN or Inf; nothing was written.
        UsageError: an argument makes no sense.
        BadInputError: a file, an index or a layer that cannot be worked with.
        BackendUnavailableError: the backend is not there.
        SystemRefusedError: reading or writing failed; nothing was written.
    """
    arguments.one_of("--kind", kind, ("layernorm", "rmsnorm"))
    arguments.one_of("--nonfinite", nonfinite, ("error", "propagate"))
    names = {
        "y_grad": y_grad, "x": x, "y": y, "scale": scale, "bias": bias, "mean": mean, "inv_std_dev": inv_std_dev,
    }  # fmt: skip
    for role, name in names.items():
        arguments.word(f"--{role.replace('_', '-')}", name)
    form = Form(kind == "rmsnorm", invertible, arguments.whole("--axis", axis), names)
    options = Options(form, arguments.number("--norm-eps", norm_eps), arguments.number("--scale-offset", scale_offset))
    options.check()
    call = Call.of(
        paths,
        include=include,
        exclude=exclude,
        files_from=files_from,
        backend=backend,
        device=device,
        threads=threads,
        progress=progress,
        dtypes=None,
    )
    output_ = output_options(output, output_dir, dry_run, write, fsync, lock_timeout)
    if x_grad_in_place and output_.is_elsewhere:
        raise UsageError("--x-grad-in-place changes the input, which --output leaves alone")
    with call.open_to_write(output_) as (session, target):
        layers = find_layers(session.opened.sets, session.selected, form, arguments.patterns("--prefix", prefix))
        files = apart(layers) if target.is_elsewhere else beside(layers, x_grad_in_place=x_grad_in_place)
        if not target.is_elsewhere:
            refuse_foreign_index(files, layers)
        if output_.in_place:
            refuse_new_headers(files, layers)
        with session.writing(target, files.new_files, new_indexes(files, target)) as destination:
            found = session.run(_backward(session, options, layers, files, destination), destination)
            if nonfinite == "error":
                refuse_nonfinite_results(session, layers, files, found)
            rows = rows_of(layers, found)
    return LayerNormResult(
        **call_facts(session, [one for layer in layers for one in layer.inputs]),
        kind=kind,
        invertible=invertible,
        layers=len(layers),
        dry_run=dry_run,
        files_written=destination.count,
        bytes_written=session.timings.write_bytes,
        per_layer=tuple(rows),
    )


def _backward(
    session: Session, options: Options, layers: Sequence[Layer], files: Files, destination: Destination
) -> Backward:
    """The pass over all layers; what wide rows need is summed first."""
    patches = [Patches(options, layer) for layer in layers]
    both = list(zip(layers, patches, strict=True))
    plain = [LayerPlan(layer, one, None, places) for (layer, one), places in zip(both, files.places, strict=True)]
    nbytes = Backward(options, plain).nbytes(destination)
    session.engine.expected_bytes = nbytes + sum(nbytes_of_sums(options, layer, one) for layer, one in both)
    rows = [sum_wide_rows(session, options, layer, one) for layer, one in both]
    return Backward(options, [plan._replace(rows=own) for plan, own in zip(plain, rows, strict=True)])
