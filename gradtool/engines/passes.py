"""Passes and tallies: the work on tensors, block by block, and the statistics that it collects.

A pass is a value: it can be pickled, and its parts can run in any process. A tally has columns, which say how the
values of parts of a tensor are merged. Locking, merging and what processes send each other are written once, here: a
new statistic is a new column.
"""

from __future__ import annotations

import threading
from array import array
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, pairwise
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from gradtool import tuning
from gradtool.engines.worker import reads_files
from gradtool.reduction import TILE
from gradtool.store.format.gradset import Selected
from gradtool.store.format.tensors import BITS, Tensor
from gradtool.store.io.blocks import Block, halved
from gradtool.store.io.destination import DISCARD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gradtool.backends.protocol import Backend
    from gradtool.backends.values import Column, NormSpec
    from gradtool.engines.worker import Worker
    from gradtool.reduction import TileSums
    from gradtool.store.format.tensors import Shard
    from gradtool.store.io.blocks import Span
    from gradtool.store.io.destination import Destination, TensorsByShard, WrittenFiles

    # For parts of tensors: the number of the whole tensor, and the element that the part begins at.
    Places = Sequence[tuple[int, int]]

AnyTally = TypeVar("AnyTally", bound="Tally")
# What a pass collects.
Result = TypeVar("Result")


class Tally:
    """Statistics of tensors, filled block by block from any thread. A column is an attribute: an array."""

    def __init__(self, columns: Mapping[str, Column], sums: Sequence[TileSums], widths: Sequence[int]) -> None:
        """Begin with nothing: empty sums of tiles and, for each tensor, so many bins."""
        self.columns, self.tile_sums = columns, sums
        self._bounds = [0, *accumulate(widths)]
        for name, (typecode, merge, _, _) in columns.items():
            count = self._bounds[-1] if merge == "bins" else len(widths)
            setattr(self, name, array(typecode, [-1 if merge == "first" else 0]) * count)
        self._lock = threading.Lock()

    @property
    def sent_names(self) -> tuple[str, ...]:
        """The names of the attributes that a worker sends."""
        return ("tile_sums", *self.columns)

    @property
    def signed_names(self) -> tuple[str, ...]:
        """The names of those that may be negative."""
        return tuple(name for name, column in self.columns.items() if column.signed or column.merge == "first")

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._bounds) - 1

    def merge(self, places: Places, rows: Mapping[str, Any], sums: Iterable[tuple[Any, Any, Any]]) -> None:
        """Merge statistics of parts of tensors: for each column a value a part, and tile sums of the tensors.

        The tile sums are (numbers of their tensors, sums, exponents), for each order.
        """
        with self._lock:
            for tile_sums, more in zip(self.tile_sums, sums, strict=True):
                tile_sums.extend(*more)
            for name, column in self.columns.items():
                values, new = getattr(self, name), rows[name]
                if column.merge == "sum":
                    for (number, _), value in zip(places, new, strict=True):
                        values[number] += value
                elif column.merge == "first":
                    for (number, start), index in zip(places, new, strict=True):
                        if index >= 0 and (values[number] < 0 or start + index < values[number]):
                            values[number] = start + index
                elif column.merge == "bins":
                    self._merge_bins(places, values, new)
                elif column.merge == "max":
                    self._merge_largest(places, values, new, column.place, rows)

    def _merge_largest(
        self, places: Places, values: array[Any], new: Sequence[Any], place: str, rows: Mapping[str, Any]
    ) -> None:
        if not place:
            for (number, _), value in zip(places, new, strict=True):
                values[number] = max(values[number], value)
            return
        indices = getattr(self, place)
        for (number, start), value, index in zip(places, new, rows[place], strict=True):
            at = start + index
            if value > values[number] or (value == values[number] > 0 and at < indices[number]):
                values[number], indices[number] = value, at

    def _merge_bins(self, places: Places, values: array[Any], new: array[Any]) -> None:
        at = 0
        for number, _ in places:
            bins = slice(self._bounds[number], self._bounds[number + 1])
            old, more = values[bins], new[at : at + bins.stop - bins.start]
            values[bins] = array(values.typecode, map(add, old, more)) if any(old) else more
            at += len(old)

    def compact(self) -> Self:
        """Return the same tally with as few tile sums as possible, to be sent."""
        for sums in self.tile_sums:
            sums.condense()
        return self

    def merge_part(self, places: Places, part: Self) -> None:
        """Merge the tally of parts of tensors, which another process may have sent.

        Raises:
            ValueError: it is not about these parts, or no statistic of any.
        """
        if type(part) is not type(self) or self._bounds_of([number for number, _ in places]) != part._bounds:
            raise ValueError("a tally of other tensors")
        if [sums.order for sums in self.tile_sums] != [sums.order for sums in part.tile_sums]:
            raise ValueError("a tally of another norm")
        for name, column in self.columns.items():
            if len(getattr(part, name)) != (part._bounds[-1] if column.merge == "bins" else len(places)):
                raise ValueError("a tally of other tensors")
        for sums in part.tile_sums:
            sums.require_valid(len(places))
        numbers = {position: number for position, (number, _) in enumerate(places)}
        renumbered = [sums.renumbered(numbers) for sums in part.tile_sums]
        self.merge(places, vars(part), [(sums.numbers, sums.sums, sums.exponents) for sums in renumbered])

    def part(self, numbers: Sequence[int]) -> Self:
        """Return a tally of the tensors with the given numbers alone; of a range, without looking at all sums."""
        part = copy(self)
        vars(part).update(_bounds=self._bounds_of(numbers))
        if isinstance(numbers, range):
            part.tile_sums = [sums.between(numbers.start, numbers.stop) for sums in self.tile_sums]
        else:
            positions = {number: position for position, number in enumerate(numbers)}
            part.tile_sums = [sums.renumbered(positions) for sums in self.tile_sums]
        for name, column in self.columns.items():
            values, items = getattr(self, name), iter(numbers)
            if column.merge == "bins":
                items = (at for number in numbers for at in range(self._bounds[number], self._bounds[number + 1]))
            setattr(part, name, array(values.typecode, map(values.__getitem__, items)))
        return part

    def updated(self, numbers: Sequence[int], part: Self) -> Self:
        """Return a copy in which the tensors with the given numbers come from another tally, of just these."""
        widths = [end - begin for begin, end in pairwise(self._bounds)]
        if list(numbers) == list(range(len(widths))):
            return part
        result, unchanged = copy(self), sorted(set(range(len(widths))) - set(numbers))
        Tally.__init__(result, self.columns, [sums.renumbered({}) for sums in self.tile_sums], widths)
        result.merge_part([(number, 0) for number in unchanged], self.part(unchanged))
        result.merge_part([(number, 0) for number in numbers], part)
        return result

    def _bounds_of(self, numbers: Iterable[int]) -> list[int]:
        """Return where the bins of tensors would begin and end in a tally of these."""
        return list(accumulate((self._bounds[number + 1] - self._bounds[number] for number in numbers), initial=0))


