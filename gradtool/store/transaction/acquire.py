"""One writer at a time for each file.

A run first writes its log and then looks for those of others, so that of two runs at least one sees the other. Of two
that are not ready yet, the one whose ID sorts later withdraws.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gradtool.errors import os_errors_about
from gradtool.store import signals
from gradtool.store.transaction.locks import InUse
from gradtool.store.transaction.recovery import recover_if_crashed
from gradtool.store.transaction.runs import runs_in

if TYPE_CHECKING:
    from pathlib import Path

    from gradtool.store.transaction.transaction import Transaction

_POLL_SECONDS = 0.02
# Longer than looking at a folder takes: a run that has not decided by then is stopped.
_PATIENCE_SECONDS = 1.0


def acquire(transaction: Transaction, *, timeout: float = 0.0) -> None:
    """Lock the run's targets until it is closed, waiting up to `timeout` seconds for other runs.

    Crashed runs that left a target unfinished are recovered first.

    Raises:
        SystemRefusedError: another run writes a target, or a crashed one cannot be recovered.
        BadInputError: there are too many targets for a log.
    """
    deadline = time.monotonic() + timeout
    while True:
        signals.deliver()
        transaction.register()
        rival = _rival(transaction, deadline)
        if rival is None:
            with os_errors_about(transaction.home.path):
                transaction.append(holds_locks=True, fsync=False)
            return
        transaction.withdraw()
        transaction.may_be_stale = True
        _wait(*rival, deadline)


def _rival(transaction: Transaction, deadline: float) -> tuple[InUse, Path] | None:
    """The rival to wait for, and its target; one whose ID sorts later gets a moment to withdraw."""
    patience = max(deadline, time.monotonic() + _PATIENCE_SECONDS)
    while (rival := _find_rival(transaction)) is not None:
        other = rival[0].log
        if other.holds_locks or other.run < transaction.id or time.monotonic() > patience:
            return rival
        transaction.may_be_stale = True
        _pause()
    return None


def _find_rival(transaction: Transaction) -> tuple[InUse, Path] | None:
    """Another live run with one of our targets, and that target; crashed runs are recovered."""
    for folder, names in transaction.targets.names.items():
        for run in runs_in(folder, names):
            if run.log is None or run.id == transaction.id:
                continue
            rival = recover_if_crashed(run.log)
            # One that only cleans up writes no target any more.
            if isinstance(rival, InUse) and not rival.log.ended:
                return rival, folder.path / min(run.targets)
            transaction.may_be_stale = True
    return None


def _wait(rival: InUse, target: Path, deadline: float) -> None:
    """Wait for a rival to end; if it crashes, it is recovered."""
    if time.monotonic() >= deadline:
        raise rival.error(target)
    while time.monotonic() < deadline and isinstance(recover_if_crashed(rival.log), InUse):
        _pause()


def _pause() -> None:
    time.sleep(_POLL_SECONDS)
    signals.deliver()
