"""The hidden files that a writing run leaves beside the data while it works: their names, and removing them.

`.gradtool-ID.run` is the transaction log, in the run's home: the first folder that it writes to. Every other folder has
a pointer to it, of the same name. `.gradtool-ID.lock`, in the home, is locked while the process lives.
`.gradtool-ID-N.tmp` will replace a target, and `.gradtool-ID-N.redo` is a redo log: what will be copied into targets.
In folders that not every user may list, `.gradtool-HASH.at` is a second name of the log for each target, by which
readers find it.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import TYPE_CHECKING

from gradtool.errors import os_errors_about
from gradtool.store.fs import Folder, open_folder

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

PREFIX = ".gradtool-"
MARKER = ".at"
_NAME = re.compile(r"(\.gradtool-[0-9a-f]{12})(?:\.run|\.lock|-\d{1,9}\.(?:tmp|redo))")


def log_of(run: str) -> str:
    """The name of a transaction log and of the pointers to it."""
    return f"{run}.run"


def lock_of(run: str) -> str:
    """The name of the file that is locked while a run lives."""
    return f"{run}.lock"


def name_of(run: str, number: int, kind: str) -> str:
    """The name of a file that a run makes."""
    return f"{run}-{number}.{kind}"


def marker_of(name: str) -> str:
    """The second name of a log for one of its targets."""
    import hashlib  # slow to import

    return f"{PREFIX}{hashlib.sha256(os.fsencode(name)).hexdigest()[:24]}{MARKER}"


def run_of(name: str) -> str | None:
    """The run that a file belongs to, by its name; None if it belongs to none."""
    match = _NAME.fullmatch(name)
    return None if match is None else match[1]


def files_of_runs(folder: Folder) -> list[str]:
    """The names of all files of runs in a folder, without markers; `SystemRefusedError` if it cannot be listed."""
    with os_errors_about(folder.path):
        return sorted(name for name in folder.names() if name.startswith(PREFIX) and run_of(name))


def clear(run: str, targets: Mapping[Folder, Collection[str]], missing: Sequence[str], *, fsync: bool) -> None:
    """Remove whatever a run has made in its folders, of which the first is its home: its log and its lock last.

    Each folder comes with the names of the targets there. `missing` are the folders that the run made in its home; they
    are removed if they are empty. May be interrupted and repeated.
    """
    log, (home, *others) = log_of(run), targets
    for folder, names in targets.items():
        _remove_files(folder, run)
        status = folder.status(log)
        for marker in map(marker_of, sorted(names)):
            marked = folder.status(marker)
            if status is not None and marked is not None and os.path.samestat(status, marked):
                folder.unlink(marker)
    for folder in others:
        folder.unlink(log)
        # In a power cut, no pointer may outlive the log.
        if fsync:
            folder.sync()
    for number in range(len(missing), 0, -1):
        _unmake(home, missing[:number])
    home.unlink(log)
    home.unlink(lock_of(run))


def _remove_files(folder: Folder, run: str) -> None:
    """Remove the temporaries and the redo log of a run; folders and files that only others may remove stay."""
    for name in files_of_runs(folder):
        status = folder.status(name) if run_of(name) == run and not name.endswith((".run", ".lock")) else None
        if status is None or stat.S_ISDIR(status.st_mode):
            continue
        try:
            folder.unlink(name)
        except PermissionError:
            if status.st_uid == os.geteuid():
                raise


def _unmake(home: Folder, names: Sequence[str]) -> None:
    """Remove a folder that the run made, if it is empty."""
    with contextlib.ExitStack() as stack:
        above = home
        for name in names[:-1]:
            try:
                above = stack.enter_context(Folder(above.path / name, open_folder(name, within=above.fd)))
            except OSError:
                return
        above.unmake(names[-1])
