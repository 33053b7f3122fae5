"""The memory that the limits of this process leave.

Python raises `MemoryError` if there is none; numpy's BLAS and the safetensors library end the process instead.
"""

from __future__ import annotations

import math
import os
import resource

# What the command needs before it reads a file; most of it is numpy with its BLAS.
TO_START = 96 << 20
REMEDY = "raise the limit (ulimit -v or -d)"
# Each limit, and the field of Linux's statm with the memory that counts against it.
_LIMITS = ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5))


def left() -> float:
    """Bytes that this process may still allocate; infinite without a limit, or if the system does not say."""
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


def require(nbytes: int) -> None:
    """Raise `MemoryError` if that much is not left."""
    if left() < nbytes:
        raise MemoryError
