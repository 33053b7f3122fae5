"""The parts of other gradient sets that belong to a block, broadcast by numpy's rules, read a batch at a time."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool import tuning
from gradtool.arrays import np
from gradtool.backends.storage import STORAGE
from gradtool.backends.values import Addend

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.tensors import Shard
    from gradtool.store.io.blocks import Block, Span
    from gradtool.store.io.channel import Channel


# The type of zeros that no file holds: it takes least room.
_ZEROS = "F8_E4M3"


class Operand(NamedTuple):
    """A gradient set: its tensors by the number of the target that they belong to, and what they are multiplied by."""

    tensors: Mapping[int, Selected]
    factor: float = 1.0

    def restricted_to(self, numbers: Iterable[int]) -> Operand:
        """Return what belongs to these targets, which are then numbered in this order."""
        return self._replace(tensors={at: self.tensors[n] for at, n in enumerate(numbers) if n in self.tensors})


class _Part(NamedTuple):
    """The tensor of an operand for a span, whose first sum is number `at`; zeros if nothing is selected."""

    span: Span
    at: int
    selected: Selected | None
    dtype: str
    factor: float
    nbytes: int


def read(
    operands: Iterable[Operand],
    targets: Sequence[Selected],
    block: Block,
    channel: Channel,
    nbytes: int,
    *,
    fills: bool = False,
) -> Iterator[tuple[memoryview, list[Addend]]]:
    """Read what the operands have for a block, in order, in batches of about `nbytes`, each valid until the next.

    With `fills`, an operand has zeros where it has nothing.
    """
    for parts, size in _batches(operands, block, nbytes, fills=fills):
        with channel.memory(size) as view:
            yield view, _load(parts, view, targets, channel)


@contextlib.contextmanager
def read_beside(
    tensors: Mapping[int, Selected], targets: Sequence[Selected], block: Block, channel: Channel
) -> Iterator[tuple[memoryview, list[Addend]]]:
    """Read what the tensors have for a block, which has some of their targets."""
    # A single operand comes in a single batch.
    yield from read([Operand(tensors)], targets, block, channel, 0)


def _batches(
    operands: Iterable[Operand], block: Block, nbytes: int, *, fills: bool
) -> Iterator[tuple[list[_Part], int]]:
    """Put the parts of operands together, with their bytes."""
    batch: list[_Part] = []
    size = 0
    for operand in operands:
        parts, at = [], 0
        for span in block.spans:
            selected = operand.tensors.get(span.tensor)
            if selected is not None or fills:
                dtype, factor = (selected.tensor.dtype, operand.factor) if selected else (_ZEROS, 1.0)
                parts.append(_Part(span, at, selected, dtype, factor, span.elements * STORAGE[dtype].itemsize))
            at += span.elements
        more = sum(part.nbytes for part in parts)
        if batch and size + more > nbytes:
            yield batch, size
            batch, size = [], 0
        batch += parts
        size += more
    if batch:
        yield batch, size


def _load(parts: Sequence[_Part], view: memoryview, targets: Sequence[Selected], channel: Channel) -> list[Addend]:
    """Read parts into memory, one after another, and return where each is."""
    addends, offset = [], 0
    # Where bytes are, and where they go. Neighbours in the block are mostly neighbours there, and read in one go.
    ranges: list[tuple[Shard, int, int, int]] = []
    for span, at, selected, dtype, factor, nbytes in parts:
        target = targets[span.tensor].tensor
        addends.append(Addend(dtype, offset, span.elements, at, factor))
        if selected is None:
            view[offset : offset + nbytes] = bytes(nbytes)
        elif selected.tensor.elements != target.elements:
            read_broadcast(selected, target.shape, span, view[offset:], channel)
        else:
            begin = selected.tensor.begin + span.start * (nbytes // span.elements)
            shard, first, end, to = ranges[-1] if ranges else (None, 0, 0, 0)
            if shard is selected.shard and end == begin and to + end - first == offset:
                ranges[-1] = (selected.shard, first, end + nbytes, to)
            else:
                ranges.append((selected.shard, begin, begin + nbytes, offset))
        offset += nbytes
    for shard, begin, end, to in ranges:
        channel.read(shard, begin, view[to : to + end - begin])
    # Side by side what is added to the same sums, still in the order given: the kernels then pass over the sums once.
    return sorted(addends, key=lambda addend: addend.at)


def is_broadcastable(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Check whether a tensor broadcasts to the shape of a target."""
    if len(shape) > len(target):
        return False
    return all(size in (1, wide) for size, wide in zip(reversed(shape), reversed(target), strict=False))


def positions(shape: tuple[int, ...], target: tuple[int, ...], start: int, stop: int) -> NDArray[np.int64]:
    """Return which elements of a tensor those from `start` to `stop` of its broadcast to a target are."""
    left = np.arange(start, stop, dtype=np.int64)
    indices = np.zeros_like(left)
    stride = 1
    for size, wide in zip(reversed(shape), reversed(target), strict=False):
        if size != 1:
            indices += left % wide * stride
            stride *= size
        left //= wide
    return indices


def read_broadcast(selected: Selected, target: tuple[int, ...], span: Span, view: memoryview, channel: Channel) -> None:
    """Read the broadcast elements of a span, as they are stored, into the beginning of `view`."""
    bits = STORAGE[selected.tensor.dtype].bits
    codes: NDArray[Any] = np.frombuffer(view, bits, span.elements)
    begin, end = span.start, span.start + span.elements
    while begin < end:
        stop = end
        indices = positions(selected.tensor.shape, target, begin, stop)
        # A run that wraps round needs both ends of the smaller tensor; half of it, and half again, will not.
        while (low := int(indices.min())) + max(tuning.WINDOW_ELEMENTS, stop - begin) <= int(indices.max()):
            stop = begin + (stop - begin) // 2
            indices = indices[: stop - begin]
        with channel.memory((int(indices.max()) + 1 - low) * bits.itemsize) as window:
            channel.read(selected.shard, selected.tensor.begin + low * bits.itemsize, window)
            codes[begin - span.start : stop - span.start] = np.frombuffer(window, bits)[indices - low]
        begin = stop
