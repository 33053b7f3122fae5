"""Arrays of the standard library, and numpy for whoever needs more: imported when it is first used.

The import takes longer than all else that a call on a few tensors does, and the compiled kernels do without it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np
else:

    class _Numpy:
        def __getattr__(self, name: str) -> Any:
            found = getattr(importlib.import_module("numpy"), name)
            setattr(self, name, found)
            return found

    np = _Numpy()

__all__ = ["float64s", "int32s", "int64s", "np", "quiet", "uint64s"]


def float64s(count: int) -> array[float]:
    """So many zeros."""
    return array("d", bytes(8 * count))


def int32s(count: int) -> array[int]:
    """So many zeros."""
    return array("i", bytes(4 * count))


def int64s(count: int) -> array[int]:
    """So many zeros."""
    return array("q", bytes(8 * count))


def uint64s(count: int) -> array[int]:
    """So many zeros."""
    return array("Q", bytes(8 * count))


def quiet() -> AbstractContextManager[object]:
    """Without numpy's warnings of NaN, Inf and overflow, in this thread: they are results, and are counted.

    Where numpy is not imported yet, nothing warns; the functions that may be the first to import it have their own.
    """
    return np.errstate(all="ignore") if "numpy" in sys.modules else contextlib.nullcontext()
