"""One call of an operation: it opens gradient sets, runs passes over them, writes, and sums up what it did."""

from __future__ import annotations

import contextlib
import os
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from gradtool.arrays import quiet
from gradtool.backends.storage import STORAGE
from gradtool.engines.choose import MAX_THREADS, choose, requested_engine
from gradtool.errors import Problem, UsageError, option, say
from gradtool.ops.results import CallSummary, OutputSummary, Timings
from gradtool.options import RewriteOptions
from gradtool.store.format.gradset import totals, unknown_shapes
from gradtool.store.format.paths import read_list
from gradtool.store.io.destination import DISCARD
from gradtool.store.transaction.inputs import EVERYTHING, Inputs, WritePlan, open_to_read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.errors import Text
    from gradtool.ops.passes import Measurement
    from gradtool.options import ComputeOptions, DiffOptions, ReadOptions, StrPath, WriteOptions
    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.selection import Renames
    from gradtool.store.io.destination import NewFile, WrittenFiles
    from gradtool.store.source import SmallFile
    from gradtool.store.transaction.inputs import OpenSets
    from gradtool.store.transaction.output import Output

# More than this takes numpy long enough to be worth a warning.
_SLOW_BYTES = 64 << 20


class Call:
    """A call of an operation: checked as far as possible without a file, then open for the length of a `with` block.

    Selected tensors must have one of the given `dtypes`; with None, any. With `unique_names`, the hint of the
    error, no name may be selected in several of the paths. Files may be named twice only with `may_repeat`.
    `others` says what becomes of integers that are not among the types, where they can be copied.
    """

    opened: OpenSets
    selected: list[Selected]
    # Of a call that writes.
    output: Output

    def __init__(
        self,
        paths: Sequence[str],
        options: ReadOptions | DiffOptions,
        *,
        dtypes: Sequence[str] | None = tuple(STORAGE),
        unique_names: Text | None = None,
        renames: Renames | None = None,
        may_repeat: bool = False,
        others: Literal["error", "copy"] | None = None,
    ) -> None:
        self._began, self._commit_seconds = perf_counter(), 0.0
        if isinstance(options, RewriteOptions) and options.in_place:
            _check_in_place(options)
        files_from: StrPath | None = getattr(options, "files_from", None)
        listed = None if files_from is None else read_list(os.fspath(files_from))
        paths = [*paths, *(listed.paths if listed else ())]
        # The backend is chosen here, unless workers choose it.
        self.engine, self._choice = choose(options, options.progress)
        shapes_from = None if options.shapes_from is None else os.fspath(options.shapes_from)
        selection = options.include, options.exclude, dtypes, unique_names
        self.inputs = Inputs(paths, *selection, listed, renames, may_repeat, shapes_from, others)
        self.options = options
        # Runs a pass, and returns what it collects; without a destination nothing is written.
        self.run = self.engine.run
        self._destination: WrittenFiles = DISCARD

    @contextlib.contextmanager
    def open_to_read(self, *, ignore_unfinished: bool = False) -> Iterator[None]:
        """Open what the call names."""
        with self.reading(self.inputs.open() if ignore_unfinished else open_to_read(self.inputs)):
            yield

    @contextlib.contextmanager
    def reading(self, opened: OpenSets) -> Iterator[None]:
        """Read what is open already; nothing is locked."""
        with quiet(), self._prepared(opened):
            yield

    @contextlib.contextmanager
    def open_to_write(
        self, options: WriteOptions, plan: WritePlan = EVERYTHING, opened: OpenSets | None = None
    ) -> Iterator[None]:
        """Open what the call names, unless it was `opened` without a lock, and lock it where it is written."""
        from gradtool.store.transaction.open import open_to_write  # operations that only read do without it

        with quiet(), open_to_write(self.inputs, options, plan, opened) as (sets, output), self._prepared(sets, output):
            self.output = output
            yield

    @contextlib.contextmanager
    def _prepared(self, opened: OpenSets, output: Output | None = None) -> Iterator[None]:
        try:
            self.engine.prepare(output, opened.shards)
            self.opened, self.selected = opened, opened.selected
            yield
        finally:
            self.engine.close()

    @contextlib.contextmanager
    def writing(
        self, files: Sequence[NewFile], indexes: Sequence[SmallFile] | None = None, state: SmallFile | None = None
    ) -> Iterator[WrittenFiles]:
        """Write as `Output.writing` does; the engine writes new files. The time of the commit is counted."""
        from gradtool.store.transaction.output import Staging  # operations that only read do without it

        with self.output.writing(files, indexes, state) as staging:
            self._destination = self.engine.destination(staging) if isinstance(staging, Staging) else staging
            yield self._destination
            began = perf_counter()
        if self._destination.shards:
            self._commit_seconds += perf_counter() - began

    def summary(
        self, selected: Sequence[Selected], *, why: str | None = None, warnings: Sequence[Problem] = ()
    ) -> CallSummary:
        """Sum up the call once it is done; `selected` are the tensors that it was about."""
        clock, fields = self.engine.clock, self.engine.workers._asdict() | totals(selected)
        if why is not None:
            fields["backend_why"] = why
        warnings = [*self.engine.warnings, *warnings]
        timings = Timings.from_clock(clock, self._commit_seconds, perf_counter() - self._began)
        faster, threads = None if self._choice is None else self._choice.remedy, self.options.threads or 0
        if self.inputs.shapes_from is None and (problem := unknown_shapes(self.opened.sets)) is not None:
            warnings = [problem, *warnings]
        if why is None and fields["bytes"] > _SLOW_BYTES and faster is not None:
            message = "computed by numpy, several times slower than the compiled kernels"
            warnings = [Problem("slow", message, hint=faster), *warnings]
        if threads > MAX_THREADS:
            message = say("{} exceeds the limit; using {} threads", option("threads", threads), MAX_THREADS)
            warnings = [Problem("threads", message), *warnings]
        return CallSummary(
            files=len(self.opened.shards),
            **fields,
            threads=max(1, clock.workers),
            engine=self.engine.name,
            seconds=timings.total_seconds,
            timings=timings,
            warnings=tuple(warnings),
        )

    def output_summary(self) -> OutputSummary:
        """Sum up what was written, once that is committed."""
        return OutputSummary(
            wrote=self.output.wrote(self._destination.shards),
            dry_run=self.output.options.dry_run,
            files_written=len(self._destination.shards),
            bytes_written=self.engine.clock.written_bytes,
        )

    def statistics(
        self,
        selected: Sequence[Selected],
        before: Measurement,
        *,
        unscale: float = 1.0,
        after: Measurement | None = None,
        warnings: Sequence[Problem] = (),
    ) -> dict[str, Any]:
        """Return the fields of `StatisticsResult` for tensors that were measured; `after` measures what was written."""
        return {
            "call": self.summary(selected, warnings=warnings),
            "norm_type": before.spec.order,
            "max_abs": max(before.max_abs, default=0.0) / unscale,
            "nan": sum(before.nan),
            "inf": sum(before.inf),
            "zeros": sum((before if after is None else after).zeros),
        }

    def already_done(self) -> dict[str, Any]:
        """Return the fields of a result for a call that found its ID, and did nothing."""
        summary = self.summary(self.selected, why="nothing to compute")
        return {"call": summary, "output": self.output_summary(), "already_done": True}


def _check_in_place(options: RewriteOptions) -> None:
    """Raise `UsageError` where workers would overwrite files."""
    engine, address = requested_engine(options.engine)
    if address is not None:
        message = "{} requires {}, because a redo log protects what one machine overwrites"
        hint = say("use {} with {}", option("write", "replace"), option("engine", engine))
        raise UsageError(say(message, option("write", "inplace"), option("engine", "threads")), hint=hint)


def require_this_machine(options: ComputeOptions, command: Text) -> None:
    """Raise `UsageError` if an engine is requested that cannot do the work of a command."""
    engine, address = requested_engine(options.engine)
    if address is not None:
        hint = say("use {} instead of {}", option("engine", "threads"), engine)
        raise UsageError(say("{} runs on one machine", command), hint=hint)
