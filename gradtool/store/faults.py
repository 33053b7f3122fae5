"""Faults for tests: `GRADTOOL_FAULT=KIND@N` strikes at the Nth call that changes the disk.

`kill` ends the process before the call, `tear` after half of what it writes, `short` makes it write half. The name of a
signal, such as `SIGTERM`, sends that before the call; the name of an error, such as `ENOSPC`, makes the call fail with
it. With `@N+`, all later calls are struck too.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
from typing import TYPE_CHECKING

from gradtool.store.system import SECTOR

if TYPE_CHECKING:
    from collections.abc import Sequence

# Counted up by each call that changes the disk.
steps = itertools.count(1)


def step() -> str | None:
    """Count a call that changes the disk, and strike if it is due; what is left to the caller: `short` or `tear`."""
    fault = os.environ.get("GRADTOOL_FAULT")
    if not fault:
        return None
    kind, _, number = fault.partition("@")
    now, first = next(steps), int(number.removesuffix("+"))
    if now != first and not (now > first and number.endswith("+")):
        return None
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[kind])
        return None
    if kind in ("short", "tear"):
        return kind
    raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))


def write_half(kind: str, fd: int, views: Sequence[memoryview], begin: int) -> int:
    """Write half of the views, and after `tear` be killed; the bytes written."""
    content = b"".join(views)
    if kind == "short":
        return os.pwrite(fd, content[: -(-len(content) // 2)], begin)
    # Half of the sectors; none of them partly.
    middle = begin + len(content) // 2
    os.pwrite(fd, content[: max(0, middle - middle % SECTOR - begin)], begin)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0
