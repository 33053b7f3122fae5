"""The buffer that gradients are added to, which may be a new set, and the passes over its blocks."""

from __future__ import annotations

import math
import os
import sys
from array import array
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from gradtool import tuning
from gradtool.backends.storage import STORAGE
from gradtool.backends.values import Addend, AddMode, NormSpec, Piece, Tolerance
from gradtool.engines.passes import Pass, Tallies
from gradtool.errors import NO_SUCH_FILE, BadInputError, option, say
from gradtool.ops.aligned_read import Operand, read
from gradtool.ops.diff.comparison import Comparison
from gradtool.ops.passes import Measure, Measurement, pieces_of
from gradtool.reduction import TILE
from gradtool.store.format.gradset import Selected, open_sets
from gradtool.store.format.layout import SPARE, Layout, NewSet, lay_out
from gradtool.store.format.paths import is_there
from gradtool.store.io.blocks import cut_where
from gradtool.store.io.destination import NewFile
from gradtool.store.source import SmallFile

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from gradtool.backends.protocol import Backend
    from gradtool.backends.values import Trim
    from gradtool.engines.worker import Worker
    from gradtool.ops.call import Call
    from gradtool.options import AccumulateOptions, StrPath
    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.destination import Destination, WrittenFiles
    from gradtool.store.transaction.inputs import OpenSets
    from gradtool.store.transaction.output import Metadata, Output

# The size of shards that huggingface_hub writes.
_SHARD_BYTES = 5 * 10**9
# A window of fewer elements costs more to read than to sort.
_MIN_WINDOW = 512
_UNMEASURED = NormSpec(math.inf)


def existing_buffer(path: StrPath) -> str:
    """Return the path of the buffer; raise `BadInputError` if there is none."""
    path = os.fspath(path)
    if is_there(path):
        return path
    from gradtool.store.format.hints import no_such_file  # only needed for the error

    problem = no_such_file(path)
    if problem.message == NO_SUCH_FILE:
        hint = say("use {} to write the sum alone", option("output"))
        problem = replace(problem, hint=say("{} Or {}", problem.hint, hint) if problem.hint else hint)
    raise BadInputError.from_problems([problem])


def new_set(options: AccumulateOptions) -> NewSet:
    """Return the set that will hold the sum alone: one file or, in a folder, shards."""
    like = None if options.shard_like is None else open_sets([options.shard_like])[0]
    is_sharded = like is None and options.output_dir is not None
    shard_bytes = int(options.max_shard_size or _SHARD_BYTES) if is_sharded else None
    return NewSet(Path(options.output or options.output_dir or ""), options.dtype, like, shard_bytes)


class Buffer(NamedTuple):
    """The tensors that gradients are added to: of a set that exists, or of new files (`layouts`, `indexes`).

    New files also get the `others`, by name: tensors of gradients that are only copied.
    """

    targets: Sequence[Selected]
    existing: GradientSet | None = None
    layouts: Sequence[Layout] = ()
    indexes: Sequence[SmallFile] | None = None
    others: Mapping[str, Selected] = MappingProxyType({})

    @classmethod
    def create(cls, created: NewSet, opened: OpenSets) -> Self:
        """Lay out a new set with the tensors of gradients, and metadata of the first gradient.

        Raises:
            BadInputError: a tensor is of an integer type in a gradient, and of another type in another gradient.
        """
        others = {entry.tensor.name: entry for entry in reversed(opened.others)}
        for shard, tensor in opened.selected:
            if tensor.name in others:
                first = others[tensor.name]
                message = f"has type {tensor.dtype}, but {first.tensor.dtype} in {first.file.name}"
                raise BadInputError(message, file=shard.name, tensor=tensor.name, code="dtype")
        metadata = opened.sets[0].shards[0].metadata
        # Readers ask for the framework that wrote a file; all else in the metadata is about that gradient alone.
        framework = {key: metadata[key] for key in ("format",) if key in metadata}
        files = created.files(opened.in_file_order)
        index = created.index_over(files)
        indexes = [] if index is None else [SmallFile(index[0], None, index[1])]
        return cls._of([lay_out(path, tensors, framework) for path, tensors in files.items()], indexes, others)

    @classmethod
    def _of(
        cls, layouts: Sequence[Layout], indexes: Sequence[SmallFile] | None, others: Mapping[str, Selected]
    ) -> Self:
        tensors = [Selected(layout.shard, tensor) for layout in layouts for tensor in layout.shard.tensors]
        return cls([each for each in tensors if each.tensor.name not in others], None, layouts, indexes, others)

    def with_metadata(self, entries: Mapping[str, str]) -> Self:
        """Return the same set with more metadata, and spare bytes for numbers that grow."""
        shards = [layout.shard for layout in self.layouts]
        layouts = [lay_out(shard.name, shard.tensors, {**shard.metadata, **entries}, spare=SPARE) for shard in shards]
        return self._of(layouts, self.indexes, self.others)

    def measure_without(self, call: Call, numbers: Collection[int], spec: NormSpec) -> Measurement:
        """Measure all targets but those with the given numbers, which still have to be filled in."""
        unchanged = sorted(set(range(len(self.targets))) - set(numbers))
        targets = [self.targets[number] for number in unchanged]
        part = Measurement(targets, spec)
        if targets and self.existing is not None:
            part = call.run(Measure(targets, spec))
        elif targets:
            part.zeros = array("q", (target.tensor.elements for target in targets))
        return Measurement(self.targets, spec).updated(unchanged, part)

    def files(self, output: Output, changed: Sequence[Selected], metadata: Metadata | None = None) -> list[NewFile]:
        """Return the files to write: all of a new set, or those in which tensors or metadata change."""
        if self.existing is None:
            files = []
            for header, shard in self.layouts:
                others = [(self.others[name], begin) for name, _, _, begin, _ in shard.tensors if name in self.others]
                files.append(NewFile(shard, shard.size, header, copies=(), others=others))
            return files
        # Where the output is elsewhere, these are all files.
        files = output.files(changed, metadata)
        return [file if file.changes else file._replace(copies=[(0, file.size, 0)]) for file in files]


