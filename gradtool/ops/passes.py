"""The passes that operations are made of: measure what files hold, rewrite what must change."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING, Self

from gradtool import tuning
from gradtool.backends import Backend, BlockSums, Choice, Piece, Terms, choose
from gradtool.backends.storage import STORAGE
from gradtool.errors import BadInputError, DeviceMemoryError, GradtoolError
from gradtool.ops import arguments
from gradtool.ops.measurement import Measurement, Norms, norms_of
from gradtool.reduction import TILE
from gradtool.store.format.gradset import GradientSet, Selected, open_sets, refuse_dtypes, select
from gradtool.store.format.paths import read_path_list
from gradtool.store.io.blocks import covered, halved, plan
from gradtool.store.io.channel import Clock
from gradtool.store.io.workers import default_threads, run
from gradtool.store.transaction.guard import Scope, refuse_unfinished, refuse_unfinished_at

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from gradtool.backends import Data
    from gradtool.ops.measurement import Again
    from gradtool.store.format.header import Shard
    from gradtool.store.format.tensors import Tensor
    from gradtool.store.fs import File
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.channel import Channel
    from gradtool.store.io.workers import Task
    from gradtool.store.transaction.inplace import InPlace

    # Called with the bytes done so far and the bytes of the whole call; one call at a time, from any thread.
    Progress = Callable[[int, int], None]
    # Changes the pieces of one block, of the tensors with the given numbers, and gives the sums of what it wrote.
    Change = Callable[[Data, Sequence[Piece], Sequence[int]], BlockSums]


@dataclass(frozen=True)
class Timings:
    """Seconds of work and the bytes they were spent on; a phase is the mean over the threads that worked.

    `commit` is what it took to sync the new files and to put them in the place of the old ones.
    """

    read: float
    read_bytes: int
    compute: float
    write: float
    write_bytes: int
    commit: float


@dataclass
class Session:
    """One call: the sets it was given, what is selected in them, and the means to work on it."""

    sets: list[GradientSet]
    selected: list[Selected]
    backend: Backend
    backend_why: str
    threads: int
    progress: Progress | None
    total_bytes: int = 0
    workers: int = 1
    commit_seconds: float = 0.0
    began: float = field(default_factory=perf_counter)
    # What the first pass left in the backend's memory for the second, by file, first and last byte.
    kept: dict[tuple[Shard, int, int], Data] = field(default_factory=dict)
    # What saves the old content, while files are changed in place.
    journal: InPlace | None = None
    _clock: Clock = field(default_factory=Clock)
    _read_bytes: int = 0

    @property
    def shards(self) -> list[Shard]:
        """Every file of the call."""
        return [shard for one in self.sets for shard in one.shards]

    def selected_in(self, shards: Iterable[Shard]) -> list[Selected]:
        """The selected tensors of the given files."""
        return [one for shard in shards for one in self._by_shard.get(shard, ())]

    @cached_property
    def _by_shard(self) -> dict[Shard, list[Selected]]:
        return {shard: list(group) for shard, group in groupby(self.selected, key=lambda one: one.shard)}

    @property
    def nbytes(self) -> int:
        """Bytes of all selected tensors."""
        return sum(one.tensor.nbytes for one in self.selected)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the call began."""
        return perf_counter() - self.began

    @property
    def timings(self) -> Timings:
        """Where the time went."""
        clock = self._clock
        return Timings(
            clock.read, clock.read_bytes, clock.compute, clock.write, clock.written_bytes, self.commit_seconds
        )

    def stream(self, tasks: Iterable[Task], nbytes: int) -> None:
        """Do tasks that read `nbytes` together, and count time and bytes."""
        self.total_bytes = max(self.total_bytes, self._read_bytes + nbytes)
        # A thread for less than a few blocks costs more than it saves.
        threads = max(1, min(self.threads, nbytes >> 20))
        clock = run(tasks, threads=threads, allocate=self.backend.memory, journal=self.journal, on_bytes=self._count)
        workers = max(1, clock.workers)
        self.workers = max(self.workers, workers)
        each = Clock(clock.read / workers, clock.compute / workers, clock.write / workers)
        self._clock.add(replace(each, read_bytes=clock.read_bytes, written_bytes=clock.written_bytes))

    def _count(self, nbytes: int) -> None:
        self._read_bytes += nbytes
        if self.progress is not None:
            # Holes that are read over count too, so the total is only an estimate until then.
            self.progress(self._read_bytes, max(self._read_bytes, self.total_bytes))