class Tallies(NamedTuple, Generic[AnyTally]):
    """Several tallies that one pass fills."""

    each: Sequence[AnyTally]

    def compact(self) -> Self:
        """Return the same tallies with as few tile sums as possible, to be sent."""
        return self._replace(each=[tally.compact() for tally in self.each])

    def merge_part(self, places: Places, part: Self) -> None:
        """Merge the tallies of parts of tensors; `ValueError` if they are not about these."""
        for tally, more in zip(self.each, part.each, strict=True):
            tally.merge_part(places, more)


class Part(NamedTuple):
    """A part of a pass for a worker process: a pass over fewer tensors, and the `places` of these in all tensors.

    It reads the files `reads`, and writes all of the new file for `writes`, unless that is None.
    """

    pass_: Pass[Any]
    places: Places
    reads: Sequence[Shard]
    writes: Shard | None
    nbytes: int


@dataclass(frozen=True, eq=False, repr=False)
class Pass(Generic[Result]):
    """A pass over the blocks of tensors, which it sums as `spec` says; it may read more tensors beside them.

    A subclass says what to collect (`tally`), and what to do with a block (`work`). This class does nothing, so that
    the destination alone writes: headers, copies and zeros.
    """

    # For a progress bar.
    title: ClassVar = "writing"
    # The fields that have a value for each of the tensors, or none at all.
    by_tensor: ClassVar[Sequence[str]] = ()
    # Whether blocks are only read, so that the backend may read them itself.
    reads_only: ClassVar[bool] = False
    # Tensors are cut into blocks and parts at multiples of so many elements; a block has room for so many bytes.
    unit: ClassVar[int] = TILE

    selected: Sequence[Selected]
    spec: NormSpec

    @property
    def beside(self) -> Sequence[Selected]:
        """The tensors that are read beside those selected."""
        return ()

    @property
    def reads_selected(self) -> bool:
        """Whether the files of the tensors are read; not where they are only being created."""
        return True

    def tally(self) -> Result:
        """Begin with nothing. Other processes `compact` a tally to send it, and `merge_part` adds that of a part."""
        return Tally({}, (), [1] * len(self.selected))  # type: ignore[return-value]

    def work(self, task: Any, worker: Worker, tally: Result) -> None:
        """Do a task, on any thread, and add to the tally.

        Until the device is out of memory, it must not have changed or added anything: its `halves` are next.
        """

    def nbytes(self, destination: WrittenFiles) -> int:
        """Count the bytes that are read in all, about."""
        return destination.nbytes([*self.selected, *self.beside])

    def block_bytes(self, backend: Backend, destination: Destination) -> int:
        """Return the size of blocks, which is larger where the backend reads them itself."""
        if self.reads_only:
            shards = {shard for shard, _ in chain(self.selected, self.beside)}
            if reads_files(backend, destination, self.spec, shards):
                return tuning.STREAM_BLOCKS * tuning.BLOCK_BYTES
        return max(backend.block_bytes, self.unit)

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[Any]:
        """Yield the tasks, in any order: the blocks."""
        return destination.blocks(by_shard(self.selected), self.unit, self.block_bytes(backend, destination))

    def halves(self, task: Any) -> Sequence[Any]:
        """Cut a task in two for a device that has no room for it; () if it is too small, or not a block."""
        return halved(task, self.unit) if isinstance(task, Block) else ()

    def parts(self, destination: WrittenFiles) -> Iterator[Part]:
        """Yield a part for each new file; where nothing is written, for a stretch of a file or several small files.

        A pass that reads tensors beside the selected has a part for each file.
        """
        tensors, by_file = by_shard(self.selected), destination.shards or self.beside or not self.reads_selected
        for shard in destination.shards or (tensors if by_file else ()):
            places = [(number, 0) for number, _ in tensors.get(shard, ())]
            pass_ = self.restricted_to([self.selected[number] for number, _ in places], places)
            beside = [*pass_.beside, *(copied for copied, _ in destination.others_of(shard))]
            shards = [*([shard] if self.reads_selected else []), *(selected.shard for selected in beside)]
            nbytes = shard.size + sum(tensor.nbytes for _, tensor in beside)
            yield Part(pass_, places, _files_of(shards), shard if destination.shards else None, nbytes)
        blocks = () if by_file else DISCARD.blocks(tensors, self.unit, tuning.PART_BYTES)
        for batch in _batches(blocks, tuning.PART_BYTES // tuning.SMALL_PARTS):
            places = [(span.tensor, span.start) for block in batch for span in block.spans]
            stretches = [Selected(block.shard, _stretch(block, span)) for block in batch for span in block.spans]
            files, nbytes = _files_of(block.shard for block in batch), sum(block.end - block.begin for block in batch)
            yield Part(self.restricted_to(stretches, places), places, files, None, nbytes)

    def restricted_to(self, selected: Sequence[Selected], places: Places) -> Self:
        """Return the same pass for parts of tensors, whose places name the whole ones."""
        values = {name: getattr(self, name) for name in self.by_tensor}
        fewer: dict[str, Any] = {name: [each[number] for number, _ in places] for name, each in values.items() if each}
        return replace(self, selected=selected, **fewer)


def by_shard(selected: Sequence[Selected]) -> TensorsByShard:
    """Return the tensors of each file, with their numbers."""
    groups = groupby(enumerate(selected), key=lambda entry: entry[1].shard)
    return {shard: [(number, tensor) for number, (_, tensor) in group] for shard, group in groups}


def _batches(blocks: Iterable[Block], nbytes: int) -> Iterator[list[Block]]:
    """Put small blocks together."""
    batch: list[Block] = []
    size = 0
    for block in blocks:
        size += block.end - block.begin
        if batch and (size > nbytes or len(batch) == tuning.PART_FILES):
            yield batch
            batch, size = [], block.end - block.begin
        batch.append(block)
    if batch:
        yield batch


def _files_of(shards: Iterable[Shard]) -> list[Shard]:
    """Return the files that shards are read from, each once."""
    return list(dict.fromkeys(file for shard in dict.fromkeys(shards) for file in shard.files))


def _stretch(block: Block, span: Span) -> Tensor:
    """Return a part of a tensor, as a tensor."""
    begin = block.begin + span.offset
    return Tensor("", span.dtype, (span.elements,), begin, begin + span.elements * BITS[span.dtype] // 8)
