"""All layers of a call: from the files they are in to those that their gradients are in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.backends import NormSpec
from gradtool.errors import BadInputError, NonFiniteError
from gradtool.ops.layernorm.backward import LayerPass, Place
from gradtool.ops.layernorm.placement import Files, reindexed
from gradtool.ops.measurement import Measurement, norms_of
from gradtool.ops.output import NewFile
from gradtool.ops.passes import in_file_order, measure
from gradtool.ops.results import nonfinite_problems, overflow_problems
from gradtool.store.format.gradset import foreign_index
from gradtool.store.io.workers import copying, writing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gradtool.ops.layernorm.layers import Layer
    from gradtool.ops.layernorm.patches import Options
    from gradtool.ops.output import Output
    from gradtool.ops.passes import Session
    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.format.header import Shard
    from gradtool.store.fs import File
    from gradtool.store.io.workers import Task


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


def refuse_foreign_index(files: Files, layers: Sequence[Layer]) -> None:
    """A shard that was named without its index would hold tensors that the index does not know."""
    for owner in {layer.owner.path: layer.owner for layer in layers}.values():
        adds = any(not files.shards[shard].keeps_header for shard in owner.shards if shard in files.shards)
        index = foreign_index(owner) if adds else None
        if index is not None:
            raise BadInputError(
                f"is a shard of {index.name}, which would not know what is added; name that", file=owner.path
            )


def refuse_new_headers(files: Files, layers: Sequence[Layer]) -> None:
    """In place there is room for what is there, and an input must not go while it is read."""
    inputs = {(one.shard, one.tensor.name): layer for layer in layers for one in layer.inputs}
    for layer, places in zip(layers, files.places, strict=True):
        for shard, selected in places:
            if not files.shards[shard].keeps_header:
                message = "a gradient is added that was not there before; leave out --write inplace the first time"
                raise BadInputError(message, file=shard.path, tensor=selected.tensor.name, code="header")
            if (shard, selected.tensor.name) in inputs:
                message = f"is read for {layer.name!r} and would be overwritten; leave out --write inplace"
                raise BadInputError(message, file=shard.path, tensor=selected.tensor.name, code="header")


class LayerWork:
    """Works out the gradients of layers, and writes them."""

    def __init__(self, session: Session, options: Options, layers: Sequence[Layer], files: Files) -> None:
        self._session, self._options, self._layers, self._files = session, options, layers, files
        self._outputs = [selected for places in files.places for _, selected in places]
        self._found = Measurement(self._outputs, NormSpec())
        self._seconds: list[float] = []
        self._norms: list[float] = []

    def write(self, output: Output, *, may_be_nonfinite: bool) -> int:
        """Do it all; the number of files that were written."""

        def fill(destinations: Mapping[Shard, File]) -> None:
            self._fill(destinations, self._found)

        def verify() -> None:
            if not may_be_nonfinite and not self._found.is_finite:
                raise self._nonfinite()
            # Before the files are in their place: it may have to be worked out once more.
            self._norms = norms_of(self._found, self._again, per_tensor=True).tensors

        def reindex(owner: GradientSet, content: bytes) -> bytes:
            return reindexed(self._files, owner, content, alone=output.is_elsewhere)

        changes = dict.fromkeys(self._files.shards, 0)
        for shard, selected in (place for places in self._files.places for place in places):
            changes[shard] += selected.tensor.nbytes
        news = [
            NewFile(shard, new.layout.shard.size, changes=changes[shard]) for shard, new in self._files.shards.items()
        ]
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

    def _fill(self, destinations: Mapping[Shard, File], found: Measurement) -> None:
        passes, number = [], 0
        for layer, places in zip(self._layers, self._files.places, strict=True):
            own = [Place(number + k, one, destinations.get(shard)) for k, (shard, one) in enumerate(places)]
            number += len(own)
            passes.append(LayerPass(self._session, self._options, layer, own, found))
        nbytes = sum(one.task_bytes for one in passes)
        if self._session.journal is None:
            nbytes += sum(end - begin for shard in destinations for begin, end, _ in self._files.shards[shard].copies)
        self._session.total_bytes = nbytes + sum(one.preparation_bytes for one in passes)
        for one in passes:
            one.prepare()
        self._session.stream(self._tasks(passes, destinations), nbytes)
        self._seconds = [one.seconds for one in passes]

    def _tasks(self, passes: Sequence[LayerPass], destinations: Mapping[Shard, File]) -> Iterator[Task]:
        for shard, file in destinations.items() if self._session.journal is None else ():
            new = self._files.shards[shard]
            if not new.keeps_header:
                yield writing(file, new.layout.header)
            yield from copying(shard, new.copies, file)
        for one in passes:
            yield from one.tasks()

    def _again(self, numbers: Sequence[int], divisors: Sequence[float]) -> Measurement:
        every = [1.0] * len(self._outputs)
        for number, divisor in zip(numbers, divisors, strict=True):
            every[number] = divisor
        found, seconds = Measurement(self._outputs, NormSpec(), every), self._seconds
        self._fill({}, found)
        self._seconds = seconds
        return found.part([self._outputs[number] for number in numbers], numbers)

    def _nonfinite(self) -> NonFiniteError:
        inputs = in_file_order(one for layer in self._layers for one in layer.inputs)
        problems = nonfinite_problems(inputs, measure(self._session, inputs, NormSpec(math.inf)))
        if problems:
            return NonFiniteError(
                "nothing was written, for there are NaN or Inf values; --nonfinite propagate goes on", problems
            )
        return NonFiniteError(
            "nothing was written, for a gradient does not fit its type; --nonfinite propagate goes on",
            overflow_problems(self._outputs, self._found),
        )
