"""Completes crashed runs, or removes what they left."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradtool.declare import operation
from gradtool.errors import BadInputError, GradtoolError, Problem, SystemRefusedError, UsageError
from gradtool.ops.results import AnyResult
from gradtool.options import RecoverOptions
from gradtool.store import signals
from gradtool.store.format.paths import is_there, require_local
from gradtool.store.transaction.locks import InUse
from gradtool.store.transaction.recovery import Recovered, recover_at
from gradtool.store.transaction.runs import Scope, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class RunRow:
    """One crashed run: its outcome, the number of files that it was about to change, its process, and its log.

    `outcome` is "finished" (its files are all new) or "untouched" (all are old, because it had not got far enough).
    """

    outcome: str
    files: int
    pid: int
    file: str


@dataclass(frozen=True)
class RecoverResult(AnyResult):
    """The number of runs by outcome, and the number of files `removed` that belonged to no run."""

    headline: ClassVar[tuple[str, ...]] = ("finished", "untouched", "removed")

    finished: int
    untouched: int
    removed: int
    per_run: tuple[RunRow, ...]


@operation(RecoverOptions)
def recover(options: RecoverOptions) -> RecoverResult:
    """Complete crashed runs (killed, power cut) that were ready to change files, and clean up after all others.

    Afterwards, the files of each such run are all new or all old. A run that is alive is not touched. If a path is a
    file or an index, its folder is searched too. If `recover` itself is killed, call it again.

    Raises:
        UsageError: no path is given.
        BadInputError: there is no such folder.
        SystemRefusedError: a run is alive; a file was written to since; or reading or writing failed. All other runs
            are recovered first.
    """
    if not options.named:
        raise UsageError("no path is given", hint="name a file, a folder or an index")
    require_local(options.named)
    rows: list[RunRow] = []
    scopes, problems = _scopes(options.named)
    removed = 0
    for scope, existed in scopes.items():
        try:
            with signals.deferred():
                outcomes, orphans = recover_at(scope, force=options.force)
        except GradtoolError as error:
            if existed and not os.path.lexists(scope.folder):
                continue  # A crashed run had made this folder, and its recovery has just removed it.
            outcomes, orphans = [error], 0
        except KeyboardInterrupt as error:
            error.add_note(f"runs recovered before: {len(rows)}; run it again to continue")
            raise
        removed += orphans
        for outcome in outcomes:
            if isinstance(outcome, Recovered):
                rows.append(RunRow(outcome.outcome, outcome.files, outcome.pid, str(outcome.log)))
            else:
                problems += _problems_of(outcome)
    missing = [path for path in options.named if not is_there(path)]
    if problems:
        raise _error(problems, rows)
    if missing and not rows:
        from gradtool.store.format.hints import no_such_file  # only needed for the error

        raise BadInputError.from_problems([no_such_file(missing[0])])
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in ("finished", "untouched")}
    return RecoverResult(**counts, removed=removed, per_run=tuple(rows))


def _problems_of(outcome: InUse | GradtoolError) -> Sequence[Problem]:
    if isinstance(outcome, InUse):
        return [Problem("in-use", f"in use by {outcome.log.process}", str(outcome.log.path))]
    return outcome.problems


def _error(problems: Iterable[Problem], rows: Iterable[RunRow]) -> GradtoolError:
    """Return the error for runs that could not be recovered; its summary names those that were, for scripts."""
    # Several paths may lead to one run.
    distinct = list(dict.fromkeys(problems))
    kind = BadInputError if {problem.code for problem in distinct} <= {"missing-file"} else SystemRefusedError
    error = kind.from_problems(distinct)
    error.summary = "; ".join(f"already recovered ({row.outcome}): {row.file}" for row in rows) or None
    return error


def _scopes(paths: Iterable[str]) -> tuple[dict[Scope, bool], list[Problem]]:
    """Return the scopes of the paths, and whether their folders exist; and problems of paths that have none."""
    scopes: dict[Scope, bool] = {}
    problems: list[Problem] = []
    for path in paths:
        try:
            scopes |= {scope: os.path.lexists(scope.folder) for scope in scopes_of(path)}
        except SystemRefusedError as error:
            problems += error.problems
    return scopes, problems
