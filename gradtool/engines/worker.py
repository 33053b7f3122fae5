"""A worker is what a task works with: the open files of its thread, the backend, and the destination."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from gradtool import tuning
from gradtool.arrays import int64s
from gradtool.backends.values import FileBlock
from gradtool.reduction import TILE
from gradtool.store.format.tensors import BITS
from gradtool.store.io.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, MutableMapping

    from gradtool.backends.protocol import Backend
    from gradtool.backends.values import Data, NormSpec
    from gradtool.store.format.tensors import Shard
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.destination import Destination


class WorkerSummary(NamedTuple):
    """Who did the work of a call: the backends and why these, processes, their machines, waits and moved tasks."""

    backend: str
    backend_why: str
    workers: int = 1
    hosts: int = 1
    retries: int = 0


class Loaded(NamedTuple):
    """A block: its bytes as they were read, or will be written, and the same data where the backend works."""

    block: Block
    view: memoryview
    data: Data


class Worker(Channel):
    """A thread's channel, which hands blocks to the backend. `resident` are blocks that a pass has left on the device.

    A task owns the memory that it gets until the end of the `with` block; then the next task gets it.
    """

    def __init__(
        self,
        max_files: int,
        backend: Backend,
        destination: Destination,
        resident: MutableMapping[tuple[Shard, int, int], Data],
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(max_files, backend.memory, on_bytes)
        self.backend, self.destination, self._resident = backend, destination, resident

    @contextlib.contextmanager
    def load(self, block: Block) -> Iterator[Loaded]:
        """Read a block, and move it to where the backend works. A block that is still there is not read again."""
        with self.memory(block.end - block.begin) as view:
            data = self._resident.pop((block.shard, block.begin, block.end), None)
            if data is not None:
                self.touch(block.shard)
                self.record_done(len(view))
            else:
                self.read(block.shard, block.begin, view)
                data = self.backend.to_device(view, align=block.spans[0].offset) if block.spans else view
            yield Loaded(block, view, data)

    @contextlib.contextmanager
    def make(self, block: Block, *, zeros: bool) -> Iterator[Loaded]:
        """Provide memory for a block without reading it; with `zeros`, it is zeroed."""
        with self.memory(block.end - block.begin) as view:
            if zeros:
                view[:] = bytes(len(view))
            align = block.spans[0].offset if block.spans else 0
            yield Loaded(block, view, self.backend.to_device(view, copies=zeros, align=align) if block.spans else view)

    @contextlib.contextmanager
    def view(self, block: Block, spec: NormSpec) -> Iterator[Data]:
        """Provide a block for the backend to look at; the backend may read it itself."""
        if reads_files(self.backend, self.destination, spec, [block.shard]):
            with self.file_block(block) as data:
                yield data
        else:
            with self.load(block) as loaded:
                yield loaded.data

    @contextlib.contextmanager
    def file_block(self, block: Block, sides: int = 1) -> Iterator[FileBlock]:
        """Provide a block for the backend to read; where it reads several `sides` at once, all stay in the cache.

        Raises:
            SystemRefusedError: reading failed, or the file changed since its header was read.
        """
        report, tile = int64s(3), max((TILE * BITS[span.dtype] // 8 for span in block.spans), default=0)
        room = max(tuning.STREAM_BYTES // sides, tile)
        with self.borrow_fd(block.shard) as fd, self.memory(room) as memory:
            borrowed = FileBlock(fd, block.begin, block.end - block.begin, memory, report)
            yield borrowed
            borrowed.check()
        self.record_read(report[0], 1e-9 * report[1])

    def keep_on_device(self, block: Block, data: Data) -> None:
        """Leave a block on the device for the next pass, if there is room."""
        if self.backend.stays_on_device(block.end - block.begin):
            self._resident[block.shard, block.begin, block.end] = data

    def store(self, loaded: Loaded) -> None:
        """Write a block, if there is a destination."""
        if not self.destination.shards:
            return
        if loaded.block.spans:
            self.backend.to_host(loaded.data, loaded.view)
        self.destination.write(self, loaded.block, loaded.view)


def reads_files(backend: Backend, destination: Destination, spec: NormSpec, shards: Iterable[Shard]) -> bool:
    """Check whether the backend reads blocks of these shards itself; it does not where they are written afterwards."""
    is_possible = not destination.shards and backend.reads_files(spec)
    return is_possible and all(shard.source.status is not None for shard in shards)
