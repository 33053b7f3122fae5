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
import threading
from functools import partial
from typing import TYPE_CHECKING

from gradtool.errors import os_errors_about

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradtool.store.fs import File, Folder

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


def remove(folder: Folder, name: str) -> bool:
    """Remove a file that is no longer needed; whether that succeeded."""
    return succeeds(partial(folder.unlink, name))


def succeeds(call: Callable[[], None]) -> bool:
    """Whether a call succeeds, tried twice."""
    for _ in range(2):
        with contextlib.suppress(OSError):
            call()
            return True
    return False


def remove_all(files: Sequence[File]) -> bool:
    """Remove files in parallel, because freeing a large one takes as long as a pass over it; whether all are gone."""
    threads, left = [], list(files)
    with contextlib.suppress(RuntimeError):  # No more threads can be started.
        while len(left) > 1:
            thread = threading.Thread(target=remove, args=(left[-1].folder, left[-1].name))
            thread.start()
            threads.append(thread)
            left.pop()
    for file in left:
        remove(file.folder, file.name)
    for thread in threads:
        thread.join()
    return not any(file.is_there for file in files)
