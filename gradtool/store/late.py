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


class Waits:
    """How often this process has waited for a file to be shown."""

    count = 0

    def taken(self) -> int:
        """Return the count since the last time, and begin again."""
        count, self.count = self.count, 0
        return count


WAITS = Waits()


def retry_until_visible(look: Callable[[], Found | None]) -> Found | None:
    """Return what a look at a file finds, tried again while the file is not there or a stale one is."""
    for pause in PAUSES:
        try:
            if (status := look()) is not None:
                return status
        except OSError as error:
            if error.errno not in _LATE:
                raise
        WAITS.count += 1
        time.sleep(pause)
    return look()