@dataclass(frozen=True)
class Inputs:
    """What a call names and selects, and what works on it; may be opened more than once."""

    paths: Sequence[str]
    include: Sequence[str]
    exclude: Sequence[str]
    dtypes: Sequence[str] | None
    choice: Choice
    threads: int
    progress: Progress | None
    began: float

    @classmethod
    def of(
        cls,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        include: str | Iterable[str],
        exclude: str | Iterable[str],
        files_from: str | os.PathLike[str] | None,
        backend: str | None,
        device: int | None,
        threads: int | None,
        progress: Progress | None,
        dtypes: Sequence[str] | None = tuple(STORAGE),
    ) -> Self:
        """The inputs of a call, checked as far as that can be done without a file.

        Of the selected tensors, only those of the given `dtypes` are accepted; any, with None.
        """
        began = perf_counter()
        workers = arguments.optional_count("--threads", threads) or default_threads()
        wanted, unwanted = arguments.patterns("--include", include), arguments.patterns("--exclude", exclude)
        named = arguments.paths(paths)
        if files_from is not None:
            named += read_path_list(arguments.optional_path("--files-from", files_from) or "")
        choice = choose(backend, arguments.optional_index("--device", device))
        return cls(named, wanted, unwanted, dtypes, choice, workers, progress, began)

    def open(self) -> Session:
        """Open the sets and check all that can be checked before a byte of data is read."""
        sets = open_sets(self.paths)
        selected = select(sets, self.include, self.exclude)
        if self.dtypes is not None:
            refuse_dtypes(selected, self.dtypes)
        return Session(
            sets, selected, self.choice.backend, self.choice.why, self.threads, self.progress, began=self.began
        )

    def places(self, error: GradtoolError | None = None) -> list[Scope]:
        """What the paths are about, whether they can be opened or not; or those files that an error is about."""
        files = [problem.file for problem in error.problems if problem.file] if error else []
        places: dict[Scope, None] = {}
        for path in files or self.paths:
            # Where the current folder is gone, a relative path has no place.
            with contextlib.suppress(OSError):
                places |= dict.fromkeys(Scope.of(path))
        return list(places)


def open_to_read(inputs: Inputs) -> Session:
    """Open inputs that are only read; refused where a run is changing them, or died before it was done.

    Raises:
        SystemRefusedError: a file may be half changed.
        BadInputError: as `Inputs.open`.
    """
    try:
        session = inputs.open()
    except BadInputError as error:
        # It may be that run which left them so.
        for place in inputs.places(error):
            refuse_unfinished_at(place)
        raise
    refuse_unfinished(shard.path for shard in session.shards)
    return session


def measure(
    session: Session,
    selected: Sequence[Selected],
    terms: Terms,
    divisors: Sequence[float] | None = None,
    *,
    keeps: bool = False,
) -> Measurement:
    """Read the given tensors once, and sum them. With `keeps`, a `rewrite` that comes next need not read them again."""
    measurement, backend = Measurement(selected, terms, divisors), session.backend

    def work(block: Block, channel: Channel) -> None:
        view = channel.memory("block", block.end - block.begin)
        channel.read(block.shard, block.begin, view)
        held = backend.hold(view, align=block.spans[0].offset)
        measurement.add(block, backend.tile_sums(held, measurement.pieces(block), terms))
        if keeps and backend.can_keep(len(view)):
            session.kept[block.shard, block.begin, block.end] = held

    tasks = (
        task
        for shard, wanted in by_shard(selected)
        for task in in_blocks(work, plan(shard, wanted, TILE, nbytes=tuning.BLOCK_BYTES * backend.bulk))
    )
    session.stream(tasks, sum(one.tensor.nbytes for one in selected))
    return measurement


