"""Small files that are written whole, together with the data: indexes, and the state that a later call reads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import UsageError, from_os_error
from gradtool.store import fs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.transaction.replace import Replacement


class SmallFile(NamedTuple):
    """An index or a state to be written: its path, its status when it was read, and the new content.

    Without `stat` it is created.
    """

    path: Path
    stat: os.stat_result | None
    content: bytes


def write_small(replacement: Replacement, file: SmallFile, *, is_new: bool) -> None:
    """Stage a small file and write its content; if `is_new`, it may not exist when it is put in its place."""
    staged = replacement.stage(file.path, len(file.content), file.stat, is_new=is_new)
    try:
        with staged.opened(os.O_WRONLY) as fd:
            fs.write_all(fd, [file.content], 0)
    except OSError as error:
        raise from_os_error(error, file.path) from error


def check_not_replaced(sets: Sequence[GradientSet], what: str, targets: Sequence[Path]) -> None:
    """Raise `UsageError` for a target that is a file of sets that are only read; `what` they are."""
    files = [path for one in sets for path in (*(shard.path for shard in one.shards), one.index) if path is not None]
    read = set(map(os.path.realpath, files))
    for target in targets:
        if os.path.realpath(target) in read:
            raise UsageError(f"{target} is a file of {what}, which would be replaced; write to another file")


def check_states(targets: Sequence[Path], states: Sequence[Path]) -> None:
    """Raise `UsageError` for a state that is the file of a gradient or an index, which are written too."""
    real = {os.path.realpath(target) for target in targets}
    for state in states:
        if os.path.realpath(state) in real:
            raise UsageError(f"--state {state} is a file that the gradients are written to; give it another name")
