"""Tensors that lie in pieces, such as those that each process of a training run has written a part of."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from gradtool.store.format.header import Shard
from gradtool.store.format.tensors import BITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.store.format.tensors import Tensor

    Shape = tuple[int, ...]


class Extent(NamedTuple):
    """A box of a tensor, in C order from byte `begin` of a file on: its first index and its size along each axis."""

    shard: Shard
    begin: int
    start: Shape
    shape: Shape


@dataclass(frozen=True, eq=False, repr=False)
class SplitShard(Shard):
    """Whole tensors, one after another from byte 0 on, each with extents that have every element once.

    It is no file: what is read of it comes from those of the extents, and what is written to it goes there. Its blocks
    and tiles are those of whole tensors, so that no cut changes a bit.
    """

    extents: Sequence[Sequence[Extent]] = ()

    @cached_property
    def files(self) -> Sequence[Shard]:
        """The files of all extents."""
        return list(dict.fromkeys(extent.shard for extents in self.extents for extent in extents))

    def ranges(self, tensor: Tensor) -> Iterator[tuple[Shard, int, int]]:
        """Yield which bytes of which files a tensor takes."""
        for shard, begin, _, shape in self.extents[self._number_at(tensor.begin)] if tensor.nbytes else ():
            yield shard, begin, begin + math.prod(shape) * BITS[tensor.dtype] // 8

    def runs(self, begin: int, nbytes: int) -> Iterator[tuple[Shard, int, slice]]:
        """Yield where bytes from `begin` on lie: in which file, from which byte on, and which of them follow there."""
        end, left = begin + nbytes, nbytes
        for number in range(self._number_at(begin), len(self.tensors)):
            tensor = self.tensors[number]
            if tensor.begin >= end:
                break
            size = BITS[tensor.dtype] // 8
            first, stop = ((at - tensor.begin) // size for at in (max(begin, tensor.begin), min(end, tensor.end)))
            for shard, at, start, shape in self.extents[number]:
                # With an axis more, a scalar has one, too.
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
    """Yield what a box and elements `first` to `stop` of a tensor have in common, as far as it follows in both.

    That is an element of the tensor, the same one counted in the box, and how many follow.
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