def in_blocks(work: Callable[[Block, Channel], None], blocks: Iterable[Block]) -> Iterator[Task]:
    """Tasks that do `work` on each block; on its halves, where the backend has no room for the whole.

    `work` must have left nothing behind where it ends with that error.
    """
    return (partial(_work_on, work, block) for block in blocks)


def _work_on(work: Callable[[Block, Channel], None], block: Block, channel: Channel) -> None:
    halves: list[Block] = []
    try:
        work(block, channel)
    except DeviceMemoryError:
        halves = halved(block, TILE)
        if not halves:
            raise
    # Not while the error is at hand: it holds on to what was allocated before there was no more.
    for half in halves:
        _work_on(work, half, channel)


def measure_norms(
    session: Session,
    selected: Sequence[Selected],
    terms: Terms,
    *,
    per_tensor: bool = False,
    unscale: float = 1.0,
    keeps: bool = False,
) -> tuple[Measurement, Norms]:
    """What the given tensors hold, and the norms that it amounts to, over `unscale`."""
    found = measure(session, selected, terms, keeps=keeps)
    again = measuring_again(session, selected, terms)
    return found, norms_of(found, again, per_tensor=per_tensor, unscale=unscale)


def measuring_again(session: Session, selected: Sequence[Selected], terms: Terms) -> Again:
    """What reads some of the given tensors once more, each divided first."""

    def again(numbers: Sequence[int], divisors: Sequence[float]) -> Measurement:
        return measure(session, [selected[number] for number in numbers], terms, divisors)

    return again


def rewrite(
    session: Session,
    selected: Sequence[Selected],
    written: Measurement,
    change: Change,
    destinations: Mapping[Shard, File],
) -> None:
    """Change the given tensors and collect the sums of the result in `written`.

    Every file that has a destination is written there whole, changed or not, unless that is in place. Without
    destinations the work is done and its result dropped.
    """
    backend = session.backend

    def work(block: Block, channel: Channel) -> None:
        view, file = channel.memory("block", block.end - block.begin), destinations.get(block.shard)
        held = session.kept.pop((block.shard, block.begin, block.end), None)
        if held is not None:
            channel.touch(block.shard)
            channel.count(len(view))
        else:
            channel.read(block.shard, block.begin, view)
            held = backend.hold(view, align=block.spans[0].offset) if block.spans else view
        if block.spans:
            written.add(block, change(held, written.pieces(block), [span.tensor for span in block.spans]))
        if file is not None:
            if block.spans:
                backend.fetch(held, view)
            channel.write(file, block.begin, view, covered(block) if session.journal else None)

    wanted_in, whole = dict(by_shard(selected)), bool(destinations) and session.journal is None
    nbytes = sum(shard.size for shard in destinations) if whole else sum(one.tensor.nbytes for one in selected)
    tasks = (
        task
        for shard in destinations or wanted_in
        for task in in_blocks(
            work, plan(shard, wanted_in.get(shard, ()), TILE, whole=whole, nbytes=tuning.BLOCK_BYTES * backend.bulk)
        )
    )
    session.stream(tasks, nbytes)


def in_file_order(selected: Iterable[Selected]) -> list[Selected]:
    """Tensors as a pass wants them: each once, file after file, in the order of their bytes."""
    tensors: dict[Shard, set[Tensor]] = {}
    for one in selected:
        tensors.setdefault(one.shard, set()).add(one.tensor)
    return [Selected(shard, one) for shard, found in tensors.items() for one in sorted(found, key=lambda t: t.begin)]


def by_shard(selected: Sequence[Selected]) -> Iterator[tuple[Shard, list[tuple[int, Tensor]]]]:
    """The tensors of each file, with their numbers, as `plan` wants them."""
    for _, group in groupby(enumerate(selected), key=lambda entry: entry[1].shard):
        members = list(group)
        yield members[0][1].shard, [(number, one.tensor) for number, one in members]
