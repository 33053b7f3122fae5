"""Opening the files of a call to write them, with all other writers kept out.

A run first writes its log and then looks for those of others, so that of two runs at least one sees the other. Of two
that do not hold their locks yet, the one whose ID sorts later withdraws.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING

from gradtool.errors import BadInputError, GradtoolError, SystemRefusedError, os_errors_about
from gradtool.store import signals
from gradtool.store.transaction.inputs import Inputs, OpenSets, WritePlan, open_to_read, require_finished
from gradtool.store.transaction.locks import InUse
from gradtool.store.transaction.output import Output
from gradtool.store.transaction.recovery import Recovered, recover_at, recover_if_crashed
from gradtool.store.transaction.runs import runs_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gradtool.options import Writing
    from gradtool.store.transaction.runs import Scope
    from gradtool.store.transaction.transaction import Transaction

_NOTHING_CAN_BE_WRITTEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
# A file is replaced while its header is read only if run after run gets to that very point.
_TRIES = 100
_PAUSE_SECONDS = 0.01
_POLL_SECONDS = 0.02
# Longer than looking at a folder takes: a run that has not decided by then is stopped.
_PATIENCE_SECONDS = 1.0


@contextlib.contextmanager
def open_to_write(
    inputs: Inputs, options: Writing, plan: WritePlan, opened: OpenSets | None = None
) -> Iterator[tuple[OpenSets, Output]]:
    """Open inputs, unless they were `opened` without a lock, and lock the files that will be written.

    They are locked until the end of the block. Crashed runs that left one of them unfinished are recovered first.

    Raises:
        UsageError: the options do not fit the inputs.
        BadInputError: an input is invalid.
        SystemRefusedError: another run has one of the files, or a crashed run left an input half changed.
    """
    opened = opened or open_unlocked(inputs, options)
    output = Output.of(options, opened, plan)
    if options.dry_run:
        output.check_state_files()
        yield opened, output
        return
    with signals.deferred(), output.new_transaction() as transaction:
        refusal = _acquired(transaction, options.lock_timeout)
        if transaction.may_be_stale or not all(shard.source.is_unchanged for shard in output.shards):
            opened = inputs.open()
            output = Output.of(options, opened, plan)
        for target in (*output.targets, *output.states):
            transaction.targets.locate(target)
        require_finished([*opened.local_paths, *output.states], transaction.id)
        yield opened, output._replace(transaction=None if refusal else transaction, refusal=refusal)


def open_unlocked(inputs: Inputs, options: Writing) -> OpenSets:
    """Open inputs for `open_to_write`, but lock nothing: what they hold decides which of them are written.

    Raises:
        SystemRefusedError: another run has one of the files, or a crashed run left an input half changed.
    """
    return (
        open_to_read(inputs) if options.only_reads else _open_to_write(inputs, time.monotonic() + options.lock_timeout)
    )


def _open_to_write(inputs: Inputs, deadline: float) -> OpenSets:
    """Open inputs that another run may be replacing right now, or that a crashed run may have left half changed."""
    tries = 0
    while True:
        tries += 1
        try:
            return inputs.open()
        except SystemRefusedError as error:
            if error.problems[0].code != "changed" or (tries > _TRIES and time.monotonic() > deadline):
                raise
        except BadInputError as error:
            outcomes = [outcome for place in inputs.places(error) for outcome in _recover_all_at(place)]
            alive = [outcome for outcome in outcomes if isinstance(outcome, InUse) and outcome.log.is_unfinished]
            if alive and time.monotonic() > deadline:
                raise alive[0].error(alive[0].log.home.parent) from None
            if not alive and not any(isinstance(outcome, Recovered) for outcome in outcomes):
                raise
        time.sleep(_PAUSE_SECONDS)


def _recover_all_at(place: Scope) -> Iterator[Recovered | InUse]:
    """Recover the crashed runs at a place, and yield what became of each; raise the first error."""
    outcomes = recover_at(place)[0] if os.path.isdir(place.folder) else []  # noqa: PTH112 - Path's own may raise
    for outcome in outcomes:
        if isinstance(outcome, GradtoolError):
            raise outcome
        yield outcome


def _acquired(transaction: Transaction, timeout: float) -> SystemRefusedError | None:
    """Lock the files; return why nothing can be written there: a run that has nothing to write may still succeed."""
    try:
        acquire(transaction, timeout=timeout)
    except SystemRefusedError as error:
        if error.errno not in _NOTHING_CAN_BE_WRITTEN:
            raise
        # Its logs in some of the folders must not block the next run.
        transaction.withdraw()
        return error
    return None


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
    """Return the rival to wait for, and its target; one whose ID sorts later gets a moment to withdraw."""
    patience = max(deadline, time.monotonic() + _PATIENCE_SECONDS)
    while (rival := _find_rival(transaction)) is not None:
        other = rival[0].log
        if other.holds_locks or other.run < transaction.id or time.monotonic() > patience:
            return rival
        transaction.may_be_stale = True
        _pause()
    return None


def _find_rival(transaction: Transaction) -> tuple[InUse, Path] | None:
    """Return another live run with one of our targets, and that target; recover crashed runs."""
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
