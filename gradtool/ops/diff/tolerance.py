"""How close two values should be by their types, and how many of the elements of each type are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.backends.storage import STORAGE
from gradtool.backends.values import Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.options import DiffOptions
    from gradtool.store.format.gradset import Selected

# The absolute and the relative tolerance of each type. Those of torch.testing.assert_close, which has none for 8 bits;
# there, one unit in the last place.
_USUAL = {
    "F64": (1e-7, 1e-7),
    "F32": (1e-5, 1.3e-6),
    "F16": (1e-5, 1e-3),
    "BF16": (1e-5, 1.6e-2),
    "F8_E4M3": (1e-5, 2.0**-3),
    "F8_E5M2": (1e-5, 2.0**-2),
}
_NEAR = 1e-3


@dataclass(frozen=True)
class ToleranceRow:
    """The elements whose coarser type is `dtype`: those with |a - b| <= atol + rtol·|b| are `close`.

    The tolerance is the `usual` one of the type unless the call has another.
    """

    dtype: str
    usual: bool
    rtol: float
    atol: float
    elements: int
    close: int


def is_usual(options: DiffOptions) -> bool:
    """Check whether a call has no tolerance, so that the usual ones apply."""
    return options.rtol is None and options.atol is None


def tolerances_of(options: DiffOptions, dtypes: Sequence[str]) -> list[Tolerance]:
    """Return the tolerance of each tensor: that of the options or, without one, the usual one of its coarser type."""
    if is_usual(options):
        return [Tolerance(*_USUAL[dtype], _NEAR) for dtype in dtypes]
    return [Tolerance(options.atol or 0.0, options.rtol or 0.0, _NEAR)] * len(dtypes)


def coarser_types(a: Sequence[Selected], b: Sequence[Selected]) -> list[str]:
    """Return the type with the shorter mantissa, of each two tensors."""
    return [max(x.dtype, y.dtype, key=lambda dtype: STORAGE[dtype].code) for (_, x), (_, y) in zip(a, b, strict=True)]


def tolerance_rows(
    options: DiffOptions, dtypes: Sequence[str], elements: Sequence[int], not_close: Sequence[int]
) -> Iterator[ToleranceRow]:
    """Yield a row for each type, from the types of the tensors, their elements, and how many of these are not close."""
    for dtype in sorted(set(dtypes), key=list(STORAGE).index):
        numbers = [number for number, other in enumerate(dtypes) if other == dtype]
        count, outside = (sum(column[number] for number in numbers) for column in (elements, not_close))
        (tolerance,) = tolerances_of(options, [dtype])
        yield ToleranceRow(dtype, is_usual(options), tolerance.relative, tolerance.absolute, count, count - outside)
