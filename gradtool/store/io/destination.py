"""Where results go: nowhere, into new files, or into a redo log for files that are written in place.

A pass writes to a `Destination` and never asks which one it is.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from gradtool import tuning
from gradtool.store.format.tensors import Tensor
from gradtool.store.io.blocks import covered, plan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.tensors import Shard
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.channel import Channel, Task
    from gradtool.store.io.redolog import RedoLog

    # The tensors of each file that a pass works on, with their numbers, in the order of their bytes.
    Wanted = Mapping[Shard, Sequence[tuple[int, Tensor]]]


class NewFile(NamedTuple):
    """A file to be written: the shard that it replaces, or that it will be, and where its bytes come from.

    `header` is a new header. `copies` are copied from the shard, as (begin, end, where they go); None if a pass
    writes every block of the file. `zeros` are ranges to be zeroed. In place, `changes` bytes are overwritten.
    `metadata` are entries of the metadata that get a new text, or none. What a pass writes lies `shift` bytes further
    on than in the shard.
    """

    shard: Shard
    size: int
    header: bytes = b""
    copies: Sequence[tuple[int, int, int]] | None = None
    zeros: Sequence[tuple[int, int]] = ()
    changes: int = 0
    metadata: Mapping[str, str | None] | None = None
    shift: int = 0

    def with_header(self, header: bytes) -> Self:
        """The same file with another header, which may be longer: the bytes behind it move."""
        start = self.shard.data_start
        shift = len(header) - start
        copies = self.copies
        if copies is not None:
            behind = [(max(begin, start), end) for begin, end, _ in copies if end > start]
            copies = [(begin, end, begin + shift) for begin, end in behind]
        changes = self.changes + len(header)
        return self._replace(header=header, size=self.size + shift, copies=copies, changes=changes, shift=shift)

    @property
    def ranges(self) -> list[tuple[int, int]] | None:
        """The ranges that get written: all, unless there are zeros, which a new file has as holes."""
        copied = [(to, to + end - begin) for begin, end, to in self.copies or ()]
        header = [(0, len(self.header))] if self.header else []
        return header + copied if self.zeros else None


class WrittenFiles(Protocol):
    """The files that a pass writes, here or elsewhere."""

    @property
    def shards(self) -> Collection[Shard]:
        """The files that are written, or take the place of these."""

    @property
    def count(self) -> int:
        """How many files are written."""

    def nbytes(self, selected: Iterable[Selected]) -> int:
        """Bytes that are read in all by a pass over the selected tensors, about."""


class Destination(WrittenFiles, Protocol):
    """What a pass writes to in this process."""

    def tasks(self) -> Iterator[Task]:
        """What is written whatever the pass does: headers, copies and zeros."""

    def blocks(self, wanted: Wanted, unit: int, nbytes: int) -> Iterator[Block]:
        """The blocks that a pass over the wanted tensors must visit, as `plan` cuts them."""

    def write(self, channel: Channel, block: Block, view: memoryview) -> None:
        """Write a block that a pass has changed."""

    def put(self, channel: Channel, shard: Shard, begin: int, view: memoryview) -> None:
        """Write bytes of a shard, from byte `begin` on."""


class Discard:
    """Writes nothing: for a dry run, or a pass that only measures."""

    shards = ()
    count = 0

    def nbytes(self, selected: Iterable[Selected]) -> int:
        return sum(one.tensor.nbytes for one in selected)

    def tasks(self) -> Iterator[Task]:
        return iter(())

    def blocks(self, wanted: Wanted, unit: int, nbytes: int) -> Iterator[Block]:
        for shard, tensors in wanted.items():
            yield from plan(shard, tensors, unit, nbytes=nbytes)

    def write(self, channel: Channel, block: Block, view: memoryview) -> None:
        pass

    def put(self, channel: Channel, shard: Shard, begin: int, view: memoryview) -> None:
        pass


DISCARD = Discard()


class _Files:
    """Files that a pass writes to, each with where its bytes go."""

    def __init__(self, files: Mapping[Shard, tuple[NewFile, Any]]) -> None:
        self.files = files

    @property
    def shards(self) -> Collection[Shard]:
        return self.files.keys()

    @property
    def count(self) -> int:
        return len(self.files)

    def _blocks(self, wanted: Wanted, unit: int, nbytes: int, whole: Collection[Shard]) -> Iterator[Block]:
        """Yield the blocks of `whole` files, and of others those of the wanted tensors; no block covers a piece."""
        split = {shard: tensors for shard, tensors in wanted.items() if shard not in self.files}
        yield from DISCARD.blocks(split, unit, nbytes)
        pieces: dict[Shard, list[tuple[int, Tensor]]] = defaultdict(list)
        for shard, tensors in split.items():
            ranges = (shard.ranges(tensor) for _, tensor in tensors) if shard not in shard.files else ()
            for file, begin, end in chain.from_iterable(ranges):
                pieces[file].append((-1, Tensor("", "U8", (end - begin,), begin, end)))
        for shard, (new, _) in self.files.items():
            tensors = wanted.get(shard, ())
            if tensors or shard in whole:
                start = shard.data_start if new.header else 0
                if shard in pieces:
                    tensors = sorted([*tensors, *pieces[shard]], key=lambda entry: entry[1].begin)
                yield from plan(shard, tensors, unit, whole=shard in whole, start=start, nbytes=nbytes)


class NewFiles(_Files):
    """New files, which take the place of the old ones later, or are written elsewhere."""

    def nbytes(self, selected: Iterable[Selected]) -> int:
        return read_for([new for new, _ in self.files.values()], selected)

    def tasks(self) -> Iterator[Task]:
        """Headers and copies; zeros are holes."""
        for shard, (new, _) in self.files.items():
            if new.header:
                yield partial(self.put, shard=shard, begin=0, view=memoryview(new.header))
            for begin, end, to in new.copies or ():
                for at, stop in _cut(begin, end):
                    yield partial(self._copy, shard, at, stop, to + at - begin)

    def blocks(self, wanted: Wanted, unit: int, nbytes: int) -> Iterator[Block]:
        """All of each file that a pass writes whole, and of others the wanted tensors."""
        whole = {shard for shard, (new, _) in self.files.items() if new.copies is None}
        return self._blocks(wanted, unit, nbytes, whole)

    def write(self, channel: Channel, block: Block, view: memoryview) -> None:
        for shard, begin, part in block.shard.runs(block.begin, len(view)):
            new, file = self.files[shard]
            channel.write(file, begin + new.shift, view[part])

    def put(self, channel: Channel, shard: Shard, begin: int, view: memoryview) -> None:
        channel.write(self.files[shard][1], begin, view)

    def _copy(self, shard: Shard, begin: int, end: int, to: int, channel: Channel) -> None:
        with channel.memory(end - begin) as view:
            channel.read(shard, begin, view)
            self.put(channel, shard, to, view)


class Overwritten(_Files):
    """The files themselves: what changes in them goes into a redo log, from which it is copied later."""

    def __init__(self, files: Sequence[NewFile], log: RedoLog) -> None:
        super().__init__({new.shard: (new, number) for number, new in enumerate(files)})
        self.log = log

    def nbytes(self, selected: Iterable[Selected]) -> int:
        zeros = sum(end - begin for new, _ in self.files.values() for begin, end in new.zeros)
        return DISCARD.nbytes(selected) + zeros

    def tasks(self) -> Iterator[Task]:
        """Headers and zeros; all else stays where it is."""
        for shard, (new, _) in self.files.items():
            if new.header:
                yield partial(self.put, shard=shard, begin=0, view=memoryview(new.header))
            for begin, end in new.zeros:
                for at, stop in _cut(begin, end):
                    yield partial(self._zero, shard, at, stop)

    def blocks(self, wanted: Wanted, unit: int, nbytes: int) -> Iterator[Block]:
        return self._blocks(wanted, unit, nbytes, ())

    def write(self, channel: Channel, block: Block, view: memoryview) -> None:
        if block.shard in self.files:
            self._write(channel, block.shard, block.begin, view, covered(block))
            return
        for start, stop in covered(block):
            for shard, begin, part in block.shard.runs(block.begin + start, stop - start):
                self.put(channel, shard, begin, view[start:stop][part])

    def put(self, channel: Channel, shard: Shard, begin: int, view: memoryview) -> None:
        self._write(channel, shard, begin, view, [(0, len(view))])

    def _write(
        self, channel: Channel, shard: Shard, begin: int, view: memoryview, parts: Sequence[tuple[int, int]]
    ) -> None:
        with channel.memory(len(view)) as old:
            channel.read_again(shard, begin, old)
            self.log.add(channel, self.files[shard][1], begin, old, view, parts=parts)
        channel.clock.written_bytes += sum(stop - start for start, stop in parts)

    def _zero(self, shard: Shard, begin: int, end: int, channel: Channel) -> None:
        self.put(channel, shard, begin, memoryview(bytes(end - begin)))
        channel.count(end - begin)


def read_for(files: Collection[NewFile], selected: Iterable[Selected]) -> int:
    """Bytes that are read to write new files, by a pass over the selected tensors, about."""
    whole = {new.shard for new in files if new.copies is None}
    copied = sum(end - begin for new in files for begin, end, _ in new.copies or ())
    read = sum(one.tensor.nbytes for one in selected if whole.isdisjoint(one.shard.files))
    return sum(shard.size for shard in whole) + copied + read


def _cut(begin: int, end: int) -> Iterator[tuple[int, int]]:
    size = tuning.BLOCK_BYTES
    return ((at, min(at + size, end)) for at in range(begin, end, size))
