"""Explains why the system refuses to write: how much space is missing, and which option writes elsewhere.

Loaded only to explain such an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradtool.errors import option, say
from gradtool.store.system import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.errors import SystemRefusedError, Text
    from gradtool.store.io.destination import NewFile
    from gradtool.store.transaction.output import Output
    from gradtool.store.transaction.staging import Staged

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, *_FULL)


def explain(error: SystemRefusedError, output: Output, files: Sequence[NewFile], staged: Sequence[Staged]) -> None:
    """Add to an error of writing files what is missing, and what to do; `staged` are those that have their space."""
    problem, *others = error.problems
    if error.errno not in _REFUSED or others or problem.file is None or _is_state(problem.file, output):
        return
    message = problem.message
    if error.errno == errno.ENOSPC and not output.options.in_place:
        message += _missing_space(output, files, staged)
    advice = _advice(output, "disk" if error.errno in _FULL else "folder")
    hint = say("{}, or {}", problem.hint, advice) if problem.hint else advice
    error.problems = (replace(problem, message=message, hint=hint),)


def _is_state(path: str, output: Output) -> bool:
    """Check whether a path is about a state, which no output option moves, and not about gradients."""
    targets = {str(name) for file in output.targets for name in (file, file.parent)}
    return path not in targets and path in {str(name) for file in output.states for name in (file, file.parent)}


def _advice(output: Output, place: str) -> Text:
    """Return the option of this call that writes elsewhere."""
    options = output.options
    if options.is_elsewhere:
        return say("use another {} for {}", place, option("output" if options.output is not None else "output_dir"))
    is_single = len(output.shards) == 1 and not any(gradset.index for gradset in output.sets)
    name = option("output" if is_single else "output_dir")
    if options.in_place:
        return say("use {} instead of {}", name, option("write", "inplace"))
    return say("use {} to write to another {}", name, place)


def _missing_space(output: Output, files: Sequence[NewFile], staged: Sequence[Staged]) -> str:
    """Say how much space new files need on a disk that has less, and how much was free before they were made."""
    needed: dict[int, int] = defaultdict(int)
    free: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for new in files:
            folder = Path(os.path.realpath(output.target_of(new.shard.name))).parent
            device, disk = folder.stat().st_dev, os.statvfs(folder)
            size = new.size if new.ranges is None else sum(end - begin for begin, end in new.ranges)
            needed[device] += -(-size // disk.f_frsize) * disk.f_frsize
            free[device] = disk.f_bavail * disk.f_frsize
        for each in staged:
            status = each.temporary.path.lstat()
            free[status.st_dev] += status.st_blocks * BLOCK
        for device, nbytes in needed.items():
            if nbytes > free[device]:
                return f": new files need {nbytes:,} bytes here, {free[device]:,} are free"
    return ""
