"""Checks gradient sets: what is wrong with them, how serious it is, and what helps.

A fault is wrong whatever the data is for: other commands refuse it, or read something else than what was meant. A note
may be as it should be, which only those can tell who know the data; healthy files have some.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, Literal

from gradtool.backends.storage import STORAGE
from gradtool.declare import operation
from gradtool.engines.choose import local
from gradtool.errors import BadInputError, Problem, SystemRefusedError, call, number_of, say
from gradtool.ops.check.headers import Examined
from gradtool.ops.check.values import COUNTS, CountValues, DtypeCounts, counts_by_dtype, value_findings
from gradtool.ops.results import Timings
from gradtool.options import CheckOptions
from gradtool.store.format.gradset import GradientSet, quoted, select
from gradtool.store.format.paths import paths_of
from gradtool.store.format.tensors import BITS
from gradtool.store.io.channel import Clock
from gradtool.store.transaction.runs import leftovers_at

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from gradtool.ops.check.values import Severity
    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.header import Shard
    from gradtool.store.transaction.runs import Leftover

# Files that are replaced while they are read are read again so often.
_TRIES = 3
# Where the data begins is a multiple of that, if the library wrote the file.
_ALIGNMENT = 8


@dataclass(frozen=True)
class Finding:
    """A "fault" or a "note": its code, what it is, what helps, and the tensor and file it is about."""

    severity: Literal["fault", "note"]
    code: str
    message: str
    remedy: str
    name: str | None
    file: str


@dataclass(frozen=True)
class CheckResult:
    """All findings, as `per_finding`: `faults`, and `notes`, which healthy files have too.

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
    paths = paths_of(options.named, options.files_from)
    for tries in range(1, _TRIES + 1):
        try:
            return _check(paths, options)
        except SystemRefusedError as error:
            if tries == _TRIES or any(problem.code != "changed" for problem in error.problems):
                raise
    raise AssertionError


def _check(named: Sequence[str], options: CheckOptions) -> CheckResult:
    """Look at everything once."""
    began = perf_counter()
    examined = [Examined(path) for path in named]
    remains, errors = leftovers_at(named)
    others = [problem for error in errors for problem in error.problems]
    unreadable = [problem for each in examined for problem in each.unreadable]
    unreadable += [problem for problem in others if problem.code != "unfinished"]
    for each in examined:
        half_changed = [problem for problem in each.not_safetensors if _may_be_half_changed(problem, remains)]
        each.faults += half_changed
        each.not_safetensors = [problem for problem in each.not_safetensors if problem not in half_changed]
    sets = _distinct(examined)
    selected = _select(sets, examined, options)
    valued = [entry for entry in selected if entry.tensor.dtype in STORAGE]
    engine, counts, clock = None, None, Clock()
    if not options.fast:
        engine = local(options, options.progress if callable(options.progress) else None)[0]
        clock = engine.clock
        try:
            counts = engine.run(CountValues(valued))
        except SystemRefusedError as error:
            # An error that names no file, such as one of the GPU, says nothing about the set.
            if not all(problem.file for problem in error.problems):
                raise
            unreadable += error.problems
        finally:
            engine.close()
    unfinished = [problem for problem in others if problem.code == "unfinished"]
    findings = [*_findings(named, examined, remains, unfinished)]
    for shard in dict.fromkeys(shard for shard, _ in selected):
        findings += _layout_findings(shard)
    findings += value_findings(valued, counts) if counts is not None else ()
    faults = list(dict.fromkeys(problem for severity, problem in findings if severity == "fault"))
    notes = list(dict.fromkeys(problem for severity, problem in findings if severity == "note"))
    _require_readable(unreadable, [problem for each in examined for problem in each.not_safetensors], faults)
    problems = [*faults, *notes] if options.strict else faults
    rows = counts_by_dtype(selected, valued, counts)
    totals = {name: sum(getattr(row, name) or 0 for row in rows) if counts is not None else None for name in COUNTS}
    seconds = perf_counter() - began
    return CheckResult(
        sound=not problems,
        faults=len(faults),
        notes=len(notes),
        fast=options.fast,
        **totals,
        warnings=() if options.strict else tuple(notes),
        files=sum(len(gradset.shards) for gradset in sets),
        tensors=len(selected),
        elements=sum(tensor.elements for _, tensor in selected),
        bytes=sum(tensor.nbytes for _, tensor in selected),
        backend=None if engine is None else engine.workers.backend,
        backend_why=None if engine is None else engine.workers.why,
        threads=max(1, clock.workers),
        seconds=seconds,
        timings=Timings.from_clock(clock, 0.0, seconds),
        per_dtype=tuple(rows),
        per_finding=(*(_row("fault", fault) for fault in faults), *(_row("note", note) for note in notes)),
        problems=tuple(problems),
    )


