"""How much memory the limits of this process leave: asked before a library would end us for want of it.

What Python cannot get is a `MemoryError`. numpy's BLAS and the safetensors library end the process instead.
"""

from __future__ import annotations

import math
import os
import resource

# What the command takes from its first line until it reads a file; most of it is numpy, with its BLAS.
TO_START = 96 << 20
REMEDY = "raise the limit (ulimit -v or -d)"
# Which limits there are, and the field of Linux's statm that counts what is taken.
_LIMITS = ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5))


def left() -> float:
    """Bytes that this process may still take; infinite where there is no limit, or where the system does not say."""
    limits = [(resource.getrlimit(kind)[0], field) for kind, field in _LIMITS]
    limits = [(limit, field) for limit, field in limits if limit != resource.RLIM_INFINITY]
    if not limits:
        return math.inf
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 - pathlib is slow to import
            taken = [int(pages) * os.sysconf("SC_PAGESIZE") for pages in file.read().split()]
    except OSError:
        return math.inf
    return min(limit - taken[field] for limit, field in limits)


def is_limited() -> bool:
    """Whether there is such a limit."""
    return left() < math.inf


def require(nbytes: int) -> None:
    """Raise `MemoryError` if so much is not to be had."""
    if left() < nbytes:
        raise MemoryError
