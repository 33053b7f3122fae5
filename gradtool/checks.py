"""What a caller gives, converted to plain Python values or refused."""

from __future__ import annotations

import math
import operator
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class Range(NamedTuple):
    """The values an option may have: in words, and as a test; and why no others, where that is not plain."""

    words: str
    holds: Callable[[Any], bool]
    why: str = ""


NOT_NEGATIVE = Range("0 or more", lambda value: value >= 0)
NOT_NEGATIVE_FINITE = Range("0 or more and finite", lambda value: 0 <= value < math.inf)
# A sum of powers is off by 51 · 2^-53 at most: 8 for a power, 31 for the additions in a lane, 11 for folding the lanes
# and 1 for adding the tiles. The norm is off by that times 1/P, and by 1e-13 for the last power.
SMALLEST_ORDER = 0.01
ORDER = Range(
    f"{SMALLEST_ORDER} or more",
    lambda value: value >= SMALLEST_ORDER,
    "below, rounding errors grow beyond 1e-12",
)
POSITIVE_FINITE = Range("above 0 and finite", lambda value: 0 < value < math.inf)
AT_LEAST_ONE = Range("at least 1", lambda value: value >= 1)
FINITE = Range("finite", math.isfinite)
ALL_FINITE = Range("finite", lambda values: all(map(math.isfinite, values)))
NOT_NAN = Range("a number", lambda value: not math.isnan(value))


def flag(option: str, value: Any) -> bool:
    """True or False."""
    try:
        return bool(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option} must be true or false, not {value!r}") from error


def number(option: str, value: Any) -> float:
    """A Python float: a numpy scalar of less precision would carry its precision into the arithmetic."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{option} must be a number, not {value!r}") from error


def numbers(option: str, values: Any) -> list[float]:
    """Several numbers, or none; a single one is a list of one."""
    if values is None:
        return []
    if isinstance(values, (str, bytes)):
        raise UsageError(f"{option} must be numbers, not {values!r}")
    try:
        several = list(values)
    except TypeError:
        several = [values]
    return [number(option, value) for value in several]


def whole(option: str, value: Any) -> int:
    """A whole number."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise UsageError(f"{option} must be a whole number, not {value!r}") from error


def word(option: str, value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise UsageError(f"{option} must be a word, not {value!r}")
    return value


def one_of(option: str, value: Any, known: Collection[str]) -> str:
    """One of the known words."""
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"{option} must be one of {', '.join(known)}, not {value!r}")
    return value


def patterns(option: str, values: Any) -> list[str]:
    """Regular expressions; a single string is one of them, not a series of letters."""
    try:
        several = [values] if isinstance(values, str) else list(values or ())
    except TypeError as error:
        raise UsageError(f"{option} must be regular expressions, not {values!r}") from error
    if not all(isinstance(one, str) for one in several):
        raise UsageError(f"{option} must be regular expressions, not {values!r}")
    return several


def path(what: str, value: Any) -> str:
    """A path that the system accepts.

    An empty path would be the current folder, and is nearly always a shell variable that is unset.
    """
    try:
        text = os.fsdecode(value)
        os.fsencode(text)
    except (TypeError, UnicodeError) as error:
        raise UsageError(f"{what} must be a path, not {value!r}") from error
    if not text:
        raise UsageError(f"{what} is empty; is a shell variable unset?")
    if "\0" in text:
        raise UsageError(f"{what} must not contain a NUL: {text!r}")
    return text


def paths(values: Any) -> list[str]:
    """One path or many; a string is one."""
    if isinstance(values, (str, bytes, os.PathLike)):
        return [path("a path", values)]
    try:
        return [path("a path", value) for value in values]
    except TypeError as error:
        raise UsageError(f"paths must be paths, not {values!r}") from error