def _row(severity: Severity, problem: Problem) -> Finding:
    return Finding(severity, problem.code, problem.message, problem.hint or "", problem.tensor, problem.file or "")


def _require_readable(unreadable: list[Problem], not_safetensors: list[Problem], faults: list[Problem]) -> None:
    """Raise if something is no safetensors file, or could not be read; with all faults besides."""
    if problems := [*unreadable, *not_safetensors]:
        kind = SystemRefusedError if unreadable else BadInputError
        is_in_flux = all(problem.code == "changed" for problem in problems)
        raise kind.from_problems(list(dict.fromkeys(problems if is_in_flux else [*problems, *faults])))


def _may_be_half_changed(problem: Problem, remains: Sequence[Leftover]) -> bool:
    """Tell whether a run may have left the file half changed, so that it is no safetensors file any more."""
    folder = Path(os.path.realpath(problem.file or ".")).parent
    return problem.code != "missing-file" and any(
        left.folder == folder and left.kind in ("writing", "unfinished") for left in remains
    )


def _distinct(examined: Sequence[Examined]) -> list[GradientSet]:
    """Return the sets that could be read; each file once."""
    seen: set[Hashable] = set()
    sets = []
    for each in examined:
        new = [shard for shard in each.gradset.shards if shard.source.identity not in seen]
        seen |= {shard.source.identity for shard in new}
        sets.append(replace(each.gradset, shards=tuple(new)))
    return sets


def _select(sets: Sequence[GradientSet], examined: Sequence[Examined], options: CheckOptions) -> list[Selected]:
    try:
        return select(sets, options.include, options.exclude)
    except BadInputError:
        # The names may be those of a file that could not be read.
        if any(each.faults or each.not_safetensors or each.unreadable for each in examined):
            return []
        raise


def _findings(
    named: Sequence[str], examined: Sequence[Examined], remains: Sequence[Leftover], unfinished: Sequence[Problem]
) -> Iterator[tuple[Severity, Problem]]:
    """Yield what headers, indexes and the files of runs show."""
    for each in examined:
        for problem in each.faults:
            yield "fault", replace(problem, hint=problem.hint or "copy the file again, or write it anew")
        for problem in each.notes:
            yield "note", problem
    for left in remains:
        yield _leftover_finding(left, named)
    for problem in unfinished:
        yield "fault", problem


def _leftover_finding(left: Leftover, named: Sequence[str]) -> tuple[Severity, Problem]:
    """Return what a run has left; the hint names the folder to recover, as it is `named` if it is."""
    folders = [path if os.path.isdir(path) else os.path.dirname(path) or "." for path in named]  # noqa: PTH112, PTH120
    same = (folder for folder in folders if os.path.realpath(folder) == str(left.folder))
    files = f"{number_of(left.files, 'file')} of {left.nbytes:,} bytes"
    code, message = {
        "writing": ("in-use", f"a run ({left.process}) is changing files at this moment, or has crashed"),
        "unfinished": ("unfinished", f"a run ({left.process}) has crashed and left files half changed"),
        "crashed": ("leftover", f"a run ({left.process}) has crashed and left {files}; all others are whole"),
        "orphan": ("leftover", f"a run that has no log has left {files}"),
    }[left.kind]
    template = "wait for it, or run {}" if code == "in-use" else "run {}"
    hint = say(template, call("recover", next(same, str(left.folder))))
    return "note" if code == "leftover" else "fault", Problem(code, message, str(left.path), hint=hint)


def _layout_findings(shard: Shard) -> Iterator[tuple[Severity, Problem]]:
    """Yield a note if the data of a file is not aligned."""
    # No tensor of the library begins within an element; types of less than a byte have no alignment.
    sizes = {dtype: max(1, bits // 8) for dtype, bits in BITS.items()}
    unaligned = [tensor.name for tensor in shard.tensors if tensor.nbytes and tensor.begin % sizes.get(tensor.dtype, 1)]
    if shard.data_start % _ALIGNMENT:
        what = f"the data begins at byte {shard.data_start:,}, which is no multiple of 8"
    elif unaligned:
        verb = "begins" if len(unaligned) == 1 else "begin"
        what = f"{number_of(len(unaligned), 'tensor')} {verb} within an element's size: {quoted(unaligned)}"
    else:
        return
    message = f"{what}; programs that map the file must copy what is not aligned"
    yield "note", Problem("unaligned", message, shard.name, hint="save it again with the safetensors library")
