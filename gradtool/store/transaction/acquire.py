"""One writer at a time for each file.

A run leaves its log first and looks for those of others then, so that of two at least one sees the other. Of two that
have not yet said that they are ready, the one whose name sorts later withdraws.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from gradtool.store import signals
from gradtool.store.transaction.guard import could_change
from gradtool.store.transaction.locks import InUse
from gradtool.store.transaction.log import logs_in
from gradtool.store.transaction.recovery import settle

if TYPE_CHECKING:
    from pathlib import Path

    from gradtool.store.transaction.run import Run

_POLL_SECONDS = 0.02
# More than it takes to look at a folder: a run that has not decided by then is stopped.
_PATIENCE_SECONDS = 1.0


class _Rival(NamedTuple):
    """Another run that is alive and is to write a target too."""

    found: InUse
    target: Path


def acquire(run: Run, *, timeout: float = 0.0) -> None:
    """Have the run's targets to itself until it is closed, waiting up to `timeout` seconds for others that have one.

    Crashed runs that left one of them unfinished are recovered first.

    Raises:
        SystemRefusedError: another run writes one of them, or a crashed one cannot be recovered.
        BadInputError: there are too many targets for a log.
    """
    deadline = time.monotonic() + timeout
    while True:
        signals.heed()
        run.register()
        rival = _decided(run, deadline)
        if rival is None:
            run.be_ready()
            return
        run.withdraw()
        run.met_others = True
        _wait(rival, deadline)


def _decided(run: Run, deadline: float) -> _Rival | None:
    """The rival to wait for, or None. A rival whose name sorts later withdraws, so it is only waited for a moment."""
    patience = max(deadline, time.monotonic() + _PATIENCE_SECONDS)
    while (rival := _rival(run)) is not None:
        other = rival.found.log
        if other.ready or other.run < run.id or time.monotonic() > patience:
            return rival
        run.met_others = True
        time.sleep(_POLL_SECONDS)
        signals.heed()
    return None


def _rival(run: Run) -> _Rival | None:
    """A run that is alive and has one of our targets; crashed ones are recovered."""
    for folder, names in run.names:
        for log in logs_in(folder):
            shared = log.names & names
            if log.run == run.id or not any(could_change(log, folder, name) for name in shared):
                continue
            found = settle(log)
            # One that only clears away writes to no target any more.
            if isinstance(found, InUse) and not (found.log.done or found.log.undone):
                return _Rival(found, folder.path / min(shared))
            run.met_others = True
    return None


def _wait(rival: _Rival, deadline: float) -> None:
    """Wait until a rival has ended; if it crashes, it is recovered."""
    if time.monotonic() >= deadline:
        raise rival.found.error(rival.target)
    while time.monotonic() < deadline and isinstance(settle(rival.found.log), InUse):
        time.sleep(_POLL_SECONDS)
        signals.heed()
