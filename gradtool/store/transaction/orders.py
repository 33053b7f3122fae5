"""New files that other processes build: what they are asked for, what they answer, and the destination made of that.

Each attempt at a file builds a temporary of its own, so that none can touch what another one has written: an engine may
run a task twice, and a worker that it took for dead may go on. The first attempt that is reported is taken.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import changed_meanwhile, os_errors_about
from gradtool.store.fs import File
from gradtool.store.io.destination import NewFile, read_for
from gradtool.store.late import retry_until_visible
from gradtool.store.transaction.files import name_of
from gradtool.store.transaction.staging import Staged

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.header import Shard
    from gradtool.store.fs import Folder
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.channel import Channel, Task
    from gradtool.store.io.destination import Wanted
    from gradtool.store.transaction.commit import Commit
    from gradtool.store.transaction.transaction import Transaction

# Numbers of attempts, from here on, are drawn at random; all that a run counts itself are below.
FIRST_ATTEMPT = 10**8
LAST_ATTEMPT = 10**9 - 1


class Order(NamedTuple):
    """A new file that another process is to build beside its target, as long as the file `permit` is there.

    With `keeps_attributes`, it will get those of the shard that it replaces. A target that `is_new` replaces nothing.
    Pickled, it holds no open file.
    """

    new: NewFile
    run: str
    folder: Path
    name: str
    permit: str
    keeps_attributes: bool
    fsync: bool
    is_new: bool = False


class Built(NamedTuple):
    """The temporary that an attempt has built: the number in its name, its inode and its size."""

    number: int
    inode: int
    size: int


class Orders:
    """What a run has ordered, and what of that is missing still.

    In each folder, a file that the run makes is the permit to build there.
    """

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._permits: dict[Folder, str] = {}
        # By folder and name.
        self._missing: dict[tuple[Path, str], Path] = {}

    def add(self, target: Path, new: NewFile, *, keeps_attributes: bool, is_new: bool = False) -> Order:
        """Order a file that will become `target`."""
        folder, name = self._transaction.targets.locate(target)
        with os_errors_about(target):
            if folder not in self._permits:
                _, permit = self._transaction.new_name("tmp")
                os.close(folder.create(permit))
                self._permits[folder] = permit
        self._missing[folder.path, name] = target
        run, fsync = self._transaction.id, self._transaction.fsync
        return Order(new, run, folder.path, name, self._permits[folder], keeps_attributes, fsync, is_new)

    def adopted(self, order: Order, built: Built) -> Staged:
        """What was built, if it is what was ordered.

        Raises:
            SystemRefusedError: it is not.
        """
        target = self._missing.pop((order.folder, order.name))
        folder, name = self._transaction.targets.locate(target)
        plain = all(type(value) is int for value in built) and FIRST_ATTEMPT <= built.number <= LAST_ATTEMPT
        temporary = name_of(self._transaction.id, built.number, "tmp") if plain else ""
        with os_errors_about(target):
            status = retry_until_visible(lambda: folder.status(temporary)) if plain else None
        expected = built.inode, built.size, order.new.size, os.geteuid()
        if status is None or (status.st_ino, status.st_size, status.st_size, status.st_uid) != expected:
            raise changed_meanwhile(folder.path / temporary)
        original = order.new.shard.source.status if order.keeps_attributes else None
        file = File(folder, temporary, status.st_dev, status.st_ino)
        return Staged(built.number, file, name, target, original, order.is_new)

    def require_all_built(self) -> None:
        """Raise `AssertionError` unless all files are built."""
        if self._missing:
            raise AssertionError("no worker has built a file that was ordered")


@dataclass(frozen=True)
class Ordered:
    """New files that other processes build; what they have built is adopted, and put in place with all others."""

    orders: Mapping[Shard, Order]
    replacement: Commit
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

    def keep(self, channel: Channel, block: Block, view: memoryview) -> None:
        raise NotImplementedError

    def write(self, channel: Channel, block: Block, view: memoryview) -> None:
        raise NotImplementedError

    def put(self, channel: Channel, shard: Shard, begin: int, view: memoryview) -> None:
        raise NotImplementedError
