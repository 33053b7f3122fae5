"""New files that other processes build: what they are asked for, what they answer, and the destination made of that.

Each attempt at a file builds a temporary of its own, so that none can touch what another one has written: an engine may
run a task twice, and a worker that it took for dead may go on. The first attempt that is reported is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gradtool.store.transaction.destination import NewFile, read_for

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.header import Shard
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.channel import Channel
    from gradtool.store.io.workers import Task
    from gradtool.store.transaction.destination import Wanted
    from gradtool.store.transaction.replace import Replacement

# Numbers of attempts, from here on, are drawn at random; all that a run counts itself are below.
FIRST_ATTEMPT = 10**8
LAST_ATTEMPT = 10**9 - 1


class Order(NamedTuple):
    """A new file that another process is to build beside its target, for a run whose log must be there.

    With `keeps_attributes`, owner and extended attributes are those of the shard that it replaces. Pickled, it holds no
    open file.
    """

    new: NewFile
    run: str
    folder: Path
    name: str
    keeps_attributes: bool
    fsync: bool


class Built(NamedTuple):
    """The temporary that an attempt has built: the number in its name, its inode and its size."""

    number: int
    inode: int
    size: int


@dataclass(frozen=True)
class Ordered:
    """New files that other processes build; what they have built is adopted, and put in place with all others."""

    orders: Mapping[Shard, Order]
    replacement: Replacement
    in_place: None = None

    @property
    def shards(self) -> Collection[Shard]:
        return self.orders.keys()

    @property
    def count(self) -> int:
        return len(self.orders)

    def adopt(self, shard: Shard, built: Built) -> None:
        """Take what an attempt has built as the new file."""
        self.replacement.adopt(self.orders[shard], built)

    def nbytes(self, selected: Iterable[Selected]) -> int:
        return read_for([order.new for order in self.orders.values()], selected)

    def tasks(self) -> Iterator[Task]:
        raise NotImplementedError

    def blocks(self, wanted: Wanted, unit: int, nbytes: int) -> Iterator[Block]:
        raise NotImplementedError

    def write(self, channel: Channel, block: Block, view: memoryview) -> None:
        raise NotImplementedError

    def put(self, channel: Channel, shard: Shard, begin: int, view: memoryview) -> None:
        raise NotImplementedError