@dataclass(frozen=True, eq=False, repr=False)
class Add(Pass[Tallies[Any]]):
    """A pass that adds gradients to targets: the selected tensors of the buffer, which gradients have by number.

    With `trim`, their trimmed mean is added, not their sum. With `divisors`, each target has its own, in place of that
    of the mode. With `fills`, gradients are 0 where they lack a target. The buffer `is_new` if it is only being
    created. With `measures_before`, the pass also measures what the buffer held.
    """

    title: ClassVar = "adding"
    by_tensor = ("divisors",)

    gradients: Sequence[Operand]
    mode: AddMode
    trim: Trim | None = None
    divisors: Sequence[float] = ()
    fills: bool = False
    is_new: bool = False
    measures_before: bool = False

    @property
    def beside(self) -> Sequence[Selected]:
        return [selected for gradient in self.gradients for selected in gradient.tensors.values()]

    @property
    def reads_selected(self) -> bool:
        return not self.is_new

    def tally(self) -> Tallies[Any]:
        return Tallies([Measurement(self.selected, self.spec) for _ in range(1 + self.measures_before)])

    def nbytes(self, destination: WrittenFiles) -> int:
        gradients = sum(selected.tensor.nbytes for selected in self.beside)
        return gradients + destination.nbytes(self.selected if self.mode.include_buffer else ())

    def block_bytes(self, backend: Backend, destination: Destination) -> int:  # noqa: ARG002 - any has it
        """Return a size whose float64 sums stay in a core's cache."""
        itemsizes = {STORAGE[target.tensor.dtype].itemsize for target in self.selected}
        tiles = tuning.SUM_TILES * _times_larger(backend)
        return TILE * max([tiles * min(itemsizes), *itemsizes]) if itemsizes else TILE

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[Block]:
        blocks = super().tasks(backend, destination)
        return chain.from_iterable(cut_where(block, self.divisors) for block in blocks) if self.divisors else blocks

    def restricted_to(self, selected: Sequence[Selected], places: Sequence[tuple[int, int]]) -> Self:
        numbers = [number for number, _ in places]
        gradients = [gradient.restricted_to(numbers) for gradient in self.gradients]
        return replace(super().restricted_to(selected, places), gradients=gradients)

    def work(self, block: Block, worker: Worker, tally: Tallies[Any]) -> None:
        backend, pieces = worker.backend, pieces_of(block)
        covered = sum(piece.elements * STORAGE[piece.dtype].itemsize for piece in pieces) == block.end - block.begin
        reads = not self.is_new and (self.mode.include_buffer or not covered)
        with worker.load(block) if reads else worker.make(block, zeros=not covered) as loaded:
            if pieces:
                before = [backend.tile_sums(loaded.data, pieces, self.spec)] if self.measures_before else []
                addends = self.addends(block, worker)
                after = backend.accumulate(loaded.data, pieces, addends, self.mode_of(block), self.spec)
                for measurement, sums in zip(tally.each, [after, *before], strict=True):
                    measurement.add(block, sums)
            worker.store(loaded)

    def mode_of(self, block: Block) -> AddMode:
        """Return the mode for the targets of a block, with their divisor."""
        return self.mode._replace(divisor=self.divisors[block.spans[0].tensor]) if self.divisors else self.mode

    def addends(self, block: Block, worker: Worker) -> Iterator[tuple[memoryview, list[Addend]]]:
        """Read the addends of a block, a batch at a time."""
        if self.trim is not None:
            return self._trimmed_means(self.trim, block, worker)
        batch = tuning.BATCH_BYTES * _times_larger(worker.backend)
        return read(self.gradients, self.selected, block, worker, batch, fills=self.fills)

    def _trimmed_means(self, trim: Trim, block: Block, worker: Worker) -> Iterator[tuple[memoryview, list[Addend]]]:
        """Yield the trimmed means for a block, as float64 addends of weight 1, a window of all gradients at a time.

        The more gradients there are, the fewer elements are in a window, so that memory does not grow.
        """
        size = _times_larger(worker.backend) * tuning.WINDOW_BYTES // (8 * len(self.gradients))
        at = 0
        for window, elements in _windows(block, max(_MIN_WINDOW, size)):
            # All gradients in a single batch.
            for source, addends in read(self.gradients, self.selected, window, worker, sys.maxsize, fills=self.fills):
                means = worker.backend.trimmed_means(source, addends, trim, elements)
                yield means.data.cast("B"), [Addend("F64", 0, elements, at, 1.0)]
            at += elements


