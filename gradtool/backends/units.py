"""The factors of units of gradients, in numpy: this defines the bits.

The norm of a unit is the square root of the sum of its squares, which are added as in `Backend.row_sums`. If it has
more than `tuning.PATCH_ELEMENTS`, the sums of parts of that size are added in order. Where the sum of a unit of F64 is
out of range (`gradtool.reduction`), though not all of it is 0, it is divided by 2^k first, with k the exponent of its
largest magnitude.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from gradtool import tuning
from gradtool.arrays import np
from gradtool.backends.storage import STORAGE
from gradtool.backends.values import UnitCounts
from gradtool.reduction import exponent_of, is_in_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from gradtool.backends.protocol import Backend
    from gradtool.backends.values import Factors, TypedView, UnitLimits

    Floats = NDArray[np.float64]
    # Returns the stored values of elements, given the number of the first and how many.
    Values = Callable[[int, int], memoryview]


def unit_factors(  # noqa: PLR0917 - those of the method, and the backend
    backend: Backend, grads: TypedView, params: TypedView, size: int, limits: UnitLimits, factors: Factors
) -> UnitCounts:
    """Set the factors of consecutive units of `size` elements, as `Backend.unit_factors`."""
    count = len(grads.view) // (STORAGE[grads.dtype].itemsize * size)
    norms = [norms_of(partial(_part, side), side.dtype, range(count), size, backend) for side in (grads, params)]
    return set_factors(norms[0], norms[1], limits, grads.dtype, factors)


def set_factors(grads: Floats, params: Floats, limits: UnitLimits, dtype: str, factors: Factors) -> UnitCounts:
    """Set the factors of units with these norms; a norm that is NaN makes its factor NaN."""
    work, result = STORAGE[dtype].work, np.asarray(factors)
    with np.errstate(all="ignore"):
        maximum, unscaled = limits.ratio * np.maximum(params, limits.eps), grads / limits.unscale
        result[:] = np.where(unscaled <= maximum, 1.0, maximum / unscaled) / limits.unscale
        rounded, unclipped = result.astype(work), np.array(1 / limits.unscale).astype(work)
        is_beyond = (np.abs(rounded) < np.finfo(work).tiny) & (result != 0) | np.isinf(rounded)
    return UnitCounts(
        clipped=int(np.count_nonzero(rounded != unclipped)),
        changed=int(np.count_nonzero(rounded != 1)),
        nonfinite=int(np.count_nonzero(~np.isfinite(params))),
        beyond=int(np.argmax(is_beyond)) if is_beyond.any() else -1,
    )


def norms_of(values: Values, dtype: str, units: range, size: int, backend: Backend) -> Floats:
    """Compute the norms of consecutive units."""
    if size > tuning.PATCH_ELEMENTS:
        sums = np.array([sum(_sums_of_parts(values, dtype, unit * size, size, backend)) for unit in units])
    else:
        count, center = len(units), np.zeros(len(units))
        sums = backend.row_sums(values(units.start * size, count * size), dtype, count, size, center)
    norms: Floats = np.sqrt(sums)
    if dtype == "F64":
        for row, unit in enumerate(units):
            if not is_in_range(sums[row]):
                norms[row] = _scaled_norm(values, unit * size, size, backend)
    return norms


def _part(side: TypedView, start: int, elements: int) -> memoryview:
    itemsize = STORAGE[side.dtype].itemsize
    return side.view[start * itemsize : (start + elements) * itemsize]


def _sums_of_parts(values: Values, dtype: str, start: int, size: int, backend: Backend) -> Iterator[float]:
    for at in range(0, size, tuning.PATCH_ELEMENTS):
        columns = min(tuning.PATCH_ELEMENTS, size - at)
        yield float(backend.row_sums(values(start + at, columns), dtype, 1, columns, np.zeros(1))[0])


def _scaled_norm(values: Values, start: int, size: int, backend: Backend) -> float:
    """Compute the norm of a unit of F64 that is divided by a power of two first."""
    patch = tuning.PATCH_ELEMENTS
    parts = [(start + at, min(patch, size - at)) for at in range(0, size, patch)]
    largest = float(np.max([np.max(np.abs(np.frombuffer(values(*part), np.float64))) for part in parts]))
    if not 0 < largest < math.inf:
        return largest
    exponent = exponent_of(largest)

    def scaled(first: int, elements: int) -> memoryview:
        return np.ldexp(np.frombuffer(values(first, elements), np.float64), -exponent).data.cast("B")

    return float(np.ldexp(math.sqrt(sum(_sums_of_parts(scaled, "F64", start, size, backend))), exponent))
