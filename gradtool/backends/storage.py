"""The storage types that carry values: from stored codes to numbers, and from numbers to codes.

Widening is exact, to float64 for F64 and to float32 for all others. Narrowing rounds once, to nearest even, and writes
every NaN as the type's quiet NaN, so that no result depends on how a processor passes on the sign and the payload of a
NaN. A value that overflows the type becomes infinite, or in F8_E4M3, which has no infinity, the quiet NaN.

Formats: IEEE 754 binary64/32/16, bfloat16, and FP8 as in "FP8 Formats for Deep Learning" (arXiv:2209.05433).
"""

from __future__ import annotations

import math
from array import array
from functools import cache
from typing import TYPE_CHECKING, Any

from gradtool.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Storage:
    """A storage type: its number in the compiled kernels, the width of its two fields, and what follows from them.

    `overflow` is the first code that is infinite or NaN. `top`, `normal` and `least` are exponents of `math.frexp`: of
    the largest number, of the smallest normal number, and of the smallest number other than 0.
    """

    def __init__(self, name: str, code: int, exponent_bits: int, mantissa_bits: int, *, has_infinity: bool) -> None:
        """Declare a type with a sign bit, an exponent field and a mantissa."""
        self.name, self.code, self.exponent_bits, self.mantissa_bits = name, code, exponent_bits, mantissa_bits
        width, step, bias = exponent_bits + mantissa_bits, 1 << mantissa_bits, 2 ** (exponent_bits - 1) - 1
        self.itemsize = (1 + width) // 8
        self.overflow = 2**width - (step if has_infinity else 1)
        self.quiet_nan = self.overflow + step // 2 if has_infinity else self.overflow
        self.top, self.normal = (self.overflow - 1) // step + 1 - bias, 2 - bias
        self.least = self.normal - mantissa_bits

    @property
    def bits(self) -> np.dtype[Any]:
        """The type of its codes."""
        return np.dtype(f"u{self.itemsize}")

    @property
    def work(self) -> np.dtype[Any]:
        """The type of its values, and of the factors that they are multiplied by."""
        return np.dtype(np.float64 if self.name == "F64" else np.float32)

    @property
    def bounds(self) -> tuple[int, int]:
        """The codes of the smallest normal value, and of the largest finite value."""
        return 1 << self.mantissa_bits, self.overflow - 1

    @property
    def largest(self) -> float:
        """The largest finite value."""
        mantissa = 2**self.mantissa_bits + (self.overflow - 1) % 2**self.mantissa_bits
        return math.ldexp(mantissa, self.top - 1 - self.mantissa_bits)

    @property
    def bins(self) -> range:
        """The exponents that values are counted by, in order: those of float32 for all types but F64."""
        storage = self if self.name == "F64" else STORAGE["F32"]
        return range(storage.least, storage.top + 1)

    def codes_at(self, block: memoryview, offset: int, elements: int) -> NDArray[Any]:
        """Copy codes from byte `offset` of a block on. A tensor can have any address; the copy is aligned."""
        return np.frombuffer(block, np.uint8, elements * self.itemsize, offset).copy().view(self.bits)

    def values_at(self, block: memoryview, offset: int, elements: int) -> NDArray[Any]:
        """Return the values from byte `offset` of a block on, as a new array of the type `work`."""
        return self.widen(self.codes_at(block, offset, elements))

    def store(self, values: NDArray[np.float64], block: memoryview, offset: int = 0) -> None:
        """Round float64 values once, and write them from byte `offset` of a block on."""
        codes = self.narrow_wide(values)
        np.frombuffer(block, np.uint8, codes.nbytes, offset)[:] = codes.view(np.uint8)

    def widen(self, codes: NDArray[Any]) -> NDArray[Any]:
        """Return the values of codes, as a new array of the type `work`."""
        values: NDArray[Any]
        if self.itemsize >= 4:  # noqa: PLR2004 - float32 and float64 are stored as they are
            values = codes.view(self.work).copy()
        elif self.name == "BF16":
            values = (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            values = _values(self)[codes]
        return values

    def narrow(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the codes of values of the type `work`, each rounded once to nearest even."""
        if self.itemsize >= 4:  # noqa: PLR2004
            codes = values.view(self.bits).copy()
        elif self.name == "BF16":
            codes = _round_shift(values.view(np.uint32), 16).astype(self.bits)
        else:
            codes = _narrow_small(self, values)
        codes[np.isnan(values)] = self.quiet_nan
        return codes

    def narrow_wide(self, values: NDArray[np.float64]) -> NDArray[Any]:
        """Return the codes of float64 values, each rounded once to nearest even."""
        if self.work == values.dtype:
            return self.narrow(values)
        singles = values.astype(np.float32)
        return self.narrow(singles if self.name == "F32" else _to_odd(singles, values))

    def value_of(self, code: int) -> float:
        """Return the number of a code that is not infinite or NaN."""
        exponent, mantissa = divmod(code & (2 ** (8 * self.itemsize - 1) - 1), 1 << self.mantissa_bits)
        significand = mantissa + (min(exponent, 1) << self.mantissa_bits)
        value = math.ldexp(significand, max(exponent, 1) + self.least - 2)
        return -value if code >> (8 * self.itemsize - 1) else value

    def rounded(self, value: float) -> float:
        """Round a number once to this type, to nearest even."""
        if self.itemsize >= 4 or math.isnan(value):  # noqa: PLR2004
            return array("d" if self.name == "F64" else "f", [value])[0]
        # The exponent of the last place; Python rounds to even, too.
        place = max(math.frexp(value)[1], self.normal) - 1 - self.mantissa_bits
        units = math.ldexp(abs(value), -place) if abs(value) <= 2 * self.largest else math.inf
        if units == math.inf or math.ldexp(round(units), place) > self.largest:
            return math.nan if self.overflow == self.quiet_nan else math.copysign(math.inf, value)
        return math.copysign(math.ldexp(round(units), place), value)


# From the longest mantissa to the shortest. The C and CUDA kernels have the same table in _codes.h.
STORAGE = {
    name: Storage(name, code, exponent_bits, mantissa_bits, has_infinity=has_infinity)
    for code, (name, exponent_bits, mantissa_bits, has_infinity) in enumerate(
        (
            ("F64", 11, 52, True),
            ("F32", 8, 23, True),
            ("F16", 5, 10, True),
            ("BF16", 8, 7, True),
            ("F8_E4M3", 4, 3, False),
            ("F8_E5M2", 5, 2, True),
        )
    )
}


@cache
def _values(storage: Storage) -> NDArray[np.float32]:
    """Compute the value of every code of a type of 16 bits or fewer, by its definition."""
    codes = np.arange(2 ** (8 * storage.itemsize))
    width = storage.exponent_bits + storage.mantissa_bits
    magnitude = codes & (2**width - 1)
    exponent, mantissa = magnitude >> storage.mantissa_bits, magnitude & (2**storage.mantissa_bits - 1)
    bias = 2 ** (storage.exponent_bits - 1) - 1
    significand = np.where(exponent > 0, 2**storage.mantissa_bits + mantissa, mantissa)
    values = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - bias - storage.mantissa_bits)
    values[magnitude > storage.overflow] = np.nan
    values[magnitude == storage.overflow] = np.nan if storage.overflow == storage.quiet_nan else np.inf
    signed: NDArray[np.float32] = np.where(codes >> width, -values, values).astype(np.float32)
    return signed


def _round_shift(bits: NDArray[np.uint32], shift: int) -> NDArray[np.uint32]:
    """Remove the lowest `shift` bits, rounding to nearest even; a carry into the exponent is correct."""
    odd = (bits >> np.uint32(shift)) & np.uint32(1)
    return (bits + np.uint32((1 << (shift - 1)) - 1) + odd) >> np.uint32(shift)


def _to_odd(singles: NDArray[np.float32], values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round `values` to odd; `singles` are the same values rounded to nearest.

    An inexact value is truncated, and its last bit set to 1. A float32 has bits to spare, so that a second rounding, to
    fewer bits, gives what a single rounding of the float64 would (S. Boldo and G. Melquiond, "Emulation of FMA and
    correctly rounded sums: proved algorithms using rounding to odd").
    """
    bits = singles.view(np.uint32)
    cut = bits - (np.abs(singles) > np.abs(values)) | np.uint32(1)
    return np.where((singles == values) | np.isnan(values), bits, cut).view(np.float32)


def _narrow_small(storage: Storage, values: NDArray[np.float32]) -> NDArray[Any]:
    bits = values.view(np.uint32)
    bias = 2 ** (storage.exponent_bits - 1) - 1
    magnitude = bits & np.uint32(0x7FFF_FFFF)
    rebias = np.uint32((127 - bias) << 23)
    normal = np.minimum(_round_shift(magnitude - rebias, 23 - storage.mantissa_bits), np.uint32(storage.overflow))
    # Below the normal range all codes are one step apart. The sum with a power of two whose last place is that step is
    # rounded to a whole number of steps, and its low bits are that number.
    anchor = np.float32(2.0 ** (24 - bias - storage.mantissa_bits))
    subnormal = (np.abs(values) + anchor).view(np.uint32) - anchor.view(np.uint32)
    is_subnormal = magnitude < rebias + np.uint32(1 << 23)
    sign = (bits >> np.uint32(31)) << np.uint32(storage.exponent_bits + storage.mantissa_bits)
    unsigned = np.where(is_subnormal, subnormal, normal)
    codes: NDArray[Any] = np.where(unsigned == storage.quiet_nan, unsigned, sign | unsigned).astype(storage.bits)
    return codes
