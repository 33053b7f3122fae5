"""Engines run passes over files. What a pass is, and what its tasks are given to work with, is defined here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

from gradtool.errors import DeviceMemoryError
from gradtool.reduction import TILE
from gradtool.store.io.blocks import halved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping

    from gradtool.backends import Backend, Data
    from gradtool.store.format.header import Shard
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.channel import Channel
    from gradtool.store.transaction.destination import Destination


class Partial(Protocol):
    """What a pass found in a part of its work."""

    def merge(self, other: Self) -> None:
        """Add what was found in another part."""


Found = TypeVar("Found", bound=Partial)


class Pass(Protocol[Found]):
    """One pass over files, as a value: it can be pickled, and parts of it be run anywhere."""

    @property
    def title(self) -> str:
        """What it does, for a progress bar."""

    def empty(self) -> Found:
        """What is found in no work at all."""

    def nbytes(self, destination: Destination) -> int:
        """Bytes that are read in all, about."""

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[Callable[[Worker, Found], None]]:
        """What to do, in any order and on any thread; a task adds what it finds."""


class Worker(NamedTuple):
    """What a task works with: its thread's channel to the files, the backend, and where results go.

    `resident` are blocks that an earlier pass has left on the device.
    """

    channel: Channel
    backend: Backend
    destination: Destination
    resident: MutableMapping[tuple[Shard, int, int], Data]

    def load(self, block: Block) -> Data:
        """Read a block, and move it to where the backend works; unless it is still there."""
        view = self.channel.memory("block", block.end - block.begin)
        data = self.resident.pop((block.shard, block.begin, block.end), None)
        if data is not None:
            self.channel.touch(block.shard)
            self.channel.count(len(view))
            return data
        self.channel.read(block.shard, block.begin, view)
        return self.backend.to_device(view, align=block.spans[0].offset) if block.spans else view

    def leave(self, block: Block, data: Data) -> None:
        """Leave a block on the device for the next pass, if there is room."""
        if self.backend.stays_on_device(block.end - block.begin):
            self.resident[block.shard, block.begin, block.end] = data

    def store(self, block: Block, data: Data) -> None:
        """Write a block that `load` has read, unless nothing is to be written."""
        if not self.destination.count:
            return
        view = self.channel.memory("block", block.end - block.begin)
        if block.spans:
            self.backend.to_host(data, view)
        self.destination.write(self.channel, block, view)


@dataclass(frozen=True)
class OnBlock:
    """A task that works on a block; or on its halves, one after the other, where the device has no room for it.

    Until the device is out of memory, the work must not have changed or found anything.
    """

    work: Callable[[Block, Worker, Any], None]
    block: Block

    def __call__(self, worker: Worker, found: Any) -> None:
        """Work on the block."""
        halves: list[Block] = []
        try:
            self.work(self.block, worker, found)
        except DeviceMemoryError:
            halves = halved(self.block, TILE)
            if not halves:
                raise
        # Not in the handler: the error refers to the memory of the block.
        for half in halves:
            OnBlock(self.work, half)(worker, found)
