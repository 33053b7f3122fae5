"""Arrays of the standard library, and numpy for whoever needs more: imported when it is first used.

The import takes longer than all else that a call on a few tensors does, and the compiled kernels do without it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np
else:

    class _Numpy:
        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module("numpy"), name)
            setattr(self, name, value)
            return value

    np = _Numpy()

__all__ = ["float64s", "int32s", "int64s", "np", "quiet", "uint64s"]


def _zeros(typecode: str, count: int) -> array[Any]:
    return array(typecode, bytes(array(typecode).itemsize * count))


# Each makes an array of so many zeros.
float64s, int32s, int64s, uint64s = (partial(_zeros, typecode) for typecode in "diqQ")


def quiet() -> AbstractContextManager[object]:
    """Suppress numpy's warnings of NaN, Inf and overflow in this thread: they are results, and are counted.

    Where numpy is not imported yet, nothing warns; the functions that may be the first to import it have their own.
    """
    return np.errstate(all="ignore") if "numpy" in sys.modules else contextlib.nullcontext()
