"""One call of an operation: the gradient sets it was given, and the engine that works on them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from gradtool import backends, checks
from gradtool.backends.storage import STORAGE
from gradtool.engines.threads import Threads
from gradtool.store.format.paths import read_path_list
from gradtool.store.io.workers import default_threads
from gradtool.store.transaction.destination import DISCARD, Discard
from gradtool.store.transaction.inputs import Inputs, open_to_read

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from gradtool.engines import Found, Pass
    from gradtool.options import Paths, Reading, Writing
    from gradtool.store.format.gradset import Selected
    from gradtool.store.transaction.destination import Destination, NewFile
    from gradtool.store.transaction.inputs import OpenSets
    from gradtool.store.transaction.output import NewIndex, Output, OutputOptions


@dataclass(frozen=True)
class Timings:
    """Seconds of work, and the bytes that they were spent on; a phase is the mean over the threads that worked.

    `commit` is the time to sync new files and to put them in place.
    """

    read: float
    read_bytes: int
    compute: float
    write: float
    write_bytes: int
    commit: float


class Call(NamedTuple):
    """What a call was asked for, checked as far as that can be done without a file: what to open, and the engine."""

    inputs: Inputs
    engine: Threads
    backend_why: str
    began: float

    @classmethod
    def of(cls, paths: Paths, chosen: Reading, *, dtypes: Sequence[str] | None = tuple(STORAGE)) -> Self:
        """A call with complete options. Selected tensors must have one of the given `dtypes`; with None, any."""
        began = perf_counter()
        named = checks.paths(paths)
        if chosen["files_from"] is not None:
            named += read_path_list(os.fspath(chosen["files_from"]))
        choice = backends.choose(chosen["backend"], chosen["device"])
        engine = Threads(choice.backend, chosen["threads"] or default_threads(), chosen["progress"])
        return cls(Inputs(named, chosen["include"], chosen["exclude"], dtypes), engine, choice.why, began)

    @contextlib.contextmanager
    def open_to_read(self, *, ignore_unfinished: bool = False) -> Iterator[Session]:
        """Open what the call names."""
        opened = self.inputs.open() if ignore_unfinished else open_to_read(self.inputs)
        with _quiet_arithmetic():
            yield Session(opened, self.engine, self.backend_why, self.began)

    def look(self, options: OutputOptions) -> OpenSets:
        """What the call names as `open_to_write` will open it, with nothing locked."""
        from gradtool.store.transaction.open import look

        return look(self.inputs, options)

    @contextlib.contextmanager
    def open_to_write(
        self,
        options: OutputOptions,
        *,
        writes: int | None = None,
        created: Path | None = None,
        homes: Collection[Path] | None = None,
    ) -> Iterator[tuple[Session, Output]]:
        """Open what the call names, locked where it is written.

        That is the first `writes` sets, or all, or those that have one of the files of `homes`; or the file to be
        `created`.
        """
        from gradtool.store.transaction.open import open_to_write  # not needed by what only reads

        written = open_to_write(self.inputs, options, writes=writes, created=created, homes=homes)
        with _quiet_arithmetic(), written as (opened, output):
            try:
                yield Session(opened, self.engine, self.backend_why, self.began), output
            finally:
                self.engine.close()


def _quiet_arithmetic() -> np.errstate:
    """Without numpy's warnings, for the thread of the call; engines see to their own threads."""
    return np.errstate(all="ignore")


def output_options_of(chosen: Writing) -> OutputOptions:
    """The options of a call that say where it writes."""
    from gradtool.store.transaction.output import OutputOptions  # not needed by what only reads

    output, output_dir = chosen["output"], chosen["output_dir"]
    return OutputOptions(
        file=None if output is None else os.fspath(output),
        folder=None if output_dir is None else os.fspath(output_dir),
        dry_run=chosen["dry_run"],
        in_place=chosen["write"] == "inplace",
        fsync=chosen["fsync"],
        lock_timeout=chosen["lock_timeout"],
    )


@dataclass
class Session:
    """One call: its open sets, the engine, and why that has its backend."""

    opened: OpenSets
    engine: Threads
    backend_why: str
    began: float
    commit_seconds: float = 0.0
    # Where a pass that only reads writes nothing to.
    _nowhere: Destination = DISCARD

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
        one = self.engine.clock
        return Timings(one.read, one.read_bytes, one.compute, one.write, one.written_bytes, self.commit_seconds)

    def run(self, one: Pass[Found], destination: Destination | None = None) -> Found:
        """Run a pass, and return what it found; without a destination nothing is written."""
        return self.engine.run(one, destination or self._nowhere)

    @contextlib.contextmanager
    def writing(
        self, output: Output, files: Sequence[NewFile], indexes: Sequence[NewIndex] | None = None
    ) -> Iterator[Destination]:
        """As `Output.writing`; the time that it takes to commit counts."""
        with output.writing(files, indexes) as destination:
            self._nowhere = Discard(destination.in_place)
            yield destination
            began = perf_counter()
        self._nowhere = DISCARD
        if destination.count:
            self.commit_seconds += perf_counter() - began
