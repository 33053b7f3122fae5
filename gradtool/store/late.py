"""Files that another machine has just made or replaced: a shared file system may show that a moment late."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")

# After the last, a file that is not there is missing.
PAUSES = (0.05, 0.2, 0.5, 1.0)
_LATE = (errno.ENOENT, errno.ESTALE)


def patiently(look: Callable[[], Found | None]) -> tuple[Found | None, int]:
    """What a look at a file finds, tried again while it is not there or a stale one is; and how often it was."""
    for tries, pause in enumerate(PAUSES):
        try:
            if (found := look()) is not None:
                return found, tries
        except OSError as error:
            if error.errno not in _LATE:
                raise
        time.sleep(pause)
    return look(), len(PAUSES)
