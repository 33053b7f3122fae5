"""Judges gradient sets as a doctor would: what is wrong with them, how serious it is, and what helps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from gradtool.backends.storage import STORAGE
from gradtool.declare import operation
from gradtool.engines.choose import local
from gradtool.errors import BadInputError, Problem, SystemRefusedError
from gradtool.ops.check.census import TakeCensus
from gradtool.ops.check.counts import DtypeCounts, by_dtype, total
from gradtool.ops.check.findings import Finding, of_layout, of_remains, of_set, of_values
from gradtool.ops.session import Timings
from gradtool.options import CheckOptions
from gradtool.store.format.examine import examine
from gradtool.store.format.gradset import GradientSet, select
from gradtool.store.format.paths import no_path_error, read_path_list
from gradtool.store.io.channel import Clock
from gradtool.store.transaction.remains import remains_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradtool.engines.threads import Threads
    from gradtool.ops.check.census import Census
    from gradtool.store.format.examine import Examined
    from gradtool.store.format.gradset import Selected
    from gradtool.store.transaction.remains import Remains

# Files that are replaced while they are read are read again so often.
_TRIES = 3


@dataclass(frozen=True)
class CheckResult:
    """What was found, as `per_finding`: `faults`, and `notes`, which healthy files have too.

    The set is `sound` if it has no fault, with `strict` no note either. `problems` and `warnings` tell the findings
    once more. With `fast`, nothing is counted.
    """

    headline: ClassVar[tuple[str, ...]] = ("sound", "faults", "notes")

    sound: bool
    faults: int
    notes: int
    fast: bool
    nan: int | None
    inf: int | None
    zeros: int | None
    subnormal: int | None
    saturated: int | None
    warnings: tuple[Problem, ...]
    files: int
    tensors: int
    elements: int
    bytes: int
    backend: str | None
    backend_why: str | None
    threads: int
    seconds: float
    timings: Timings
    per_dtype: tuple[DtypeCounts, ...]
    per_finding: tuple[Finding, ...]
    problems: tuple[Problem, ...]


@operation(CheckOptions)
def check(options: CheckOptions) -> CheckResult:
    """Look at everything that can be wrong with gradient sets, and change nothing.

    Headers; indexes and their shards, in both directions; names that occur twice; alignment; files that the index does
    not name; what crashed runs have left; and, unless `fast`, every value: NaN, Inf, values that are subnormal or as
    large as their type can hold, tensors of zeros. Nothing is written, locked or recovered.

    Returns:
        The result. What is found is not raised; the faults, or with `strict` all findings, are its `problems`.

    Raises:
        UsageError: an option is invalid.
        BadInputError: a path is missing, or a file is no safetensors file at all. All findings are told all the same.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: a file cannot be read, or keeps changing.
    """
    named = options.named
    if options.files_from is not None:
        named += read_path_list(os.fspath(options.files_from)).paths
    if not named:
        raise no_path_error()
    for tries in range(1, _TRIES + 1):
        try:
            return _Visit(list(dict.fromkeys(named)), options).result()
        except SystemRefusedError as error:
            if tries == _TRIES or any(one.code != "changed" for one in error.problems):
                raise
    raise AssertionError


class _Visit:
    """One look at everything."""

    def __init__(self, named: Sequence[str], options: CheckOptions) -> None:
        self._began, self._named, self._options = perf_counter(), named, options
        self._examined = [examine(path) for path in named]
        self._remains, errors = remains_at(named)
        self._refused = [one for seen in self._examined for one in seen.refused]
        self._refused += [one for error in errors for one in error.problems if one.code != "unfinished"]
        self._unclear = [one for error in errors for one in error.problems if one.code == "unfinished"]
        for seen in self._examined:
            seen.strangers = [one for one in seen.strangers if not self._is_half_changed(seen, one)]
        self._selected = self._select()
        progress = options.progress
        self._engine = None if options.fast else local(options, progress if callable(progress) else None)[0]

    def result(self) -> CheckResult:
        """What was found; raised if it is about something else than safetensors files."""
        valued = [one for one in self._selected if one.tensor.dtype in STORAGE]
        census = None if self._engine is None else self._take(self._engine, valued)
        findings = list(dict.fromkeys(self._findings(valued, census)))
        self._refuse(findings)
        faults = [one for one in findings if one.severity == "fault"]
        notes = [one for one in findings if one.severity == "note"]
        problems = [one.problem for one in (faults + notes if self._options.strict else faults)]
        rows = by_dtype(self._selected, valued, census)
        staff, clock = (self._engine.staff, self._engine.clock) if self._engine else (None, Clock())
        seconds = perf_counter() - self._began
        return CheckResult(
            sound=not problems,
            faults=len(faults),
            notes=len(notes),
            fast=self._options.fast,
            nan=total(rows, "nan", census),
            inf=total(rows, "inf", census),
            zeros=total(rows, "zeros", census),
            subnormal=total(rows, "subnormal", census),
            saturated=total(rows, "saturated", census),
            warnings=() if self._options.strict else tuple(one.problem for one in notes),
            files=sum(len(one.shards) for one in self._sets()),
            tensors=len(self._selected),
            elements=sum(one.tensor.elements for one in self._selected),
            bytes=sum(one.tensor.nbytes for one in self._selected),
            backend=None if staff is None else staff.backend,
            backend_why=None if staff is None else staff.why,
            threads=max(1, clock.workers),
            seconds=seconds,
            timings=Timings.of(clock, 0.0, seconds),
            per_dtype=tuple(rows),
            per_finding=tuple(faults + notes),
            problems=tuple(problems),
        )

    def _is_half_changed(self, seen: Examined, one: Problem) -> bool:
        """Whether a stranger may be a file that a run has left half changed; it is then a fault."""
        folder = Path(os.path.realpath(one.file or ".")).parent
        is_half = one.code != "missing-file" and any(
            left.folder == folder and left.kind in ("writing", "unfinished") for left in self._remains
        )
        seen.faults += [one] if is_half else []
        return is_half

    def _sets(self) -> list[GradientSet]:
        """What could be read; each file once."""
        seen: set[tuple[int, int]] = set()
        sets = []
        for one in self._examined:
            new = [shard for shard in one.shards if shard.identity not in seen]
            seen |= {shard.identity for shard in new}
            sets.append(GradientSet(Path(one.path), tuple(new), one.index))
        return sets

    def _select(self) -> list[Selected]:
        try:
            return select(self._sets(), self._options.include, self._options.exclude)
        except BadInputError:
            # The names may be those of a file that could not be read.
            if any(one.faults or one.strangers or one.refused for one in self._examined):
                return []
            raise

    def _take(self, engine: Threads, valued: Sequence[Selected]) -> Census | None:
        try:
            census: Census = engine.run(TakeCensus(valued))
        except SystemRefusedError as error:
            # What is not about a file is not about what is checked.
            if not all(one.file for one in error.problems):
                raise
            self._refused += error.problems
            return None
        finally:
            engine.close()
        return census

    def _findings(self, valued: Sequence[Selected], census: Census | None) -> Iterable[Finding]:
        for one in self._examined:
            yield from of_set(one)
        yield from (of_remains(one, _as_named(one, self._named)) for one in self._remains)
        for problem in self._unclear:
            yield Finding("fault", problem.code, problem.message, "", None, problem.file or "")
        for shard in dict.fromkeys(one.shard for one in self._selected):
            yield from of_layout(shard)
        if census is not None:
            yield from of_values(valued, census)

    def _refuse(self, findings: Sequence[Finding]) -> None:
        """Raise if something is no safetensors file, or could not be read; with all that was found besides."""
        strangers = [one for seen in self._examined for one in seen.strangers]
        told = [*self._refused, *strangers]
        if told:
            kind = SystemRefusedError if self._refused else BadInputError
            if not all(one.code == "changed" for one in told):
                told += [one.problem for one in findings if one.severity == "fault"]
            raise kind.from_problems(list(dict.fromkeys(told)))


def _as_named(one: Remains, named: Iterable[str]) -> str:
    """The folder to recover, as it was named if it was."""
    for path in named:
        folder = path if os.path.isdir(path) else os.path.dirname(path) or "."  # noqa: PTH112, PTH120 - as it was typed
        if os.path.realpath(folder) == str(one.folder):
            return folder
    return str(one.folder)
