"""Blocks: the tensors of a file that a pass works on, cut into contiguous ranges of about the same size."""

from __future__ import annotations

from itertools import groupby, pairwise, takewhile
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, NamedTuple

from gradtool import tuning
from gradtool.store.format.tensors import BITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gradtool.store.format.tensors import Shard, Tensor

# A gap between two tensors that is cheaper to read than to skip.
BRIDGE_BYTES = 128 << 10


class Span(NamedTuple):
    """A part of a tensor in a block: `elements` from element `start` on, at byte `offset` of the block."""

    tensor: int
    dtype: str
    start: int
    elements: int
    offset: int


class Block(NamedTuple):
    """Bytes `begin` to `end` of a file, and the spans of tensors in them; other bytes are only copied."""

    shard: Shard
    begin: int
    end: int
    spans: Sequence[Span]


def plan(
    shard: Shard, tensors: Iterable[tuple[int, Tensor]], unit: int, nbytes: int, *, whole: bool = False, start: int = 0
) -> Iterator[Block]:
    """Cut tensors of a file into blocks, each tensor only at multiples of `unit` elements.

    The tensors are in file order, each with its number for the spans. With `whole`, blocks without spans cover all
    other bytes from byte `start` on, for a copy of the file. No block covers a tensor of number -1, which is a piece of
    a split tensor and belongs to another block. A block has at most `nbytes`, which must have room for a unit.
    """
    begin = position = start
    spans: list[Span] = []
    for number, tensor in tensors:
        elements = tensor.elements
        if not elements:
            continue
        itemsize = tensor.nbytes // elements
        is_piece = number < 0
        if position == start or is_piece or tensor.begin - position > BRIDGE_BYTES:
            yield from _cut(shard, begin, position, spans, nbytes)
            if whole:
                yield from _cut(shard, position, tensor.begin, [], nbytes)
            begin, spans = tensor.end if is_piece else tensor.begin, []
        done = elements if is_piece else 0
        while done < elements:
            at = tensor.begin + done * itemsize
            left, room = elements - done, (begin + nbytes - at) // itemsize
            fitting = left if left <= room else max(room, 0) // unit * unit
            if fitting and len(spans) < tuning.BLOCK_SPANS:
                spans.append(Span(number, tensor.dtype, done, fitting, at - begin))
                done += fitting
                continue
            # The block is full. The bytes before the next element may themselves be more than a block.
            end = min(at, begin + nbytes)
            if spans or whole:
                yield Block(shard, begin, end, spans)
            begin, spans = end, []
        position = tensor.end
    yield from _cut(shard, begin, position, spans, nbytes)
    if whole:
        yield from _cut(shard, position, shard.size, [], nbytes)


def _cut(shard: Shard, begin: int, end: int, spans: Sequence[Span], nbytes: int) -> Iterator[Block]:
    """Yield blocks for a range of a file; the spans are all in the first."""
    while begin < end:
        cut = min(end, begin + nbytes)
        yield Block(shard, begin, cut, spans)
        begin, spans = cut, []


def block_around(shard: Shard, spans: Sequence[Span]) -> Block:
    """Return the block of spans that follow one another in a file; their offsets are those of the file."""
    begin, last = spans[0].offset, spans[-1]
    end = last.offset + last.elements * BITS[last.dtype] // 8
    return Block(shard, begin, end, [span._replace(offset=span.offset - begin) for span in spans])


def by_file(block: Block, unit: int) -> Iterator[Block]:
    """Yield a block of a split tensor in parts: a range that a file has as it is, as a block of that file."""
    span, shard = block.spans[0], block.shard
    size, begin, done = BITS[span.dtype] // 8, block.begin + span.offset, 0

    def part(first: int, stop: int, file: Shard, at: int) -> Block:
        moved = Span(span.tensor, span.dtype, span.start + first, stop - first, 0)
        return Block(file, at, at + (stop - first) * size, [moved])

    bands = [] if len(block.spans) > 1 else takewhile(attrgetter("is_range"), shard.bands(begin, span.elements * size))
    ranges = [(band.rows[0].at // size, band.nbytes // size, band) for band in bands]
    if sum(elements for _, elements, _ in ranges) < span.elements:
        yield block
        return
    for at, elements, band in sorted(ranges, key=itemgetter(0)):
        # A tile that is in several files is a block of the split tensor.
        first, stop = -(-at // unit) * unit, at + elements
        stop = stop if stop == span.elements else stop // unit * unit
        if first < stop:
            if done < first:
                yield part(done, first, shard, begin + done * size)
            yield part(first, stop, band.shard, band.begin + (first - at) * size)
            done = stop
    if done < span.elements:
        yield part(done, span.elements, shard, begin + done * size)


def covered(block: Block) -> list[tuple[int, int]]:
    """Return the ranges of a block that its spans take; adjacent ranges are merged."""
    ranges: list[tuple[int, int]] = []
    for span in block.spans:
        end = span.offset + span.elements * BITS[span.dtype] // 8
        if ranges and ranges[-1][1] == span.offset:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((span.offset, end))
    return ranges


def cut_where(block: Block, values: Sequence[object]) -> Iterator[Block]:
    """Cut a block wherever the value of a tensor differs from that of the tensor before it."""
    groups = [list(group) for _, group in groupby(block.spans, key=lambda span: values[span.tensor])] or [[]]
    edges = [0, *(group[0].offset for group in groups[1:]), block.end - block.begin]
    for group, (begin, end) in zip(groups, pairwise(edges), strict=True):
        spans = [span._replace(offset=span.offset - begin) for span in group]
        yield Block(block.shard, block.begin + begin, block.begin + end, spans)


def halved(block: Block, unit: int) -> list[Block]:
    """Cut a block in two, between tensors or at a multiple of `unit` elements; return [] if it is too small."""
    count = len(block.spans)
    if count > 1:
        at, left, right = block.spans[count // 2].offset, block.spans[: count // 2], block.spans[count // 2 :]
    elif count and block.spans[0].elements > unit:
        span = block.spans[0]
        half = -(-span.elements // unit) // 2 * unit
        at = span.offset + half * BITS[span.dtype] // 8
        left = [span._replace(elements=half)]
        right = [span._replace(start=span.start + half, elements=span.elements - half, offset=at)]
    else:
        return []
    moved = [span._replace(offset=span.offset - at) for span in right]
    return [block._replace(end=block.begin + at, spans=left), block._replace(begin=block.begin + at, spans=moved)]
