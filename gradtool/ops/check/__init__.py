"""Checks gradient sets for damage, and suggests fixes.

A fault is wrong whatever the data is for: other commands refuse the file, or read something that was not meant. A note
may be right or wrong, which depends on the data; healthy files have some.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gradtool.backends.storage import STORAGE
from gradtool.declare import operation
from gradtool.engines.choose import local
from gradtool.errors import BadInputError, Problem, SystemRefusedError
from gradtool.ops.check.headers import SetCheck, leftover_finding, unaligned_note
from gradtool.ops.check.values import COUNTS, CountValues, DtypeCounts, counts_by_dtype, value_findings
from gradtool.ops.results import Timings
from gradtool.options import CheckOptions
from gradtool.store.format.gradset import GradientSet, totals
from gradtool.store.format.paths import paths_of
from gradtool.store.format.selection import select
from gradtool.store.io.channel import Clock
from gradtool.store.transaction.runs import leftovers_at

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from gradtool.engines.threads import Threads
    from gradtool.ops.passes import Measurement
    from gradtool.store.format.gradset import Selected

# How often a set is read if its files are replaced meanwhile.
_TRIES = 3


@dataclass(frozen=True)
class Finding:
    """A "fault" or a "note": its code, what is wrong, how to fix it, and the tensor and file."""

    severity: Literal["fault", "note"]
    code: str
    message: str
    remedy: str
    name: str | None
    file: str


@dataclass(frozen=True)
class CheckResult:
    """All findings, as `per_finding`: `faults`, and `notes`, which healthy files have too.

    The set is `sound` if it has no fault, with `strict` no note either. `problems` and `warnings` repeat the findings.
    With `fast`, nothing is counted.
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
    """Check everything that can be wrong with gradient sets, and change nothing.

    Headers; indexes and their shards, in both directions; names that occur twice; alignment; files that the index does
    not name; what crashed runs have left; and, unless `fast`, every value: NaN, Inf, values that are subnormal or as
    large as their type can hold, tensors of zeros. Nothing is written, locked or recovered.

    Returns:
        The result. Findings are not raised; the faults, or with `strict` all findings, are its `problems`.

    Raises:
        UsageError: an option is invalid.
        BadInputError: a path is missing, or a file is not a safetensors file at all. The error lists the faults, too.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: a file cannot be read, or keeps changing.
    """
    paths = paths_of(options.named, options.files_from)
    for tries in range(1, _TRIES + 1):
        try:
            return _check(paths, options)
        except SystemRefusedError as error:
            if tries == _TRIES or any(problem.code != "changed" for problem in error.problems):
                raise
    raise AssertionError


def _check(named: Sequence[str], options: CheckOptions) -> CheckResult:
    began = perf_counter()
    checks = [SetCheck(path) for path in named]
    leftovers, errors = leftovers_at(named)
    for set_check in checks:
        set_check.blame_runs(leftovers)
    sets = _distinct(checks)
    selected = _select(sets, checks, options)
    valued = [entry for entry in selected if entry.tensor.dtype in STORAGE]
    engine, counts, unread = _count_values(valued, options)
    clock = Clock() if engine is None else engine.clock
    findings = [finding for set_check in checks for finding in set_check.findings]
    findings += [leftover_finding(leftover, named) for leftover in leftovers]
    run_problems = [problem for error in errors for problem in error.problems]
    findings += [("fault", problem) for problem in run_problems if problem.code == "unfinished"]
    notes_on_shards = (unaligned_note(shard) for shard in dict.fromkeys(shard for shard, _ in selected))
    findings += [("note", note) for note in notes_on_shards if note is not None]
    findings += value_findings(valued, counts) if counts is not None else ()
    faults = list(dict.fromkeys(problem for severity, problem in findings if severity == "fault"))
    notes = list(dict.fromkeys(problem for severity, problem in findings if severity == "note"))
    unreadable = [problem for set_check in checks for problem in set_check.unreadable]
    unreadable += [problem for problem in run_problems if problem.code != "unfinished"]
    not_safetensors = [problem for set_check in checks for problem in set_check.not_safetensors]
    if problems := [*unreadable, *unread, *not_safetensors]:
        kind = SystemRefusedError if unreadable or unread else BadInputError
        is_in_flux = all(problem.code == "changed" for problem in problems)
        raise kind.from_problems(list(dict.fromkeys(problems if is_in_flux else [*problems, *faults])))
    problems = [*faults, *notes] if options.strict else faults
    rows = counts_by_dtype(selected, valued, counts)
    sums: dict[str, Any] = {
        name: None if options.fast else sum(getattr(row, name) or 0 for row in rows) for name in COUNTS
    }
    seconds = perf_counter() - began
    return CheckResult(
        sound=not problems,
        faults=len(faults),
        notes=len(notes),
        fast=options.fast,
        **sums,
        warnings=() if options.strict else tuple(notes),
        files=sum(len(gradset.shards) for gradset in sets),
        **totals(selected),
        backend=None if engine is None else engine.workers.backend,
        backend_why=None if engine is None else engine.workers.why,
        threads=max(1, clock.workers),
        seconds=seconds,
        timings=Timings.from_clock(clock, 0.0, seconds),
        per_dtype=tuple(rows),
        per_finding=(*(_row("fault", fault) for fault in faults), *(_row("note", note) for note in notes)),
        problems=tuple(problems),
    )


def _row(severity: Literal["fault", "note"], problem: Problem) -> Finding:
    return Finding(severity, problem.code, problem.message, problem.hint or "", problem.tensor, problem.file or "")


def _distinct(checks: Sequence[SetCheck]) -> list[GradientSet]:
    """Return the sets as far as they could be read, each file once."""
    seen: set[Hashable] = set()
    sets = []
    for set_check in checks:
        new = [shard for shard in set_check.gradset.shards if shard.source.identity not in seen]
        seen |= {shard.source.identity for shard in new}
        sets.append(replace(set_check.gradset, shards=tuple(new)))
    return sets


def _select(sets: Sequence[GradientSet], checks: Sequence[SetCheck], options: CheckOptions) -> list[Selected]:
    try:
        return select(sets, options.include, options.exclude)
    except BadInputError:
        # A file that could not be read may have the names.
        if any(set_check.is_incomplete for set_check in checks):
            return []
        raise


def _count_values(
    valued: Sequence[Selected], options: CheckOptions
) -> tuple[Threads | None, Measurement | None, Sequence[Problem]]:
    """Count values unless the options skip that; return the engine, the counts, and what could not be read."""
    if options.fast:
        return None, None, ()
    engine = local(options, options.progress if callable(options.progress) else None)[0]
    try:
        return engine, engine.run(CountValues(valued)), ()
    except SystemRefusedError as error:
        # An error that names no file, such as that of a GPU, says nothing about the set.
        if not all(problem.file for problem in error.problems):
            raise
        return engine, None, error.problems
    finally:
        engine.close()
