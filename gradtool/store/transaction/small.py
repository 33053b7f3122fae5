"""Small files that are written whole, together with the data: indexes, and the state that a later call reads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gradtool.errors import from_os_error
from gradtool.store import fs

if TYPE_CHECKING:
    from gradtool.store.source import SmallFile
    from gradtool.store.transaction.replace import Replacement


def write_small(replacement: Replacement, file: SmallFile, *, is_new: bool) -> None:
    """Stage a small file and write its content; if `is_new`, it may not exist when it is put in its place."""
    staged = replacement.stage(file.path, len(file.content), file.stat, is_new=is_new)
    try:
        with staged.opened(os.O_WRONLY) as fd:
            fs.write_all(fd, [file.content], 0)
    except OSError as error:
        raise from_os_error(error, file.path) from error
