"""Broadcasting by numpy's rules, of which only the part that a block needs is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradtool import tuning
from gradtool.arrays import np
from gradtool.backends.storage import STORAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Span
    from gradtool.store.io.channel import Channel


def is_broadcastable(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor of shape `own` broadcasts to `shape`."""
    if len(own) > len(shape):
        return False
    return all(one in (1, size) for one, size in zip(reversed(own), reversed(shape), strict=False))


def positions(own: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> NDArray[np.int64]:
    """Which elements of a tensor of shape `own` those from `start` to `stop` of its broadcast to `shape` are."""
    left = np.arange(start, stop, dtype=np.int64)
    found = np.zeros_like(left)
    stride = 1
    for one, size in zip(reversed(own), reversed(shape), strict=False):
        if one != 1:
            found += left % size * stride
            stride *= one
        left //= size
    return found


def spread(one: Selected, shape: tuple[int, ...], span: Span, target: memoryview, channel: Channel) -> None:
    """Put the broadcast elements of a span, as they are stored, at the beginning of `target`."""
    bits = STORAGE[one.tensor.dtype].bits
    codes: NDArray[Any] = np.frombuffer(target, bits, span.elements)
    begin = span.start
    end = span.start + span.elements
    while begin < end:
        stop = end
        found = positions(one.tensor.shape, shape, begin, stop)
        # A run that wraps round needs both ends of the smaller tensor; half of it, and half again, will not.
        while (low := int(found.min())) + max(tuning.WINDOW_ELEMENTS, stop - begin) <= int(found.max()):
            stop = begin + (stop - begin) // 2
            found = found[: stop - begin]
        with channel.memory((int(found.max()) + 1 - low) * bits.itemsize) as view:
            channel.read(one.shard, one.tensor.begin + low * bits.itemsize, view)
            codes[begin - span.start : stop - span.start] = np.frombuffer(view, bits)[found - low]
        begin = stop
