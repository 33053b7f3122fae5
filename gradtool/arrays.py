"""Arrays of the standard library, and numpy, which is imported when it is first used.

That import takes longer than all else that a call on a few tensors does, and the compiled kernels do without numpy.
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


# Each makes an array of zeros, given how many.
float64s, int32s, int64s, uint64s = (partial(_zeros, typecode) for typecode in "diqQ")


def quiet() -> AbstractContextManager[object]:
    """Suppress numpy's warnings of NaN, Inf and overflow in this thread: they are results, and are counted.

    Before numpy is imported, there is nothing to suppress; functions that may import it suppress them.
    """
    return np.errstate(all="ignore") if "numpy" in sys.modules else contextlib.nullcontext()
