"""Blocks: how the wanted tensors of a file are cut into contiguous stretches of about the same size."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gradtool.store.header import Shard, Tensor

# Large enough that a system call costs nothing beside the bytes it moves, small enough to stay in the cache.
BLOCK_BYTES = 2 << 20
# A hole between two wanted tensors that is cheaper to read than to seek over.
_BRIDGE_BYTES = 128 << 10
# Bounds what one block's bookkeeping takes when tensors are tiny.
_MAX_SPANS = 4096


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

    `wanted` gives tensors with the number they shall have in the spans, in the order of their bytes. With `whole` the
    blocks cover every byte of the file, for a copy of it. A block has at most `nbytes`, which must be room for a unit.
    """
    nbytes = BLOCK_BYTES if nbytes is None else nbytes
    begin = position = 0 if whole else -1
    spans: list[Span] = []
    for number, tensor in wanted:
        elements = tensor.elements
        if not elements:
            continue
        itemsize = tensor.nbytes // elements
        if not whole and (position < 0 or tensor.begin - position > _BRIDGE_BYTES):
            if spans:
                yield Block(shard, begin, position, spans)
            begin, spans = tensor.begin, []
        start = 0
        while start < elements:
            at = tensor.begin + start * itemsize
            fitting = _fitting(elements - start, (begin + nbytes - at) // itemsize, unit)
            if fitting and len(spans) < _MAX_SPANS:
                spans.append(Span(number, tensor.dtype, start, fitting, at - begin))
                start += fitting
                continue
            # Full. What lies before the next element is copied, and may itself be longer than a block.
            end = min(at, begin + nbytes)
            yield Block(shard, begin, end, spans)
            begin, spans = end, []
        position = tensor.end
    end = shard.size if whole else position
    while begin < end:
        cut = min(end, begin + nbytes)
        yield Block(shard, begin, cut, spans)
        begin, spans = cut, []


def _fitting(elements: int, room: int, unit: int) -> int:
    """How many of the remaining elements go into the room left: all, or a multiple of `unit`."""
    return elements if elements <= room else max(room, 0) // unit * unit
