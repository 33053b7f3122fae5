"""Blocks: how the wanted tensors of a file are cut into contiguous stretches of about the same size."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradtool import tuning
from gradtool.store.format.tensors import BITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gradtool.store.format.header import Shard
    from gradtool.store.format.tensors import Tensor

# A hole between two wanted tensors that is cheaper to read than to seek over.
_BRIDGE_BYTES = 128 << 10


class Span(NamedTuple):
    """A part of a tensor in a block: `elements` from element `start` on, at byte `offset` of the block."""

    tensor: int
    dtype: str
    start: int
    elements: int
    offset: int


class Block(NamedTuple):
    """Bytes `begin` to `end` of a file, and the wanted tensors in them; bytes of no span are only copied."""

    shard: Shard
    begin: int
    end: int
    spans: Sequence[Span]


def plan(
    shard: Shard, wanted: Iterable[tuple[int, Tensor]], unit: int, *, whole: bool = False, nbytes: int | None = None
) -> Iterator[Block]:
    """Cut the wanted tensors of a file into blocks, each tensor only at multiples of `unit` elements.

    `wanted` gives tensors with the number they shall have in the spans, in the order of their bytes. With `whole` there
    are blocks without spans for all other bytes of the file, for a copy of it. A block has at most `nbytes`, which must
    be room for a unit.
    """
    nbytes = tuning.BLOCK_BYTES if nbytes is None else nbytes
    begin = position = 0
    spans: list[Span] = []
    for number, tensor in wanted:
        elements = tensor.elements
        if not elements:
            continue
        itemsize = tensor.nbytes // elements
        if not position or tensor.begin - position > _BRIDGE_BYTES:
            yield from _cut(shard, begin, position, spans, nbytes)
            if whole:
                yield from _cut(shard, position, tensor.begin, [], nbytes)
            begin, spans = tensor.begin, []
        start = 0
        while start < elements:
            at = tensor.begin + start * itemsize
            fitting = _fitting(elements - start, (begin + nbytes - at) // itemsize, unit)
            if fitting and len(spans) < tuning.BLOCK_SPANS:
                spans.append(Span(number, tensor.dtype, start, fitting, at - begin))
                start += fitting
                continue
            # Full. What lies before the next element is copied, and may itself be longer than a block.
            end = min(at, begin + nbytes)
            if spans or whole:
                yield Block(shard, begin, end, spans)
            begin, spans = end, []
        position = tensor.end
    yield from _cut(shard, begin, position, spans, nbytes)
    if whole:
        yield from _cut(shard, position, shard.size, [], nbytes)


def _cut(shard: Shard, begin: int, end: int, spans: Sequence[Span], nbytes: int) -> Iterator[Block]:
    """Blocks for bytes of a file; the spans are all in the first."""
    while begin < end:
        cut = min(end, begin + nbytes)
        yield Block(shard, begin, cut, spans)
        begin, spans = cut, []


def covered(block: Block) -> list[tuple[int, int]]:
    """The ranges of a block that wanted tensors lie in, as few as there can be."""
    ranges: list[tuple[int, int]] = []
    for span in block.spans:
        end = span.offset + span.elements * BITS[span.dtype] // 8
        if ranges and ranges[-1][1] == span.offset:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((span.offset, end))
    return ranges


def halved(block: Block, unit: int) -> list[Block]:
    """Two blocks that make up the one, cut between tensors or at a multiple of `unit` elements; [] if it cannot be."""
    count = len(block.spans)
    if count > 1:
        at, left, right = block.spans[count // 2].offset, block.spans[: count // 2], block.spans[count // 2 :]
    elif count and block.spans[0].elements > unit:
        span = block.spans[0]
        kept = -(-span.elements // unit) // 2 * unit
        at = span.offset + kept * BITS[span.dtype] // 8
        left = [span._replace(elements=kept)]
        right = [span._replace(start=span.start + kept, elements=span.elements - kept, offset=at)]
    else:
        return []
    moved = [span._replace(offset=span.offset - at) for span in right]
    return [block._replace(end=block.begin + at, spans=left), block._replace(begin=block.begin + at, spans=moved)]


def _fitting(elements: int, room: int, unit: int) -> int:
    """How many of the remaining elements go into the room left: all, or a multiple of `unit`."""
    return elements if elements <= room else max(room, 0) // unit * unit
