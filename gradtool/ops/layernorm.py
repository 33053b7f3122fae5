"""The backward pass of layer normalization: standard, RMSNorm, and both from the layer's output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.backends import Terms
from gradtool.errors import BadInputError, NonFiniteError, UsageError
from gradtool.ops import arguments
from gradtool.ops.layer_files import Files, apart, beside, reindexed
from gradtool.ops.layer_pass import LayerPass, Options, Place
from gradtool.ops.layers import Form, Layer, find_layers
from gradtool.ops.measurement import Measurement, norms_of
from gradtool.ops.output import NewFile, Output
from gradtool.ops.passes import in_file_order, measure, open_session
from gradtool.ops.results import Call, call_facts, nonfinite_problems, overflow_problems
from gradtool.store.gradset import foreign_index
from gradtool.store.stream import copying, writing

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from gradtool.ops.passes import Progress, Session
    from gradtool.store.gradset import GradientSet
    from gradtool.store.header import Shard
    from gradtool.store.stream import Task


@dataclass(frozen=True)
class LayerRow:
    """One layer: its shape as `rows` of `columns` elements, the norms of its gradients, and how long it took.

    `bias_grad_norm` is None where there is no bias. GB/s counts what was read and written for the layer.
    """

    shape: tuple[int, ...]
    rows: int
    columns: int
    x_grad_norm: float
    scale_grad_norm: float
    bias_grad_norm: float | None
    seconds: float
    gb_per_s: float
    name: str
    file: str


@dataclass(frozen=True)
class LayerNormResult(Call):
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
    fsync: bool = True,
    backend: str = "auto",
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
        fsync: have the new files on the disk before the old ones go.
        backend: "auto", "cpu" or "cuda".
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
    session = open_session(
        paths,
        include=include,
        exclude=exclude,
        files_from=files_from,
        backend=backend,
        threads=threads,
        progress=progress,
        dtypes=None,
    )
    destination = Output.of(session, output, output_dir, dry_run=dry_run, fsync=fsync)
    if x_grad_in_place and destination.is_elsewhere:
        raise UsageError("--x-grad-in-place changes the input, which --output leaves alone")
    layers = find_layers(session.sets, session.selected, form, arguments.patterns("--prefix", prefix))
    files = apart(layers) if destination.is_elsewhere else beside(layers, x_grad_in_place=x_grad_in_place)
    if not destination.is_elsewhere:
        _refuse_foreign(files, layers)
    work = _Work(session, options, layers, files)
    count = work.write(destination, may_be_nonfinite=nonfinite == "propagate")
    return LayerNormResult(
        **call_facts(session, [one for layer in layers for one in layer.inputs]),
        kind=kind,
        invertible=invertible,
        layers=len(layers),
        dry_run=dry_run,
        files_written=count,
        bytes_written=session.timings.write_bytes,
        per_layer=tuple(work.rows()),
    )


def _refuse_foreign(files: Files, layers: Sequence[Layer]) -> None:
    """A shard that was named without its index would hold tensors that the index does not know."""
    for owner in {layer.owner.path: layer.owner for layer in layers}.values():
        adds = any(not files.shards[shard].keeps_header for shard in owner.shards if shard in files.shards)
        index = foreign_index(owner) if adds else None
        if index is not None:
            raise BadInputError(
                f"is a shard of {index.name}, which would not know what is added; name that", file=owner.path
            )


class _Work:
    """All layers of a call, from the files they are in to those their gradients are in."""

    def __init__(self, session: Session, options: Options, layers: Sequence[Layer], files: Files) -> None:
        self._session, self._options, self._layers, self._files = session, options, layers, files
        self._outputs = [selected for places in files.places for _, selected in places]
        self._found = Measurement(self._outputs, Terms())
        self._seconds: list[float] = []
        self._norms: list[float] = []

    def write(self, output: Output, *, may_be_nonfinite: bool) -> int:
        """Do it all; the number of files that were written."""

        def fill(destinations: Mapping[Shard, Path]) -> None:
            self._fill(destinations, self._found)

        def verify() -> None:
            if not may_be_nonfinite and not self._found.is_finite:
                raise self._nonfinite()
            # Before the files are in their place: it may have to be worked out once more.
            self._norms = norms_of(self._found, self._again, per_tensor=True).tensors

        def reindex(owner: GradientSet, content: bytes) -> bytes:
            return reindexed(self._files, owner, content, alone=output.is_elsewhere)

        news = [NewFile(shard, new.layout.shard.size) for shard, new in self._files.shards.items()]
        return output.write(self._session, news, fill, verify, reindex)

    def rows(self) -> Iterator[LayerRow]:
        """One row for each layer."""
        norms = iter(self._norms)
        for layer, seconds in zip(self._layers, self._seconds, strict=True):
            own = [next(norms) for _ in layer.outputs]
            nbytes = sum(one.tensor.nbytes for one in layer.inputs) + sum(output.nbytes for output in layer.outputs)
            yield LayerRow(
                shape=layer.x.tensor.shape,
                rows=layer.rows,
                columns=layer.columns,
                x_grad_norm=own[0],
                scale_grad_norm=own[1],
                bias_grad_norm=own[2] if len(own) > 2 else None,  # noqa: PLR2004
                seconds=seconds,
                gb_per_s=nbytes / seconds / 1e9 if seconds else 0.0,
                name=layer.name,
                file=str(layer.y_grad.shard.path),
            )

    def _fill(self, destinations: Mapping[Shard, Path], found: Measurement) -> None:
        passes, number = [], 0
        for layer, places in zip(self._layers, self._files.places, strict=True):
            own = [Place(number + k, one, destinations.get(shard)) for k, (shard, one) in enumerate(places)]
            number += len(own)
            passes.append(LayerPass(self._session, self._options, layer, own, found))
        nbytes = sum(one.tensor.nbytes for layer in self._layers for one in layer.inputs)
        nbytes += sum(end - begin for shard in destinations for begin, end, _ in self._files.shards[shard].copies)
        for one in passes:
            one.prepare()
        self._session.stream(self._tasks(passes, destinations), nbytes)
        self._seconds = [one.seconds for one in passes]

    def _tasks(self, passes: Sequence[LayerPass], destinations: Mapping[Shard, Path]) -> Iterator[Task]:
        for shard, path in destinations.items():
            new = self._files.shards[shard]
            if not new.keeps_header:
                yield writing(path, new.layout.header)
            yield from copying(shard, new.copies, path)
        for one in passes:
            yield from one.tasks()

    def _again(self, numbers: Sequence[int], divisors: Sequence[float]) -> Measurement:
        every = [1.0] * len(self._outputs)
        for number, divisor in zip(numbers, divisors, strict=True):
            every[number] = divisor
        found, seconds = Measurement(self._outputs, Terms(), every), self._seconds
        self._fill({}, found)
        self._seconds = seconds
        return found.part([self._outputs[number] for number in numbers], numbers)

    def _nonfinite(self) -> NonFiniteError:
        inputs = in_file_order(one for layer in self._layers for one in layer.inputs)
        problems = nonfinite_problems(inputs, measure(self._session, inputs, Terms(math.inf)))
        if problems:
            return NonFiniteError(
                "nothing was written, for there are NaN or Inf values; --nonfinite propagate goes on", problems
            )
        return NonFiniteError(
            "nothing was written, for a gradient does not fit its type; --nonfinite propagate goes on",
            overflow_problems(self._outputs, self._found),
        )
