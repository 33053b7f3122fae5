"""Opening the files of a call to write them, with all other writers kept out.

A run first writes its log and then looks for other logs, so that of two runs at least the second sees the first. Of two
runs that do not hold their locks yet, the run whose ID sorts later withdraws.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING

from gradtool.errors import BadInputError, GradtoolError, SystemRefusedError, os_errors_about
from gradtool.store import signals
from gradtool.store.format.layout import INDEX_NAME
from gradtool.store.transaction.inputs import Inputs, OpenSets, WritePlan, open_to_read, require_finished
from gradtool.store.transaction.locks import InUse
from gradtool.store.transaction.output import Output
from gradtool.store.transaction.recovery import Recovered, recover_at, recover_if_crashed
from gradtool.store.transaction.runs import runs_in
from gradtool.store.transaction.targets import Targets
from gradtool.store.transaction.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gradtool.options import WriteOptions
    from gradtool.store.transaction.runs import Scope

_NOTHING_CAN_BE_WRITTEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
# A file is replaced while its header is read only if run after run gets to that very point.
_TRIES = 100
_PAUSE_SECONDS = 0.01
_POLL_SECONDS = 0.02
# Longer than looking at a folder takes: a run that has not decided by then is stopped.
_PATIENCE_SECONDS = 1.0


@contextlib.contextmanager
def open_to_write(
    inputs: Inputs, options: WriteOptions, plan: WritePlan, opened: OpenSets | None = None
) -> Iterator[tuple[OpenSets, Output]]:
    """Open inputs, unless they were `opened` without a lock, and lock the files that will be written.

    They are locked until the end of the block. Crashed runs that left a target unfinished are recovered first.

    Raises:
        UsageError: the options do not fit the inputs.
        BadInputError: an input is invalid.
        SystemRefusedError: another run has a target, or a crashed run left an input half changed.
    """
    opened = opened or open_unlocked(inputs, options)
    output = Output.from_options(options, opened, plan)
    if options.dry_run:
        # The path of the state must lead somewhere, and no run may be changing it.
        Targets((), output.folder, output.states).close()
        require_finished(state for state in output.states if state.parent.is_dir())
        yield opened, output
        return
    # Two new sets in a folder, of which neither may see the files of the other, may differ in all files but the index.
    index = [output.folder / INDEX_NAME] if output.created and output.folder else []
    targets = Targets(dict.fromkeys([*output.targets, *index]), output.folder, output.states)
    refusal = None
    with signals.deferred(), Transaction(targets, fsync=options.fsync) as transaction:
        try:
            acquire(transaction, timeout=options.lock_timeout)
        except SystemRefusedError as error:
            if error.errno not in _NOTHING_CAN_BE_WRITTEN:
                raise
            # A run that has nothing to write may still succeed; its logs in some folders must not block the next run.
            transaction.withdraw()
            refusal = error
        # An ID may have been recorded within the resolution of the clock that dates files.
        if plan.once or transaction.may_be_stale or not all(shard.source.is_unchanged for shard in output.shards):
            opened = inputs.open()
            output = Output.from_options(options, opened, plan)
        for target in (*output.targets, *output.states):
            targets.locate(target)
        require_finished([*opened.local_paths, *output.states], transaction.id)
        yield opened, output._replace(transaction=None if refusal else transaction, refusal=refusal)


def open_unlocked(inputs: Inputs, options: WriteOptions) -> OpenSets:
    """Open inputs for `open_to_write`, but lock nothing: what they hold decides which of them are written.

    Another run may be replacing them right now, and what a crashed run left half changed is recovered.

    Raises:
        SystemRefusedError: another run has a target, or a crashed run left an input half changed.
    """
    if options.dry_run or options.is_elsewhere:
        return open_to_read(inputs)
    deadline = time.monotonic() + options.lock_timeout
    tries = 0
    while True:
        tries += 1
        try:
            return inputs.open()
        except SystemRefusedError as error:
            if error.problems[0].code != "changed" or (tries > _TRIES and time.monotonic() > deadline):
                raise
        except BadInputError as error:
            outcomes = [outcome for scope in inputs.scopes(error) for outcome in _recover_all_at(scope)]
            alive = [outcome for outcome in outcomes if isinstance(outcome, InUse) and outcome.log.is_unfinished]
            if alive and time.monotonic() > deadline:
                raise alive[0].error(alive[0].log.log_path.parent) from None
            if not alive and not any(isinstance(outcome, Recovered) for outcome in outcomes):
                raise
        time.sleep(_PAUSE_SECONDS)


def _recover_all_at(scope: Scope) -> Iterator[Recovered | InUse]:
    """Recover the crashed runs in a scope, and yield what became of each; raise the first error."""
    outcomes = recover_at(scope)[0] if os.path.isdir(scope.folder) else []  # noqa: PTH112 - Path's own may raise
    for outcome in outcomes:
        if isinstance(outcome, GradtoolError):
            raise outcome
        yield outcome


def acquire(transaction: Transaction, *, timeout: float = 0.0) -> None:
    """Lock the run's targets until it is closed, waiting up to `timeout` seconds for other runs.

    Crashed runs that left a target unfinished are recovered first.

    Raises:
        SystemRefusedError: another run writes a target, or a crashed run cannot be recovered.
        BadInputError: there are too many targets for a log.
    """
    deadline = time.monotonic() + timeout
    while True:
        signals.deliver()
        transaction.register()
        conflict = _conflicting_run(transaction, deadline)
        if conflict is None:
            with os_errors_about(transaction.log_folder.path):
                transaction.append(holds_locks=True, fsync=False)
            return
        transaction.withdraw()
        transaction.may_be_stale = True
        _wait(*conflict, deadline)


def _conflicting_run(transaction: Transaction, deadline: float) -> tuple[InUse, Path] | None:
    """Return a live run to wait for, and its target; a run whose ID sorts later gets a moment to withdraw."""
    patience = max(deadline, time.monotonic() + _PATIENCE_SECONDS)
    while (conflict := _find_conflict(transaction)) is not None:
        log = conflict[0].log
        if log.holds_locks or log.run < transaction.id or time.monotonic() > patience:
            return conflict
        transaction.may_be_stale = True
        _pause()
    return None


def _find_conflict(transaction: Transaction) -> tuple[InUse, Path] | None:
    """Return another live run with a target of this run, and that target; recover crashed runs."""
    for folder, names in transaction.targets.names.items():
        for run in runs_in(folder, names, except_run=transaction.id):
            if run.log is None:
                continue
            outcome = recover_if_crashed(run.log)
            # A run that only cleans up writes no target any more.
            if isinstance(outcome, InUse) and not outcome.log.ended:
                return outcome, folder.path / min(run.targets)
            transaction.may_be_stale = True
    return None


def _wait(conflict: InUse, target: Path, deadline: float) -> None:
    # If it crashes, it is recovered.
    if time.monotonic() >= deadline:
        raise conflict.error(target)
    while time.monotonic() < deadline and isinstance(recover_if_crashed(conflict.log), InUse):
        _pause()


def _pause() -> None:
    time.sleep(_POLL_SECONDS)
    signals.deliver()
