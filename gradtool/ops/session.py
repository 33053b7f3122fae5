"""One call of an operation: the gradient sets it was given, and the engine that works on them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.arrays import quiet
from gradtool.backends.storage import STORAGE
from gradtool.engines.choose import MOST_THREADS, asked_for, choose
from gradtool.errors import Problem, UsageError
from gradtool.options import Rewriting
from gradtool.store.format.paths import read_path_list
from gradtool.store.transaction.destination import DISCARD, Discard
from gradtool.store.transaction.inputs import EVERYTHING, Inputs, WritePlan, open_to_read
from gradtool.wording import option, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends.choose import Choice
    from gradtool.engines.protocol import Engine, Pass, Result
    from gradtool.options import Compute, DiffOptions, Reading, StrPath, Writing
    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.rename import Renames
    from gradtool.store.io.channel import Clock
    from gradtool.store.transaction.destination import Destination, NewFile
    from gradtool.store.transaction.inputs import OpenSets
    from gradtool.store.transaction.output import Output
    from gradtool.store.transaction.small import SmallFile
    from gradtool.wording import Wording


@dataclass(frozen=True)
class Timings:
    """Seconds of work, and the bytes over them; a phase is the mean over the threads that worked.

    `commit_seconds` is the time to sync new files and to put them in place.
    """

    read_bytes: int
    read_seconds: float
    read_gb_per_s: float
    compute_seconds: float
    compute_gb_per_s: float
    write_seconds: float
    write_gb_per_s: float
    commit_seconds: float
    total_seconds: float
    total_gb_per_s: float

    @classmethod
    def of(cls, clock: Clock, commit: float, total: float) -> Self:
        """The timings of a call that took so many seconds in all, and these to commit."""
        return cls(
            read_bytes=clock.read_bytes,
            read_seconds=clock.read,
            read_gb_per_s=_speed(clock.read_bytes, clock.read),
            compute_seconds=clock.compute,
            compute_gb_per_s=_speed(clock.read_bytes, clock.compute),
            write_seconds=clock.write,
            write_gb_per_s=_speed(clock.written_bytes, clock.write),
            commit_seconds=commit,
            total_seconds=total,
            total_gb_per_s=_speed(clock.read_bytes + clock.written_bytes, total),
        )


def _speed(nbytes: int, seconds: float) -> float:
    return nbytes / seconds / 1e9 if seconds else 0.0


class Call(NamedTuple):
    """What a call was asked for, checked as far as that can be done without a file: what to open, and the engine."""

    inputs: Inputs
    engine: Engine
    # The backend, unless workers choose it.
    choice: Choice | None
    asked_threads: int
    began: float

    @classmethod
    def of(
        cls,
        named: Sequence[str],
        options: Reading | DiffOptions,
        *,
        dtypes: Sequence[str] | None = tuple(STORAGE),
        unique_names: bool = False,
        renames: Renames | None = None,
        may_repeat: bool = False,
    ) -> Self:
        """A call with complete options. Selected tensors must have one of the given `dtypes`; with None, any.

        With `unique_names`, no name may be selected in several of the paths. Files may be named twice only with
        `may_repeat`.
        """
        began = perf_counter()
        if isinstance(options, Rewriting):
            _check_in_place(options)
        files_from: StrPath | None = getattr(options, "files_from", None)
        listed = None if files_from is None else read_path_list(os.fspath(files_from))
        named = [*named, *(listed.paths if listed else ())]
        progress = options.progress
        engine, choice = choose(options, progress if callable(progress) else None)
        include, exclude = options.include, options.exclude
        inputs = Inputs(named, include, exclude, dtypes, unique_names, listed, renames, may_repeat)
        return cls(inputs, engine, choice, options.threads or 0, began)

    @contextlib.contextmanager
    def open_to_read(self, *, ignore_unfinished: bool = False) -> Iterator[Session]:
        """Open what the call names."""
        opened = self.inputs.open() if ignore_unfinished else open_to_read(self.inputs)
        try:
            with quiet():
                self.engine.prepare(None, opened.shards)
                yield self._session(opened)
        finally:
            self.engine.close()

    def open_unlocked(self, options: Writing) -> OpenSets:
        """Open what the call names for `open_to_write`, with nothing locked."""
        from gradtool.store.transaction.open import open_unlocked

        return open_unlocked(self.inputs, options)

    @contextlib.contextmanager
    def open_to_write(
        self, options: Writing, plan: WritePlan = EVERYTHING, opened: OpenSets | None = None
    ) -> Iterator[tuple[Session, Output]]:
        """Open what the call names, unless it was `opened` without a lock, and lock it where it is written."""
        from gradtool.store.transaction.open import open_to_write  # not needed by what only reads

        plan = plan._replace(by_workers=self.choice is None)
        with quiet(), open_to_write(self.inputs, options, plan, opened) as (sets, output):
            try:
                self.engine.prepare(output, sets.shards)
                yield self._session(sets), output
            finally:
                self.engine.close()

    def _session(self, opened: OpenSets) -> Session:
        return Session(opened, self.engine, self.choice, self.began, self._warnings())

    def _warnings(self) -> list[Problem]:
        if self.asked_threads <= MOST_THREADS:
            return []
        what = say("{} exceeds the limit; using {} threads", option("threads", self.asked_threads), MOST_THREADS)
        return [Problem("threads", what)]


def _check_in_place(options: Rewriting) -> None:
    """Raise `UsageError` where workers would overwrite files."""
    engine = asked_for(options.engine)
    if options.in_place and engine.address is not None:
        what = "{} requires {}, because an undo log protects what one machine overwrites"
        hint = say("use {} with {}", option("write", "replace"), option("engine", engine.name))
        raise UsageError(say(what, option("write", "inplace"), option("engine", "threads")), hint=hint)


def refuse_engine(options: Compute, what: Wording) -> None:
    """Raise `UsageError` if an engine is asked for that cannot do the work of a command."""
    engine = asked_for(options.engine)
    if engine.address is not None:
        hint = say("use {} instead of {}", option("engine", "threads"), engine.name)
        raise UsageError(say("{} runs on one machine", what), hint=hint)


class Session:
    """One call: its open sets, the engine, and why that has its backend."""

    def __init__(
        self, opened: OpenSets, engine: Engine, choice: Choice | None, began: float, warnings: list[Problem]
    ) -> None:
        self.opened, self.engine, self.choice = opened, engine, choice
        self.began, self.warnings = began, warnings
        self.commit_seconds = 0.0
        # Where a pass that only reads writes nothing to.
        self._nowhere: Destination = DISCARD

    @property
    def selected(self) -> list[Selected]:
        """The tensors that are selected in all sets."""
        return self.opened.selected

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the call began."""
        return perf_counter() - self.began

    @property
    def timings(self) -> Timings:
        """Where the time went."""
        return Timings.of(self.engine.clock, self.commit_seconds, self.seconds)

    def run(self, work: Pass[Result], destination: Destination | None = None) -> Result:
        """Run a pass, and return what it collected; without a destination nothing is written."""
        return self.engine.run(work, destination or self._nowhere)

    @contextlib.contextmanager
    def writing(
        self,
        output: Output,
        files: Sequence[NewFile],
        indexes: Sequence[SmallFile] | None = None,
        state: SmallFile | None = None,
    ) -> Iterator[Destination]:
        """As `Output.writing`; the time that it takes to commit counts."""
        with output.writing(files, indexes, state) as destination:
            self._nowhere = Discard(destination.in_place)
            yield destination
            began = perf_counter()
        self._nowhere = DISCARD
        if destination.count:
            self.commit_seconds += perf_counter() - began