@dataclass(frozen=True, eq=False, repr=False)
class CompareGradients(Add):
    """A pass that compares gradients with their reduction. They have no factors then, but are divided by `unscales`."""

    title: ClassVar = "comparing"

    unscales: Sequence[float] = ()

    def tally(self) -> Tallies[Comparison]:
        return Tallies([Comparison(self.selected) for _ in self.gradients])

    def nbytes(self, destination: WrittenFiles) -> int:  # noqa: ARG002 - nothing is written
        """Count the bytes of the gradients, which are read twice."""
        return 2 * sum(selected.tensor.nbytes for selected in self.beside)

    def work(self, block: Block, worker: Worker, tally: Tallies[Any]) -> None:
        backend, wide, elements = worker.backend, [], 0
        for span in block.spans:
            wide.append(Piece("F64", 8 * elements, span.elements))
            elements += span.elements
        if not elements:
            return
        with worker.memory(8 * elements) as result_memory, worker.memory(8 * elements) as gradient_memory:
            result, alone = (backend.to_device(view, copies=False) for view in (result_memory, gradient_memory))
            mode = AddMode(buffer_weight=0, divisor=self.mode_of(block).divisor)
            backend.accumulate(result, wide, self.addends(block, worker), mode, _UNMEASURED)
            differences = []
            for gradient, unscale in zip(self.gradients, self.unscales, strict=True):
                stored = read([Operand(gradient.tensors)], self.selected, block, worker, sys.maxsize)
                backend.accumulate(alone, wide, stored, AddMode(buffer_weight=0, divisor=unscale), _UNMEASURED)
                differences.append(backend.differences(alone, wide, result, wide, [Tolerance()] * len(wide)))
        # Nothing is added before all is known, because a device that has no room gets the block in halves.
        for comparison, difference in zip(tally.each, differences, strict=True):
            comparison.add(block, difference)


def _times_larger(backend: Backend) -> int:
    """Return how many times larger blocks should be than on the CPU."""
    return backend.block_bytes // tuning.BLOCK_BYTES


def _windows(block: Block, size: int) -> Iterator[tuple[Block, int]]:
    """Yield the spans of a block in parts of at most `size` elements, with the number of elements."""
    spans, elements = [], 0
    for span in block.spans:
        offset = 0
        while offset < span.elements:
            count = min(span.elements - offset, size - elements)
            # The offset in the block is wrong then, but nothing uses it.
            spans.append(span._replace(start=span.start + offset, elements=count))
            offset, elements = offset + count, elements + count
            if elements == size:
                yield block._replace(spans=spans), elements
                spans, elements = [], 0
    if spans:
        yield block._replace(spans=spans), elements
