"""Bounds on metrics as texts, such as `cosine>=0.9` and, in units of something else, `norm<=5x`."""

from __future__ import annotations

import operator
import re
from typing import NamedTuple, Self

_SIGNS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_PARTS = re.compile(r"([a-z0-9_]+)(?: *([<>]=?) *(-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]+)?)(x?))?")


class Bound(NamedTuple):
    """A metric, a sign and a number, with the unit `x` or none. A word alone is a metric without the others."""

    metric: str
    sign: str
    number: str
    unit: str

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a bound in lower case; return None if the text is none."""
        match = _PARTS.fullmatch(text)
        return cls(*match.groups("")) if match else None

    @property
    def limit(self) -> float:
        """The number; 0 without one."""
        return float(self.number or 0)

    def holds(self, value: float, unit: float = 1.0) -> bool:
        """Check a value against the limit, in units; NaN is never within it."""
        return bool(_SIGNS[self.sign](value, self.limit * unit))
