"""Recovers crashed runs: rolls them forward or back, and removes what they left."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradtool.declare import operation
from gradtool.errors import BadInputError, GradtoolError, Problem, SystemRefusedError, UsageError
from gradtool.options import RecoverOptions
from gradtool.store import signals
from gradtool.store.format.paths import is_there, require_local
from gradtool.store.transaction.guard import Scope
from gradtool.store.transaction.locks import InUse
from gradtool.store.transaction.recovery import Recovered, recover_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class RunRow:
    """One crashed run: what became of it, how many files it was about to change, its process, and its log.

    `outcome` is "finished" (its files are all new), "undone" (all old) or "untouched" (it had not got that far).
    """

    outcome: str
    files: int
    pid: int
    file: str


@dataclass(frozen=True)
class RecoverResult:
    """What was done: the number of runs by what became of them, and of files `removed` that belonged to no run."""

    headline: ClassVar[tuple[str, ...]] = ("finished", "undone", "untouched", "removed")

    finished: int
    undone: int
    untouched: int
    removed: int
    per_run: tuple[RunRow, ...]


@operation(RecoverOptions)
def recover(options: RecoverOptions) -> RecoverResult:
    """Roll crashed runs (killed, power cut) forward or back, and remove the files that they made.

    Afterwards, the files of each such run are all new or all old. A run that is alive is not touched. For a file or an
    index, its folder is searched too. If `recover` itself is killed, call it again.

    Raises:
        UsageError: no path is given.
        BadInputError: there is no such folder.
        SystemRefusedError: a run is alive; a file was written to since; or reading or writing failed. All else is done.
    """
    force = options.force
    named = options.named
    if not named:
        raise UsageError("no path is given; name a file, a folder or an index")
    require_local(named)
    rows: list[RunRow] = []
    problems: list[Problem] = []
    removed = 0
    for place, was_there in _places(named, problems).items():
        try:
            with signals.deferred():
                found, swept = recover_at(place, force=force)
        except GradtoolError as error:
            if was_there and not os.path.lexists(place.folder):
                continue  # A run had made it, and it was just removed.
            found, swept = [error], 0
        except KeyboardInterrupt as error:
            error.add_note(f"runs recovered before: {len(rows)}; gradtool recover continues")
            raise
        removed += swept
        _sort(found, rows, problems)
    missing = [path for path in named if not is_there(path)]
    if problems:
        raise _failed(problems, rows)
    if missing and not rows:
        from gradtool.store.format.hints import no_such_file  # only needed for the error

        raise BadInputError.from_problems([no_such_file(missing[0])])
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in ("finished", "undone", "untouched")}
    return RecoverResult(**counts, removed=removed, per_run=tuple(rows))


def _sort(found: Iterable[Recovered | InUse | GradtoolError], rows: list[RunRow], problems: list[Problem]) -> None:
    """Add a row for what was recovered, and a problem for what was not."""
    for one in found:
        if isinstance(one, Recovered):
            rows.append(RunRow(one.outcome, one.files, one.pid, str(one.log)))
        elif isinstance(one, InUse):
            problems.append(Problem("in-use", f"in use by {one.log.who}", str(one.log.path)))
        else:
            problems += one.problems


def _failed(problems: Sequence[Problem], rows: Sequence[RunRow]) -> GradtoolError:
    """The error for runs that could not be recovered; it names those that were, so that a script knows what is done."""
    # One run may be found from several places.
    distinct = list(dict.fromkeys(problems))
    kind = BadInputError if {one.code for one in distinct} <= {"missing-file"} else SystemRefusedError
    error = kind.from_problems(distinct)
    if rows:
        error.summary = "; ".join(f"recovered all the same, and {row.outcome}: {row.file}" for row in rows)
    return error


def _places(paths: Iterable[str], problems: list[Problem]) -> dict[Scope, bool]:
    """What the paths are about, and whether its folder is there; of the others, what is wrong with them."""
    places: dict[Scope, bool] = {}
    for path in paths:
        try:
            places |= {place: os.path.lexists(place.folder) for place in Scope.of(path)}
        except SystemRefusedError as error:
            problems += error.problems
    return places
