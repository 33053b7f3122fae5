"""Where results go: nowhere, into new files, or into a redo log for files that are written in place.

A pass writes to a `Destination` and never asks which kind it is.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from gradtool import tuning
from gradtool.store.format.gradset import Selected
from gradtool.store.format.index import reindexed
from gradtool.store.format.layout import lay_out
from gradtool.store.format.tensors import Tensor
from gradtool.store.io.blocks import Block, by_file, covered, plan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.format.tensors import Shard
    from gradtool.store.fs import File
    from gradtool.store.io.channel import Channel, Task
    from gradtool.store.io.redolog import RedoLog
    from gradtool.store.source import SmallFile

    # The tensors of each file that a pass works on, with their numbers, in the order of their bytes.
    TensorsByShard = Mapping[Shard, Sequence[tuple[int, Tensor]]]

# How many times larger blocks of tensors in pieces are.
_PIECES = 2


class NewFile(NamedTuple):
    """A file to be written: the shard that it replaces, or that it will be, and where its bytes come from.

    `header` is a new header. `copies` are copied from the shard, as (begin, end, where they go); None if a pass
    writes every block of the file. `zeros` are ranges to be zeroed. In place, `changes` bytes are overwritten.
    `metadata` are entries of the metadata that get a new text, or none. What a pass writes lies `shift` bytes further
    on than in the shard. `others` are tensors of other files that are copied, and where they go.
    """

    shard: Shard
    size: int
    header: bytes = b""
    copies: Sequence[tuple[int, int, int]] | None = None
    zeros: Sequence[tuple[int, int]] = ()
    changes: int = 0
    metadata: Mapping[str, str | None] | None = None
    shift: int = 0
    others: Sequence[tuple[Selected, int]] = ()

    def with_header(self, header: bytes) -> Self:
        """Return the same file with another header, which may be longer: the bytes behind it move."""
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


class FilePlan:
    """New files with other tensors than the shards that they replace: a pass writes some tensors, others are copied.

    `tensors` are those of each new file, and `places` says where the tensors that the pass writes are in them.
    """

    def __init__(self) -> None:
        self.files: dict[Shard, NewFile] = {}
        self.tensors: dict[Shard, Sequence[Tensor]] = {}
        self.places: dict[Selected, Selected] = {}

    def add(self, shard: Shard, order: Sequence[Tensor], from_pass: Collection[Selected]) -> None:
        """Plan a file with tensors in this order. The header is new, unless names, types and shapes stay the same.

        Raises:
            BadInputError: a name occurs twice, or the file could not be read again.
        """
        header, new, changes = b"", shard, 0
        if [tensor[:3] for tensor in order] != [tensor[:3] for tensor in shard.tensors]:
            header, new = lay_out(shard.name, order, shard.metadata)
        copies = [] if header else [(0, shard.data_start, 0)]
        for old, tensor in zip(order, new.tensors, strict=True):
            selected = Selected(shard, old)
            if selected in from_pass:
                self.places[selected] = Selected(shard, tensor)
                changes += tensor.nbytes
            elif copies and copies[-1][1] == old.begin and copies[-1][2] - copies[-1][0] == tensor.begin - old.begin:
                # What lies side by side in both files is copied at once.
                copies[-1] = (copies[-1][0], old.end, copies[-1][2])
            elif old.nbytes:
                copies.append((old.begin, old.end, tensor.begin))
        self.files[shard] = NewFile(shard, new.size, header, copies, changes=changes)
        self.tensors[shard] = new.tensors

    def indexes(self, sets: Iterable[GradientSet], *, is_elsewhere: bool) -> list[SmallFile]:
        """Return the indexes that must be written: those that change, or all in another folder."""
        indexes = []
        for gradset in sets:
            if (index := gradset.read_index()) is not None:
                tensors = {
                    shard.file_name: self.tensors.get(shard, shard.tensors)
                    for shard in gradset.shards
                    if shard in self.tensors or not is_elsewhere
                }
                new = reindexed(index, tensors)
                if is_elsewhere or new != index:
                    indexes.append(new)
        return indexes


class WrittenFiles:
    """The files that a pass writes, here or elsewhere."""

    def __init__(self, files: Iterable[NewFile]) -> None:
        self.files = {new.shard: new for new in files}

    @property
    def shards(self) -> Collection[Shard]:
        """The files that are written, or take the place of these."""
        return self.files.keys()

    def others_of(self, shard: Shard) -> Sequence[tuple[Selected, int]]:
        """Return the tensors of other files that are copied into a file."""
        return self.files[shard].others if shard in self.files else ()

    def nbytes(self, selected: Iterable[Selected]) -> int:
        """Count the bytes that a pass over the selected tensors reads in all, about."""
        whole = {shard for shard, new in self.files.items() if new.copies is None}
        copied = sum(end - begin for new in self.files.values() for begin, end, _ in new.copies or ())
        copied += sum(tensor.nbytes for new in self.files.values() for (_, tensor), _ in new.others)
        read = sum(tensor.nbytes for shard, tensor in selected if whole.isdisjoint(shard.files))
        return sum(shard.size for shard in whole) + copied + read


class Destination(WrittenFiles):
    """What a pass writes to in this process. This one discards all, for a dry run or a pass that only measures."""

    # Whether a pass writes every byte of a file, unless there are copies.
    is_new: ClassVar = False

    def tasks(self) -> Iterator[Task]:
        """Yield what is written whatever the pass does: headers, copies and zeros."""
        return iter(())

    def blocks(self, tensors_of: TensorsByShard, unit: int, nbytes: int) -> Iterator[Block]:
        """Yield the blocks that a pass over those tensors must visit, as `plan` cuts them.

        A file that is written whole is covered by blocks, without the pieces of tensors that are split over files. No
        block has bytes that are copied from other files.
        """
        pieces: dict[Shard, list[tuple[int, Tensor]]] = defaultdict(list)
        for shard, tensors in tensors_of.items():
            if shard not in self.files:
                if shard in shard.files:
                    yield from plan(shard, tensors, unit, nbytes)
                    continue
                # Larger blocks, because each is read from every file that has a piece of it.
                blocks = plan(shard, tensors, unit, _PIECES * nbytes)
                yield from chain.from_iterable(by_file(block, unit) for block in blocks)
                for file, begin, end in chain.from_iterable(shard.ranges(tensor) for _, tensor in tensors):
                    pieces[file].append((-1, Tensor("", "U8", (end - begin,), begin, end)))
        for shard, new in self.files.items():
            for (_, tensor), to in new.others:
                pieces[shard].append((-1, Tensor("", "U8", (tensor.nbytes,), to, to + tensor.nbytes)))
            tensors, is_whole = tensors_of.get(shard, ()), self.is_new and new.copies is None
            if tensors or is_whole:
                start = shard.data_start if new.header else 0
                if shard in pieces:
                    tensors = sorted([*tensors, *pieces[shard]], key=lambda entry: entry[1].begin)
                yield from plan(shard, tensors, unit, nbytes, whole=is_whole, start=start)

    def write(self, channel: Channel, block: Block, view: memoryview) -> None:
        """Write a block that a pass has changed."""

    def write_range(self, channel: Channel, shard: Shard, begin: int, view: memoryview) -> None:
        """Write bytes of a shard, from byte `begin` on."""


DISCARD = Destination(())


class NewFiles(Destination):
    """New files, which take the place of the old ones later, or are written elsewhere."""

    is_new = True

    def __init__(self, files: Sequence[tuple[NewFile, File]]) -> None:
        super().__init__(new for new, _ in files)
        self._targets = {new.shard: file for new, file in files}

    def tasks(self) -> Iterator[Task]:
        """Yield headers and copies; zeros are holes."""
        for shard, new in self.files.items():
            if new.header:
                yield partial(self.write_range, shard=shard, begin=0, view=memoryview(new.header))
            ranges = [(shard, *each) for each in new.copies or ()]
            ranges += [(source, tensor.begin, tensor.end, to) for (source, tensor), to in new.others]
            for source, begin, end, to in ranges:
                for at, stop in _cut(begin, end):
                    yield partial(self._copy, Block(source, at, stop, ()), shard, to + at - begin)

    def write(self, channel: Channel, block: Block, view: memoryview) -> None:
        for band in block.shard.bands(block.begin, len(view)):
            with channel.packed(view, band) as part:
                self.write_range(channel, band.shard, band.begin + self.files[band.shard].shift, part)

    def write_range(self, channel: Channel, shard: Shard, begin: int, view: memoryview) -> None:
        channel.write(self._targets[shard], begin, [view], len(view))

    def _copy(self, block: Block, shard: Shard, to: int, channel: Channel) -> None:
        with channel.memory(block.end - block.begin) as view:
            channel.read(block.shard, block.begin, view)
            self.write_range(channel, shard, to, view)


class Overwritten(Destination):
    """The files themselves: what changes in them goes into a redo log, from which it is copied later."""

    def __init__(self, files: Sequence[NewFile], log: RedoLog) -> None:
        super().__init__(files)
        self._log, self._numbers = log, {shard: number for number, shard in enumerate(self.files)}

    def nbytes(self, selected: Iterable[Selected]) -> int:
        zeros = sum(end - begin for new in self.files.values() for begin, end in new.zeros)
        return sum(tensor.nbytes for _, tensor in selected) + zeros

    def tasks(self) -> Iterator[Task]:
        """Yield headers and zeros; all else stays where it is."""
        for shard, new in self.files.items():
            if new.header:
                yield partial(self.write_range, shard=shard, begin=0, view=memoryview(new.header))
            for begin, end in new.zeros:
                for at, stop in _cut(begin, end):
                    yield partial(self._zero, shard, at, stop)

    def write(self, channel: Channel, block: Block, view: memoryview) -> None:
        ranges = covered(block)
        if block.shard in self.files:
            self._add(channel, block.shard, block.begin, view, ranges)
            return
        for start, stop in ranges:
            for band in block.shard.bands(block.begin + start, stop - start):
                with channel.packed(view[start:stop], band) as part:
                    self.write_range(channel, band.shard, band.begin, part)

    def write_range(self, channel: Channel, shard: Shard, begin: int, view: memoryview) -> None:
        self._add(channel, shard, begin, view, [(0, len(view))])

    def _add(
        self, channel: Channel, shard: Shard, begin: int, view: memoryview, parts: Sequence[tuple[int, int]]
    ) -> None:
        with channel.memory(len(view)) as old:
            channel.read(shard, begin, old, counts=False)
            self._log.add(channel, self._numbers[shard], begin, old, view, parts=parts)

    def _zero(self, shard: Shard, begin: int, end: int, channel: Channel) -> None:
        self.write_range(channel, shard, begin, memoryview(bytes(end - begin)))
        channel.record_done(end - begin)


def _cut(begin: int, end: int) -> Iterator[tuple[int, int]]:
    size = tuning.BLOCK_BYTES
    return ((at, min(at + size, end)) for at in range(begin, end, size))
