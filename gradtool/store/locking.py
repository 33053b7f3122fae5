"""One writer at a time for each file."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gradtool.store.locks import holding
from gradtool.store.recovery import InUse, settle
from gradtool.store.signals import signals_deferred

if TYPE_CHECKING:
    from pathlib import Path

    from gradtool.store.records import Record
    from gradtool.store.run import Run

_POLL_SECONDS = 0.02


def acquire(run: Run, *, timeout: float = 0.0) -> None:
    """Have the run's targets to oneself until it is closed, waiting up to `timeout` seconds for others that have one.

    What runs that died left unfinished in them is brought to its end first. Folders are taken in the order of their
    names, so that two who wait do not wait for each other.

    Raises:
        SystemRefusedError: another run is about to write one of them, or one that died cannot be recovered.
        BadInputError: a folder is not there.
    """
    deadline = time.monotonic() + timeout
    for folder in run.folders:
        while (rival := _register(run, folder)) is not None:
            run.met_others = True
            found = settle(rival)
            if isinstance(found, InUse):
                _wait(found, folder / min(rival.names & run.names_in(folder)), deadline)


def _register(run: Run, folder: Path) -> Record | None:
    """Register in a folder, or say who is in the way."""
    with holding(folder):
        rival = run.rival_in(folder)
        if rival is None:
            with signals_deferred():
                run.register(folder)
        return rival


def _wait(rival: InUse, target: Path, deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise rival.error(target)
    time.sleep(_POLL_SECONDS)
