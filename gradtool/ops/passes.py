"""The passes that operations are made of: measure what files hold, rewrite what must change."""

from __future__ import annotations

import math
import threading
from copy import copy
from dataclasses import dataclass, field
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from gradtool.backends import VALUE_DTYPES, Backend, BlockSums, Piece, Terms, choose
from gradtool.errors import UsageError
from gradtool.reduction import TILE, norm_of, rescue_exponent, tile_count, total
from gradtool.store.gradset import GradientSet, Selected, open_sets, refuse_dtypes, select
from gradtool.store.stream import Block, Clock, default_threads, plan, run

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from gradtool.store.header import Shard, Tensor

    # Called with the bytes done so far and the bytes of the whole call; one call at a time, from any thread.
    Progress = Callable[[int, int], None]
    # Changes the pieces of one block, of the tensors with the given numbers, and gives the sums of what it wrote.
    Change = Callable[[memoryview, Sequence[Piece], Sequence[int]], BlockSums]


@dataclass(frozen=True)
class Timings:
    """Seconds of work and the bytes they were spent on; each phase is the mean over the worker threads."""

    read: float
    read_bytes: int
    compute: float
    write: float
    write_bytes: int


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
    began: float = field(default_factory=perf_counter)
    _clock: Clock = field(default_factory=Clock)
    _read_bytes: int = 0
    _written_bytes: int = 0

    @property
    def shards(self) -> list[Shard]:
        """Every file of the call."""
        return [shard for one in self.sets for shard in one.shards]

    @property
    def elements(self) -> int:
        """Elements of all selected tensors."""
        return sum(one.tensor.elements for one in self.selected)

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
        return Timings(clock.read, self._read_bytes, clock.compute, clock.write, self._written_bytes)

    def stream(
        self,
        blocks: Iterable[Block],
        nbytes: int,
        work: Callable[[Block, memoryview], None],
        destinations: Mapping[Shard, Path] | None = None,
    ) -> None:
        """Run `work` over blocks of `nbytes` together, and count time and bytes."""
        self.total_bytes = max(self.total_bytes, self._read_bytes + nbytes)
        # A thread for less than a few blocks costs more than it saves.
        threads = max(1, min(self.threads, nbytes >> 20))
        clock = run(blocks, work, threads=threads, destinations=destinations, on_bytes=self._count)
        self._clock.add(Clock(clock.read / threads, clock.compute / threads, clock.write / threads))
        self._written_bytes += nbytes if destinations else 0

    def _count(self, nbytes: int) -> None:
        self._read_bytes += nbytes
        if self.progress is not None:
            self.progress(self._read_bytes, self.total_bytes)


def open_session(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    files_from: str | os.PathLike[str] | None,
    backend: str,
    threads: int | None,
    progress: Progress | None,
) -> Session:
    """Open the sets of one call and check all that can be checked before a byte of data is read."""
    if threads is not None and threads < 1:
        raise UsageError(f"--threads must be at least 1, not {threads}")
    began = perf_counter()
    choice = choose(backend)
    sets = open_sets(paths, files_from)
    selected = select(sets, include, exclude)
    refuse_dtypes(selected, VALUE_DTYPES)
    return Session(sets, selected, choice.backend, choice.why, threads or default_threads(), progress, began=began)


