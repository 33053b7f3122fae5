"""What a run that died left unfinished: gone on with, or taken back. All of it may be done twice, or half and again."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import GradtoolError, SystemRefusedError, from_os_error
from gradtool.store import system
from gradtool.store.commit import files_of, is_new, move_back
from gradtool.store.locks import claim, holding, lock
from gradtool.store.records import HOST, boot, files_of_runs, home_of, read_record, records_in, run_of
from gradtool.store.run import append_step, remove
from gradtool.store.undo import Heartbeat, put_back

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from gradtool.store.records import Record
    from gradtool.store.unfinished import Place

# A run writes to its record or its journal just before it writes to a target, so one that was written to so much later
# was written to by somebody else. After a power cut what is on the disk of those times may be older than they were.
_GRACE_NS = 10**9
_GRACE_AFTER_POWER_CUT_NS = 10 * 10**9


class Recovered(NamedTuple):
    """What became of a run that died: its files are all new ("finished"), all old ("undone"), or were never touched."""

    outcome: str
    files: int
    pid: int
    record: Path


class InUse(NamedTuple):
    """A run that is alive."""

    record: Record

    def error(self, target: Path) -> SystemRefusedError:
        """The error for whoever would have written to one of its targets."""
        message = f"in use by {self.record.who}; --lock-timeout SECONDS waits for it"
        return SystemRefusedError(message, file=target, code="in-use")


def settle(record: Record, *, force: bool = False) -> Recovered | InUse | None:
    """Bring a run to its end if it died; None if it has come to it by itself.

    With `force`, files that were changed since are brought to where they would be, too.

    Raises:
        SystemRefusedError: a file was changed since, or reading or writing failed; it can be tried again.
    """
    home = home_of(record)
    if home is None:
        return None
    with holding(home.path.parent):
        fd = claim(home)
    if fd is None:
        return InUse(home) if home.path.exists() else None
    try:
        # It may have got further between our look at it and its end.
        home = read_record(home.path) or home
        return _recover(home, fd, force=force)
    finally:
        os.close(fd)


def sweep(folder: Path) -> int:
    """Remove the files of runs of which there is no record, or none that says anything; how many those were.

    Raises:
        SystemRefusedError: the folder cannot be read.
    """
    with holding(folder):
        names = files_of_runs(folder)
        runs = {run for name in names if (run := run_of(name)) and not _is_known(folder, run)}
        return sum(run_of(name) in runs and not _is_folder(folder / name) and remove(folder / name) for name in names)


def _is_folder(path: Path) -> bool:
    """Whether somebody gave a folder the name of a file of ours."""
    return os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114 - Path's own may raise


def _is_known(folder: Path, run: str) -> bool:
    """Whether a record speaks for a run, or whoever makes it has not come to write it yet."""
    path = folder / f"{run}.run"
    if read_record(path) is not None:
        return True
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return os.path.lexists(path)
    try:
        return not stat.S_ISREG(os.fstat(fd).st_mode) or lock(fd) is False
    finally:
        os.close(fd)


def _recover(home: Record, fd: int, *, force: bool) -> Recovered:
    if home.owner != os.geteuid() and os.geteuid() != 0:
        raise SystemRefusedError(
            f"is the record of a run that user {home.owner} left unfinished; gradtool recover is theirs to run",
            file=home.path,
            code="unfinished",
        )
    names = _names(home)
    with _as_gradtool_errors(home.path):
        # What we go by must not be lost when what we do is not. Its time of change stays: that is gone by, too.
        system.sync(fd)
        if home.is_unfinished:
            _bring_to_an_end(home, fd, names, force=force)
            if len(home.folders) > 1:
                _append(fd, **{"done" if home.outcome == "finished" else "undone": True})
        _remove_all(home, [home.folders[number] for number in names])
    return Recovered(home.outcome, len(home.moves or home.changes), home.pid, home.path)


def _names(home: Record) -> dict[int, frozenset[str]]:
    """The targets in each folder of a run; of others than its home, only where a pointer agrees.

    So nobody can make a record that reaches into a folder of somebody else.
    """
    names = {0: home.names}
    for number, folder in enumerate(home.folders[1:], 1):
        pointer = read_record(folder / home.path.name)
        if pointer is not None and pointer.home == home.path:
            names[number] = pointer.names
        elif home.is_unfinished:
            raise SystemRefusedError(
                f"belongs to an unfinished run that has files in {folder}, too, where its record is missing; bring "
                f"that folder back, or delete {home.run}* here to keep the data as they are",
                file=home.path,
                code="unfinished",
            )
    return names


def _bring_to_an_end(home: Record, fd: int, names: dict[int, frozenset[str]], *, force: bool) -> None:
    targets = [(one.folder, one.name) for one in home.moves] + [(one.folder, one.name) for one in home.changes]
    if any(name not in names[folder] for folder, name in targets):
        raise SystemRefusedError("is about files that it does not name; delete it", file=home.path, code="unfinished")
    if home.changes:
        _put_back(home, fd, force=force)
        return
    if home.revoked:
        if not force:
            _refuse_foreign_moves(home)
        _take(home, fd)
        move_back(home.folders, home.run, home.moves, fsync=True)
        return
    _go_on(home, fd, force=force)


def _append(fd: int, **entry: Any) -> None:
    append_step(fd, os.fstat(fd).st_size, fsync=True, **entry)


def _take(home: Record, fd: int) -> None:
    """Say in the record who works on it now, once it is sure that we do."""
    # A torn line would hide what we add.
    system.resize(fd, home.size)
    with contextlib.suppress(OSError):
        # A disk may be too full for that.
        _append(fd, taken={"pid": os.getpid(), "host": HOST})


def _refuse_foreign_moves(home: Record) -> None:
    """Where a rename that was done is to be taken back, its result must still be there."""
    for move in home.moves:
        target, temporary, backup = files_of(home.folders, home.run, move)
        if os.path.lexists(temporary) or is_new(target, move) or not os.path.lexists(backup):
            continue
        if not os.path.lexists(target) or not os.path.samestat(target.lstat(), backup.lstat()):
            raise _changed_since(home, target)


def _go_on(home: Record, fd: int, *, force: bool) -> None:
    """Do the renames that are still to be done."""
    left = []
    for move in home.moves:
        target, temporary, _ = files_of(home.folders, home.run, move)
        try:
            if not stat.S_ISREG(temporary.lstat().st_mode):
                continue
        except FileNotFoundError:
            continue  # Renamed before.
        left.append((temporary, target))
        try:
            now = target.lstat()
        except FileNotFoundError:
            continue
        if not force and (now.st_size, now.st_mtime_ns) != (move.size, move.mtime_ns):
            raise _changed_since(home, target)
    _take(home, fd)
    for temporary, target in left:
        system.rename(temporary, target)
    # Those that the run did itself may not be on the disk either.
    for folder in home.folders:
        system.sync_path(folder)


def _put_back(home: Record, fd: int, *, force: bool) -> None:
    """Give every file its old content."""
    folder = home.path.parent
    segments = [folder / name for name in files_of_runs(folder) if run_of(name) == home.run and name.endswith(".undo")]
    if not segments:
        # It had not come to write anything.
        _take(home, fd)
        return
    latest = max(home.mtime_ns, *(path.stat().st_mtime_ns for path in segments))
    targets = {}
    grace = _GRACE_NS if home.boot and home.boot == boot() else _GRACE_AFTER_POWER_CUT_NS
    for number, change in enumerate(home.changes):
        target = home.folders[change.folder] / change.name
        now = target.lstat() if os.path.lexists(target) else None
        if now is None or not stat.S_ISREG(now.st_mode) or now.st_size != change.size:
            now = None
        if not force and (now is None or now.st_ino != change.inode or now.st_mtime_ns > latest + grace):
            raise _changed_since(home, target)
        if now is not None:
            targets[number] = (target, now)
    _take(home, fd)
    put_back(targets, segments, fsync=True, before_each=Heartbeat(fd, fsync=True))


def _changed_since(home: Record, target: Path) -> SystemRefusedError:
    return SystemRefusedError(
        f"was written to by somebody else after a run ({home.who}) died that had not finished with it; to keep it as "
        f"it is, delete {home.run}* beside it, or have the run brought to its end with gradtool recover --force",
        file=target,
        code="unfinished",
    )


def _remove_all(home: Record, folders: Collection[Path]) -> None:
    """Remove what the run left, its record at the very last."""
    for folder in folders:
        for name in files_of_runs(folder):
            if run_of(name) == home.run and not name.endswith(".run") and not _is_folder(folder / name):
                system.unlink(folder / name)
    for folder in folders:
        if folder != home.path.parent:
            system.unlink(folder / home.path.name)
    # That a pointer is gone must be on the disk before its record is; the run may have removed it itself.
    for folder in home.folders[1:]:
        if folder.is_dir():
            system.sync_path(folder)
    system.unlink(home.path)


@contextlib.contextmanager
def _as_gradtool_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except SystemRefusedError:
        raise
    except OSError as error:
        raise from_os_error(error, error.filename or path) from error


def recover_at(place: Place, *, force: bool = False) -> tuple[list[Recovered | InUse | GradtoolError], int]:
    """Bring every run to its end that died and is about a place; and remove what lies there and nobody owns.

    What became of each, or why it could not be done; and how many files were removed that belonged to no run.

    Raises:
        SystemRefusedError: the folder cannot be looked at.
        BadInputError: there is no such folder.
    """
    found: list[Recovered | InUse | GradtoolError] = []
    for record in records_in(place.folder):
        if place.name is None or place.name in record.names:
            try:
                found += filter(None, [settle(record, force=force)])
            except GradtoolError as error:
                found.append(error)
    return found, sweep(place.folder)
