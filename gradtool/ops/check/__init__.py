"""Checks gradient sets for damage, and suggests fixes.

A fault is wrong whatever the data is for: other commands refuse the file, or read something that was not meant. A note
may be right or wrong, which depends on the data; healthy files have some.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gradtool.backends.storage import STORAGE
from gradtool.declare import operation
from gradtool.errors import BadInputError, Problem, SystemRefusedError
from gradtool.ops.check.differences import Difference, compare_sets
from gradtool.ops.check.headers import leftover_finding, read_set, unaligned_note
from gradtool.ops.check.values import COUNTS, DtypeCounts, count_values, counts_by_dtype, value_findings
from gradtool.ops.results import AnyResult, Timings
from gradtool.options import CheckOptions
from gradtool.store.format.gradset import require_shapes, totals, unknown_shapes
from gradtool.store.format.paths import paths_of
from gradtool.store.format.selection import select
from gradtool.store.io.channel import Clock
from gradtool.store.transaction.runs import leftovers_at

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from gradtool.ops.check.headers import Findings
    from gradtool.store.format.gradset import GradientSet, Selected

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
class CheckResult(AnyResult):
    """The findings, in `per_finding`, and the numbers of `faults` and of `notes`, which healthy files may have too.

    The set is `sound` if it has no faults and, with `strict`, no notes either. `problems` and `warnings` repeat the
    findings. With `fast`, nothing is counted. `per_difference` lists what differs between sets.
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
    per_difference: tuple[Difference, ...]
    problems: tuple[Problem, ...]


@operation(CheckOptions)
def check(options: CheckOptions) -> CheckResult:
    """Check gradient sets for damage and other problems, and change nothing.

    The checks cover headers; indexes and their shards, in both directions; names that occur twice; alignment; files
    that the index does not name; leftovers of crashed runs; tensors and weights of sets that have names in common; and,
    without `fast`, every value: NaN, Inf, subnormal values, values as large as their type can hold, and tensors of
    zeros. Nothing is written, locked or recovered.

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
    sets, selected, findings = _read_headers(named, options)
    valued = [entry for entry in selected if entry.tensor.dtype in STORAGE]
    engine, counts, unread = count_values(valued, options)
    clock = Clock() if engine is None else engine.clock
    findings += [("unreadable", problem) for problem in unread]
    notes_on_shards = (unaligned_note(shard) for shard in dict.fromkeys(shard for shard, _ in selected))
    findings += [("note", note) for note in notes_on_shards if note is not None]
    findings += value_findings(valued, counts) if counts is not None else ()
    unlike = list(compare_sets(sets, selected)) if len(sets) > 1 and selected else []
    findings += [("note", note) for note, _ in unlike]
    faults, notes, not_safetensors, unreadable = (
        list(dict.fromkeys(problem for finding, problem in findings if finding == kind))
        for kind in ("fault", "note", "not-safetensors", "unreadable")
    )
    if problems := [*unreadable, *not_safetensors]:
        error_class = SystemRefusedError if unreadable else BadInputError
        is_in_flux = all(problem.code == "changed" for problem in problems)
        raise error_class.from_problems(problems if is_in_flux else [*problems, *faults])
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
        backend_why=None if engine is None else engine.workers.backend_why,
        threads=max(1, clock.workers),
        seconds=seconds,
        timings=Timings.from_clock(clock, 0.0, seconds),
        per_dtype=tuple(rows),
        per_finding=(*(_row("fault", fault) for fault in faults), *(_row("note", note) for note in notes)),
        per_difference=tuple(chain.from_iterable(rows for _, rows in unlike)),
        problems=tuple(problems),
    )


def _row(severity: Literal["fault", "note"], problem: Problem) -> Finding:
    return Finding(severity, problem.code, problem.message, problem.hint or "", problem.tensor, problem.file or "")


def _read_headers(named: Sequence[str], options: CheckOptions) -> tuple[list[GradientSet], list[Selected], Findings]:
    """Read all sets as far as possible, each file once, select tensors, and look for what runs have left."""
    sets: list[GradientSet] = []
    findings: Findings = []
    seen: set[Hashable] = set()
    for path in named:
        gradset, problems = read_set(path)
        findings += problems
        shards = [shard for shard in gradset.shards if shard.source.identity not in seen]
        seen |= {shard.source.identity for shard in shards}
        sets.append(replace(gradset, shards=tuple(shards), split=gradset.split if shards else ()))
    if options.shapes_from is not None:
        try:
            require_shapes(sets, options.shapes_from)
        except BadInputError as error:
            findings += [("fault", problem) for problem in error.problems]
    elif (note := unknown_shapes(sets)) is not None:
        findings.append(("note", note))
    leftovers, errors = leftovers_at(named)
    try:
        selected = select(sets, options.include, options.exclude)
    except BadInputError:
        # A file that could not be read may have the names.
        if all(kind == "note" for kind, _ in findings):
            raise
        selected = []
    folders = {leftover.folder for leftover in leftovers if leftover.kind in ("writing", "unfinished")}
    for number, (kind, problem) in enumerate(findings):
        # A run that changed half of a file may be why it is no safetensors file.
        is_half_changed = (
            problem.code != "missing-file" and Path(os.path.realpath(problem.file or ".")).parent in folders
        )
        if kind == "fault" or (kind == "not-safetensors" and is_half_changed):
            findings[number] = "fault", replace(problem, hint=problem.hint or "copy or write the file again")
    findings += [leftover_finding(leftover, named) for leftover in leftovers]
    for problem in chain.from_iterable(error.problems for error in errors):
        findings.append(("fault" if problem.code == "unfinished" else "unreadable", problem))
    return sets, selected, findings
