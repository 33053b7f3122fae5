"""How far apart two vectors are, from the sums of their tiles."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from gradtool.reduction import scaled_total

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.reduction import TileSums

    # A number m·2^k as m and k, with 0.5 <= |m| < 1, or m = 0.
    Scaled = tuple[float, int]


class Figures(NamedTuple):
    """‖a-b‖/‖b‖, the cosine of the angle between a and b, and their norms."""

    rel_l2: float
    cosine: float
    norm_a: float
    norm_b: float

    @classmethod
    def of(cls, sums: Sequence[TileSums]) -> Figures:
        """The figures of the sums of (a-b)², a², b² and ab."""
        gaps, a, b, products = (scaled_total(one.sums, one.exponents) for one in sums)
        norm_a, norm_b = _root(a), _root(b)
        return cls(_quotient(_root(gaps), norm_b), _cosine(a, b, products), _number(norm_a), _number(norm_b))


def root(squares: TileSums) -> float:
    """Return the square root of the sum of squares."""
    return _number(_root(scaled_total(squares.sums, squares.exponents)))


def _root(square: Scaled) -> Scaled:
    mantissa, exponent = square
    return math.sqrt(mantissa * (1 + exponent % 2)), exponent // 2


def _number(scaled: Scaled) -> float:
    """The number, infinite where it is beyond float64."""
    try:
        return math.ldexp(*scaled)
    except OverflowError:
        return math.inf


def _quotient(x: Scaled, y: Scaled) -> float:
    """x/y, with 0/0 = 0 and any other x/0 infinite."""
    if not y[0]:
        return math.inf if x[0] else 0.0
    return _number((x[0] / y[0], x[1] - y[1]))


def _cosine(a: Scaled, b: Scaled, products: Scaled) -> float:
    """Σab / √(Σa²·Σb²), which is 1 to the last bit where a and b are the same; 1 for two zeros, 0 for one."""
    if not a[0] or not b[0]:
        return float(a[0] == b[0])
    exponent = a[1] + b[1]
    root = math.sqrt(a[0] * b[0] * (1 + exponent % 2))
    return max(-1.0, min(1.0, _number((products[0] / root, products[1] - exponent // 2))))
