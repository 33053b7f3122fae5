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
    from collections.abc import Iterator, Sequence

    from gradtool.store.source import Source

    Shape = tuple[int, ...]

# The bits of an element of each dtype.
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


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

    def ranges(self, tensor: Tensor) -> Iterator[tuple[Shard, int, int]]:
        """Yield the file, the first byte and the end of each part of a tensor."""
        yield self, tensor.begin, tensor.end

    def runs(self, begin: int, nbytes: int) -> Iterator[tuple[Shard, int, slice]]:
        """Yield where bytes from `begin` on lie: a file, the first byte there, and which of the bytes it has."""
        yield self, begin, slice(nbytes)

    @property
    def size(self) -> int:
        """Its bytes, with those of the header."""
        return self.source.size


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

    def ranges(self, tensor: Tensor) -> Iterator[tuple[Shard, int, int]]:
        """Yield the file, the first byte and the end of each part of a tensor."""
        for shard, begin, _, shape in self.extents[self._number_at(tensor.begin)] if tensor.nbytes else ():
            yield shard, begin, begin + math.prod(shape) * BITS[tensor.dtype] // 8

    def runs(self, begin: int, nbytes: int) -> Iterator[tuple[Shard, int, slice]]:
        """Yield where bytes from `begin` on lie: a file, the first byte there, and which of the bytes it has."""
        end, left = begin + nbytes, nbytes
        for number in range(self._number_at(begin), len(self.tensors)):
            tensor = self.tensors[number]
            if tensor.begin >= end:
                break
            size = BITS[tensor.dtype] // 8
            first, stop = ((at - tensor.begin) // size for at in (max(begin, tensor.begin), min(end, tensor.end)))
            for shard, at, start, shape in self.extents[number]:
                # One more axis in front, so that a scalar has an axis, too.
                for place, inner, count in _overlaps((1, *tensor.shape), (0, *start), (1, *shape), first, stop):
                    low = tensor.begin + place * size - begin
                    yield shard, at + inner * size, slice(low, low + count * size)
                    left -= count * size
        if left:
            raise AssertionError("the extents of a tensor must have every element once")

    def _number_at(self, begin: int) -> int:
        """Return the number of the first tensor that ends behind a byte."""
        return bisect_right(self.tensors, begin, key=attrgetter("end"))


def _overlaps(whole: Shape, start: Shape, shape: Shape, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of elements that a box and elements `first` to `stop` of a tensor have in common.

    A run is its first element, counted in the tensor and then in the box, and how many elements it has.
    """
    if 0 in shape:
        return
    row, box_row, low, high = math.prod(whole[1:]), math.prod(shape[1:]), start[0], start[0] + shape[0]
    if row == box_row:
        at, end = max(first, low * row), min(stop, high * row)
        if at < end:
            yield at, at - low * row, end - at
        return
    for n in range(max(low, first // row), min(high, -(-stop // row))):
        for at, inner, count in _overlaps(whole[1:], start[1:], shape[1:], first - n * row, stop - n * row):
            yield n * row + at, (n - low) * box_row + inner, count