class Measurement:
    """The sums and facts of some tensors, filled block by block from any thread."""

    def __init__(self, selected: Sequence[Selected], terms: Terms, exponents: Sequence[int] | None = None) -> None:
        self.terms = terms
        # What each tensor's values were divided by, as a power of two, before they were summed.
        self.exponents = list(exponents) if exponents is not None else [0] * len(selected)
        tiles = [tile_count(one.tensor.elements) for one in selected]
        self._first_tile = np.concatenate([[0], np.cumsum(tiles, dtype=np.int64)])
        self._sums: NDArray[np.float64] = np.zeros(int(self._first_tile[-1]))
        self.max_abs: NDArray[np.float64] = np.zeros(len(selected))
        self.nan, self.inf, self.zeros = (np.zeros(len(selected), np.int64) for _ in range(3))
        self.first_nonfinite: NDArray[np.int64] = np.full(len(selected), -1, np.int64)
        self._lock = threading.Lock()

    def pieces(self, block: Block) -> list[Piece]:
        """The spans of a block, as a backend wants them."""
        return [Piece(span.dtype, span.offset, span.elements, self.exponents[span.tensor]) for span in block.spans]

    def add(self, block: Block, found: BlockSums) -> None:
        """Take in what a backend found in a block. Its tiles follow one another, as its spans do."""
        if not block.spans:
            return
        first = int(self._first_tile[block.spans[0].tensor]) + block.spans[0].start // TILE
        self._sums[first : first + len(found.sums)] = found.sums
        tensors = np.array([span.tensor for span in block.spans])
        with self._lock:
            self.max_abs[tensors] = np.maximum(self.max_abs[tensors], found.max_abs)
            self.nan[tensors] += found.nan
            self.inf[tensors] += found.inf
            self.zeros[tensors] += found.zeros
            for k in np.flatnonzero(found.first_nonfinite >= 0):
                span = block.spans[int(k)]
                index, known = span.start + int(found.first_nonfinite[k]), self.first_nonfinite[span.tensor]
                self.first_nonfinite[span.tensor] = index if known < 0 else min(index, known)

    def updated(self, numbers: Sequence[int], other: Measurement) -> Measurement:
        """A copy with the tensors of the given numbers taken from another measurement, which holds just them."""
        copied = copy(self)
        copied.exponents = list(self.exponents)
        for facts in ("_sums", "max_abs", "nan", "inf", "zeros", "first_nonfinite"):
            setattr(copied, facts, getattr(self, facts).copy())
        for theirs, ours in enumerate(numbers):
            copied._sums[self._tiles(ours)] = other._sums[other._tiles(theirs)]  # noqa: SLF001 - of our own class
            copied.exponents[ours] = other.exponents[theirs]
        for facts in ("max_abs", "nan", "inf", "zeros", "first_nonfinite"):
            getattr(copied, facts)[list(numbers)] = getattr(other, facts)
        return copied

    @property
    def is_finite(self) -> bool:
        """Whether no NaN and no Inf took part in the sums."""
        return self.terms.drop_nonfinite or not (self.nan.any() or self.inf.any())

    @property
    def largest(self) -> float:
        """max|g| over all tensors, NaN left out."""
        return float(self.max_abs.max(initial=0.0))

    def sum(self) -> float:
        """The sum over all tensors, divided by 2^(p · max exponent)."""
        return total(self._rebased(max(self.exponents, default=0)))

    def tensor_sum(self, number: int) -> float:
        """The sum over one tensor, divided by 2^(p · its exponent)."""
        return total(self._sums[self._tiles(number)])

    def norm(self) -> float:
        """The norm of all tensors as one vector."""
        if math.isinf(self.terms.norm_type):
            return self._maximum(self.nan.any(), self.largest)
        return norm_of(self.sum(), self.terms.norm_type, max(self.exponents, default=0))

    def tensor_norm(self, number: int) -> float:
        """The norm of one tensor."""
        if math.isinf(self.terms.norm_type):
            return self._maximum(self.nan[number] > 0, float(self.max_abs[number]))
        return norm_of(self.tensor_sum(number), self.terms.norm_type, self.exponents[number])

    def _maximum(self, has_nan: np.bool | bool, largest: float) -> float:
        return math.nan if has_nan and not self.terms.drop_nonfinite else largest

    def _tiles(self, number: int) -> slice:
        return slice(int(self._first_tile[number]), int(self._first_tile[number + 1]))

    def _rebased(self, exponent: int) -> Iterator[float]:
        """Every tile's sum, as if all tensors had been divided by the same power of two."""
        if len(set(self.exponents)) <= 1:
            yield from self._sums
            return
        for number, own in enumerate(self.exponents):
            yield from self._sums[self._tiles(number)] * 2.0 ** (self.terms.norm_type * (own - exponent))


def measure(
    session: Session, selected: Sequence[Selected], terms: Terms, exponents: Sequence[int] | None = None
) -> Measurement:
    """Read the given tensors once, and sum them."""
    measurement = Measurement(selected, terms, exponents)

    def work(block: Block, view: memoryview) -> None:
        measurement.add(block, session.backend.tile_sums(view, measurement.pieces(block), terms))

    blocks = (block for shard, wanted in _by_shard(selected) for block in plan(shard, wanted, TILE))
    session.stream(blocks, sum(one.tensor.nbytes for one in selected), work)
    return measurement


def measure_norms(session: Session, terms: Terms, *, per_tensor: bool) -> tuple[Measurement, float, list[float]]:
    """What the files hold, the norm of it all, and with `per_tensor` that of every tensor.

    A norm whose sum overflowed, or lost its terms to underflow, is measured again on scaled inputs.
    """
    selected = session.selected
    measurement = measure(session, selected, terms)
    norms = _rescued_tensor_norms(session, measurement) if per_tensor else []
    exponent = _rescue(measurement, measurement.sum(), measurement.largest)
    if exponent:
        measurement = measure(session, selected, terms, [exponent] * len(selected))
    return measurement, measurement.norm(), norms


def _rescued_tensor_norms(session: Session, measurement: Measurement) -> list[float]:
    norms = []
    for number, one in enumerate(session.selected):
        exponent = _rescue(measurement, measurement.tensor_sum(number), float(measurement.max_abs[number]))
        if exponent:
            norms.append(measure(session, [one], measurement.terms, [exponent]).tensor_norm(0))
        else:
            norms.append(measurement.tensor_norm(number))
    return norms


def _rescue(measurement: Measurement, sum_: float, max_abs: float) -> int:
    if math.isinf(measurement.terms.norm_type) or not measurement.is_finite:
        return 0
    return rescue_exponent(sum_, max_abs)


def rewrite(
    session: Session,
    selected: Sequence[Selected],
    written: Measurement,
    change: Change,
    destinations: Mapping[Shard, Path],
) -> None:
    """Change the given tensors and collect the sums of the result in `written`.

    Every file that has a destination is written there whole, changed or not. Without destinations the work is done and
    its result dropped.
    """

    def work(block: Block, view: memoryview) -> None:
        if block.spans:
            written.add(block, change(view, written.pieces(block), [span.tensor for span in block.spans]))

    wanted_in = dict(_by_shard(selected))
    if destinations:
        nbytes = sum(shard.size for shard in destinations)
        blocks = (block for shard in destinations for block in plan(shard, wanted_in.get(shard, ()), TILE, whole=True))
    else:
        nbytes = sum(one.tensor.nbytes for one in selected)
        blocks = (block for shard, wanted in wanted_in.items() for block in plan(shard, wanted, TILE))
    session.stream(blocks, nbytes, work, destinations)


def _by_shard(selected: Sequence[Selected]) -> Iterator[tuple[Shard, list[tuple[int, Tensor]]]]:
    for _, group in groupby(enumerate(selected), key=lambda entry: entry[1].shard):
        members = list(group)
        yield members[0][1].shard, [(number, one.tensor) for number, one in members]
