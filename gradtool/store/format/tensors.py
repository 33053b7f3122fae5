"""Tensors and the files that hold them: a tensor lies in one shard or, cut over several files, in extents."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gradtool.store.source import Source

    Shape = tuple[int, ...]

# The bits of an element of each dtype.
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# Counters and masks: a sum of them means nothing.
INTEGERS = ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64")


class Tensor(NamedTuple):
    """A tensor of a file; `begin` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return self.end - self.begin

    @property
    def elements(self) -> int:
        """The product of its shape; 1 for rank 0."""
        return math.prod(self.shape)

    def index_of(self, element: int) -> list[int]:
        """Return the index of an element, one number for each axis, given its number in C order."""
        index: list[int] = []
        for size in reversed(self.shape):
            element, place = divmod(element, size)
            index.insert(0, place)
        return index


@dataclass(frozen=True, eq=False, repr=False)
class Shard:
    """A file of a gradient set: a header over a source; `tensors` are in the order of their bytes."""

    source: Source
    data_start: int
    metadata: dict[str, str]
    tensors: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        """Its path as the user named it, for messages."""
        return self.source.name

    @property
    def file_name(self) -> str:
        """Its name in its folder."""
        return os.path.basename(self.source.name)  # noqa: PTH119 - no path of this system, perhaps

    @property
    def files(self) -> Sequence[Shard]:
        """The files to read it from: itself."""
        return (self,)

    def first_file(self, tensor: Tensor) -> Shard:  # noqa: ARG002 - all are in the same file
        """Return the file that has a tensor, or its first piece."""
        return self

    def pieces(self, tensor: Tensor) -> Sequence[Extent]:  # noqa: ARG002 - it has none
        """Return the extents of a tensor, if there are several."""
        return ()

    def ranges(self, tensor: Tensor) -> Iterator[tuple[Shard, int, int]]:
        """Yield the file, the first byte and the end of each part of a tensor."""
        yield self, tensor.begin, tensor.end

    def bands(self, begin: int, nbytes: int) -> Iterator[Band]:
        """Yield where bytes from `begin` on lie."""
        yield Band(self, begin, nbytes, (Rows(0, nbytes),))

    @property
    def size(self) -> int:
        """Its bytes, with those of the header."""
        return self.source.size


class Rows(NamedTuple):
    """So many rows of `nbytes` each, `stride` bytes from one to the next; the first is at byte `at`."""

    at: int
    nbytes: int
    times: int = 1
    stride: int = 0


class Band(NamedTuple):
    """Bytes of a file, from `begin` on, which are the rows of a block one after another."""

    shard: Shard
    begin: int
    nbytes: int
    rows: Sequence[Rows]

    @property
    def is_range(self) -> bool:
        """Whether the rows are one, a range of the block."""
        return self.nbytes == self.rows[0].nbytes


class Extent(NamedTuple):
    """A box of a tensor, in C order from byte `begin` of a file on: its first index and its size along each axis."""

    shard: Shard
    begin: int
    start: Shape
    shape: Shape


