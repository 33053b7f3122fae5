"""The parts of other gradient sets that belong beside a block, read a batch at a time."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gradtool.backends.protocol import Addend
from gradtool.backends.storage import STORAGE
from gradtool.ops.broadcast import spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.header import Shard
    from gradtool.store.io.blocks import Block, Span
    from gradtool.store.io.channel import Channel


# The type that zeros have which no file holds: it takes least room.
_ZEROS = "F8_E4M3"


class Source(Protocol):
    """A gradient set: its tensors by the number of the target that they belong to, and what they are multiplied by."""

    @property
    def tensors(self) -> Mapping[int, Selected]:
        """Not every target needs one."""

    @property
    def factor(self) -> float:
        """The weight of its addends."""


def read(
    sources: Iterable[Source],
    targets: Sequence[Selected],
    block: Block,
    channel: Channel,
    nbytes: int,
    *,
    fills: bool = False,
) -> Iterator[tuple[memoryview, list[Addend]]]:
    """Read what the sources have for a block, in order, in batches of about `nbytes`, each valid until the next.

    With `fills`, a source has zeros where it has nothing.
    """
    for parts, filled in _batches(sources, block, nbytes, fills=fills):
        with channel.memory(filled) as view:
            yield view, _filled(view, parts, targets, channel)


def _batches(sources: Iterable[Source], block: Block, nbytes: int, *, fills: bool) -> Iterator[tuple[list[_Part], int]]:
    """Put the parts of sources together, with their bytes."""
    batch: list[_Part] = []
    filled = 0
    for source in sources:
        parts = _parts(source, block, fills=fills)
        size = sum(part.nbytes for part in parts)
        if batch and filled + size > nbytes:
            yield batch, filled
            batch, filled = [], 0
        batch += parts
        filled += size
    if batch:
        yield batch, filled


class _One(NamedTuple):
    """A source without a weight."""

    tensors: Mapping[int, Selected]
    factor: float = 1.0


@contextlib.contextmanager
def read_one(
    tensors: Mapping[int, Selected], targets: Sequence[Selected], block: Block, channel: Channel
) -> Iterator[tuple[memoryview, list[Addend]]]:
    """Read what the tensors have for a block, which has some of their targets."""
    # One source comes in one batch.
    yield from read([_One(tensors)], targets, block, channel, 0)


class _Part(NamedTuple):
    """What one source has for one span, whose first sum is number `at`; zeros if nothing is selected."""

    span: Span
    at: int
    selected: Selected | None
    factor: float
    nbytes: int


def _parts(source: Source, block: Block, *, fills: bool) -> list[_Part]:
    parts, at = [], 0
    for span in block.spans:
        selected = source.tensors.get(span.tensor)
        if selected is not None:
            nbytes = span.elements * STORAGE[selected.tensor.dtype].itemsize
            parts.append(_Part(span, at, selected, source.factor, nbytes))
        elif fills:
            parts.append(_Part(span, at, None, 1.0, span.elements * STORAGE[_ZEROS].itemsize))
        at += span.elements
    return parts


def _filled(view: memoryview, parts: Sequence[_Part], targets: Sequence[Selected], channel: Channel) -> list[Addend]:
    """Read parts into memory, side by side, and return where each is."""
    addends, runs, offset = [], _Runs(), 0
    for part in parts:
        span, selected, target = part.span, part.selected, targets[part.span.tensor].tensor
        dtype = selected.tensor.dtype if selected else _ZEROS
        addends.append(Addend(dtype, offset, span.elements, part.at, part.factor))
        if selected is None:
            view[offset : offset + part.nbytes] = bytes(part.nbytes)
        elif selected.tensor.elements == target.elements:
            runs.add(selected, span.start * (part.nbytes // span.elements), part.nbytes, offset)
        else:
            spread(selected, target.shape, span, view[offset:], channel)
        offset += part.nbytes
    for shard, begin, end, to in runs:
        channel.read(shard, begin, view[to : to + end - begin])
    # Side by side what is added to the same sums, still in the order given: the kernels then pass over the sums once.
    return sorted(addends, key=lambda addend: addend.at)


class _Runs(list[tuple["Shard", int, int, int]]):
    """Bytes of shards and where they go; neighbours in the buffer are mostly neighbours here, and read in one go."""

    def add(self, selected: Selected, start: int, size: int, to: int) -> None:
        begin = selected.tensor.begin + start
        if self:
            shard, first, end, at = self[-1]
            if shard is selected.shard and end == begin and at + end - first == to:
                self[-1] = (shard, first, end + size, at)
                return
        self.append((selected.shard, begin, begin + size, to))
