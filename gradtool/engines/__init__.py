"""Engines run passes over files. What a pass is, and what its tasks are given to work with, is defined here.

An engine of this process runs the tasks of a pass in its threads (`threads`). One of other processes gives each of them
a part of the pass (`executor`); which processes these are is the business of a `Cluster`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from gradtool import tuning
from gradtool.arrays import int64s
from gradtool.backends.protocol import FileBlock
from gradtool.errors import DeviceMemoryError
from gradtool.reduction import TILE
from gradtool.store.format.tensors import BITS
from gradtool.store.io.blocks import halved

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
    from concurrent.futures import Future

    from gradtool.backends.protocol import Backend, Data, NormSpec
    from gradtool.store.format.header import Shard
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.channel import Channel, Clock
    from gradtool.store.transaction.destination import Destination
    from gradtool.store.transaction.output import Output

    # Called with the title of a pass, the bytes that it has read, and all that it will; from one thread at a time.
    Progress = Callable[[str, int, int], None]


# What a pass finds, which its tasks add to.
Found = TypeVar("Found")


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


@runtime_checkable
class DivisiblePass(Pass[Found], Protocol):
    """A pass that other processes can run parts of.

    What it finds has two methods more: `condensed` makes fewer bytes of it, which are sent as `gradtool.engines.wire`
    says, and `put` adds what a part with some `places` has found; it raises `ValueError` for what does not fit there.
    """

    def parts(self, destination: Destination) -> Iterator[Part]:
        """The parts, which cover the pass and all files of the destination."""


class Part(NamedTuple):
    """A part of a pass: a pass over fewer tensors, and for each of them its number in the whole and its first element.

    It reads the files `reads`, and writes all of the new file for `writes`, unless that is None.
    """

    work: Pass[Any]
    places: Sequence[tuple[int, int]]
    reads: Sequence[Shard]
    writes: Shard | None
    nbytes: int


class Engine(Protocol):
    """What runs the passes of a call."""

    @property
    def name(self) -> str:
        """As it was asked for."""

    @property
    def clock(self) -> Clock:
        """Where the time went so far."""

    @property
    def staff(self) -> Staff:
        """Who did the work so far."""

    def prepare(self, output: Output | None, shards: Sequence[Shard]) -> None:
        """Make sure that these files can be worked on, and written where the output is locked."""

    def run(self, one: Pass[Found], destination: Destination = ...) -> Found:
        """Run a pass, and write what the destination needs besides."""

    def close(self) -> None:
        """Free what no pass will need any more."""


class Staff(NamedTuple):
    """Who did the work of a call: processes, their machines, waits and moved tasks, the backends and why these."""

    workers: int
    hosts: int
    retries: int
    backend: str
    why: str


class Member(NamedTuple):
    """A worker process: its machine, and the tasks that it does at a time."""

    host: str
    slots: int


class Cluster(Protocol):
    """Worker processes, perhaps on other machines."""

    name: str

    def members(self) -> Mapping[str, Member]:
        """The workers that are alive, by address; `SystemRefusedError` if the cluster is lost."""

    def submit(self, call: bytes, address: str | None = None, *, only: bool = False) -> Future[Any]:
        """Have a worker make a pickled call: any, if possible the one at an address, or that one only."""

    def stranded(self) -> Collection[Future[Any]]:
        """The calls that wait for workers that are not alive."""

    def why(self, error: BaseException) -> tuple[str, str | None]:
        """What happened to a call that the cluster gave up."""

    def close(self) -> None:
        """Drop all calls, and leave the cluster."""


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
        self.destination.keep(self.channel, block, view)
        return self.backend.to_device(view, align=block.spans[0].offset) if block.spans else view

    @contextlib.contextmanager
    def look(self, block: Block, spec: NormSpec) -> Iterator[Data]:
        """A block that is only looked at, which the backend may read itself."""
        if not reads_files(self.backend, self.destination, spec):
            yield self.load(block)
            return
        with self.lend(block) as data:
            yield data

    @contextlib.contextmanager
    def lend(self, block: Block, use: str = "block", sides: int = 1) -> Iterator[FileBlock]:
        """A block for the backend to read, by itself or as one of some `sides`, whose memory is to stay in the cache.

        Raises:
            SystemRefusedError: reading failed, or the file changed since its header was read.
        """
        report, tile = int64s(3), max((TILE * BITS[span.dtype] // 8 for span in block.spans), default=0)
        with self.channel.lend(block.shard) as fd:
            memory = self.channel.memory(use, max(tuning.STREAM_BYTES // sides, tile))
            lent = FileBlock(fd, block.begin, block.end - block.begin, memory, report)
            yield lent
            lent.check()
        self.channel.has_read(report[0], 1e-9 * report[1])

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


def reads_files(backend: Backend, destination: Destination, spec: NormSpec) -> bool:
    """Whether blocks that are looked at are read by the backend: not where they are written afterwards."""
    return not destination.count and backend.reads_files(spec)


def block_bytes(backend: Backend, destination: Destination, spec: NormSpec) -> int:
    """The size of blocks that are looked at."""
    if reads_files(backend, destination, spec):
        return tuning.STREAM_BLOCKS * tuning.BLOCK_BYTES
    return backend.block_bytes


class OnBlock:
    """A task that works on a block; or on its halves, one after the other, where the device has no room for it.

    Until the device is out of memory, the work must not have changed or found anything.
    """

    def __init__(self, work: Callable[[Block, Worker, Any], None], block: Block) -> None:
        self.work, self.block = work, block

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