@dataclass(frozen=True, eq=False, repr=False)
class SplitShard(Shard):
    """Whole tensors, one after another from byte 0 on, each with extents that have every element once.

    It is no file: its bytes are read from the files of the extents, and written to them. Its blocks and tiles are those
    of whole tensors, so that no cut changes a bit.
    """

    extents: Sequence[Sequence[Extent]] = ()

    @cached_property
    def files(self) -> Sequence[Shard]:
        """The files of all extents."""
        return list(dict.fromkeys(extent.shard for extents in self.extents for extent in extents))

    def first_file(self, tensor: Tensor) -> Shard:
        """Return the file that has the first piece of a tensor."""
        return self.pieces(tensor)[0].shard

    def pieces(self, tensor: Tensor) -> Sequence[Extent]:
        """Return the extents of a tensor."""
        return self._extents_of[tensor]

    @cached_property
    def _extents_of(self) -> Mapping[Tensor, Sequence[Extent]]:
        return dict(zip(self.tensors, self.extents, strict=True))

    def ranges(self, tensor: Tensor) -> Iterator[tuple[Shard, int, int]]:
        """Yield the file, the first byte and the end of each part of a tensor."""
        for shard, begin, _, shape in self.extents[self._number_at(tensor.begin)] if tensor.nbytes else ():
            yield shard, begin, begin + math.prod(shape) * BITS[tensor.dtype] // 8

    def bands(self, begin: int, nbytes: int) -> Iterator[Band]:
        """Yield where bytes from `begin` on lie: a band of each piece of the tensors there."""
        end, left = begin + nbytes, nbytes
        for number in range(self._number_at(begin), len(self.tensors)):
            tensor = self.tensors[number]
            if tensor.begin >= end:
                break
            first, stop = max(begin, tensor.begin) - tensor.begin, min(end, tensor.end) - tensor.begin
            for shard, at, box in self._boxes[number]:
                rows = list(_overlaps(*box, first, stop))
                if rows:
                    low = tensor.begin - begin
                    moved = tuple(part._replace(at=low + part.at) for _, part in rows)
                    band = Band(shard, at + rows[0][0], sum(part.nbytes * part.times for part in moved), moved)
                    yield band
                    left -= band.nbytes
        if left:
            raise AssertionError("the extents of a tensor must have every element once")

    @cached_property
    def _boxes(self) -> Sequence[Sequence[tuple[Shard, int, tuple[Shape, Shape, Shape]]]]:
        """The extents of each tensor: the file, the first byte there, and the box in bytes, with few axes."""
        return [
            [(shard, at, _merged(tensor, start, shape)) for shard, at, start, shape in extents if 0 not in shape]
            for tensor, extents in zip(self.tensors, self.extents, strict=True)
        ]

    def _number_at(self, begin: int) -> int:
        """Return the number of the first tensor that ends behind a byte."""
        return bisect_right(self.tensors, begin, key=attrgetter("end"))


def _merged(tensor: Tensor, start: Shape, shape: Shape) -> tuple[Shape, Shape, Shape]:
    """Return a tensor's shape and a box of it in bytes; an axis that the box has whole joins that before it."""
    axes: list[Shape] = [(1, 0, 1)]
    for whole, low, size in zip(tensor.shape, start, shape, strict=True):
        if size == whole:
            axes[-1] = tuple(whole * number for number in axes[-1])
        else:
            axes.append((whole, low, size))
    itemsize = BITS[tensor.dtype] // 8
    axes[-1] = tuple(itemsize * number for number in axes[-1])
    wholes, starts, sizes = zip(*axes, strict=True)
    return wholes, starts, sizes


def _overlaps(whole: Shape, start: Shape, shape: Shape, first: int, stop: int) -> Iterator[tuple[int, Rows]]:
    """Yield what a box and bytes `first` to `stop` of a tensor have in common: rows, and their first byte in the box.

    All of them together are a single range of the box.
    """
    row, box_row, low, high = math.prod(whole[1:]), math.prod(shape[1:]), start[0], start[0] + shape[0]
    if row == box_row:
        at, end = max(first, low * row), min(stop, high * row)
        if at < end:
            yield at - low * row, Rows(at, end - at)
        return
    n, end = max(low, first // row), min(high, -(-stop // row))
    while n < end:
        inner = list(_overlaps(whole[1:], start[1:], shape[1:], first - n * row, stop - n * row))
        # All rows that are complete look like the first of them.
        is_complete = first <= n * row and (n + 1) * row <= stop
        count = min(end, stop // row) - n if is_complete and len(inner) == 1 and inner[0][1].times == 1 else 1
        for begin, rows in inner:
            moved = rows._replace(at=n * row + rows.at)
            yield (n - low) * box_row + begin, moved if count == 1 else moved._replace(times=count, stride=row)
        n += count
