"""What a caller gives, converted to plain Python values or refused."""

from __future__ import annotations

import math
import operator
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import UsageError, shortened
from gradtool.store.format.limits import MAX_PATH
from gradtool.wording import Text, Wording, say

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Za-z]*)")
_TRIMMED = re.compile(r"trimmed=0{0,9}[1-9][0-9]{0,8}")
# Whole numbers are smaller: no count is larger, and Python prints no number of thousands of digits.
_TOO_LARGE = 1 << 63
_UNITS = {"": 1, "B": 1} | {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}


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
AT_LEAST_TWO = Range("at least 2", lambda value: value >= 2)  # noqa: PLR2004
FINITE = Range("finite", math.isfinite)
ALL_FINITE = Range("finite", lambda values: all(map(math.isfinite, values)))
FROM_MINUS_ONE_TO_ONE = Range("from -1 to 1", lambda value: -1 <= value <= 1)
NOT_NAN = Range("a number", lambda value: not math.isnan(value))


def flag(option: Wording, value: Any) -> bool:
    """True or False, also as 1 or 0; nothing else, because a text such as "no" would count as true."""
    try:
        is_flag = value in (False, True)
    except ValueError:  # from an array
        is_flag = False
    if not is_flag:
        raise UsageError(say("{} must be True or False, not {!r}", option, value))
    return bool(value)


def callback(option: Wording, value: Any) -> Any:
    """A function, or whether to have the usual one."""
    if not (callable(value) or isinstance(value, bool)):
        raise UsageError(say("{} must be a function, True or False, not {!r}", option, value))
    return value


def number(option: Wording | str, value: Any) -> float:
    """A Python float; a numpy scalar would carry its precision into the arithmetic."""
    try:
        return float(_readable(value))
    except OverflowError as error:
        raise UsageError(say("{} is beyond the range of float64", option)) from error
    except (TypeError, ValueError) as error:
        raise UsageError(say("{} must be a number, not {!r}", option, value)) from error


def numbers(option: Wording, values: Any) -> list[float]:
    """Several numbers, or none; a single one is a list of one."""
    if values is None:
        return []
    if isinstance(values, (str, bytes)):
        raise UsageError(say("{} must be numbers, not {!r}", option, values))
    try:
        several = list(values)
    except TypeError:
        several = [values]
    return [number(option, value) for value in several]


def whole(option: Wording | str, value: Any) -> int:
    """A whole number."""
    try:
        integer = int(_readable(value)) if isinstance(value, str) else operator.index(_readable(value))
    except (TypeError, ValueError) as error:
        raise UsageError(say("{} must be a whole number, not {!r}", option, value)) from error
    if not -_TOO_LARGE < integer < _TOO_LARGE:
        raise UsageError(say("{} must be a whole number below 2^63", option))
    return integer


def _readable(value: Any) -> Any:
    """The value, if it is a number or an ASCII text of one; raises `TypeError` for what only Python takes for one.

    That is 0 or 1 for a truth value, 10 for 1_0, and the digits of every script.
    """
    if isinstance(value, (bool, bytes)) or (isinstance(value, str) and ("_" in value or not value.isascii())):
        raise TypeError
    return value


def size(option: Wording, value: Any) -> int:
    """A number of bytes, or a text that may have a unit: 5GB is 5·10⁹ bytes, 1GiB is 2³⁰."""
    try:
        nbytes = _bytes_in(value) if isinstance(value, str) else operator.index(_readable(value))
    except TypeError:
        nbytes = 0
    if nbytes < 1:
        raise UsageError(
            say("{} must be a size, such as 5GB, 500MB, 1GiB or a number of bytes, not {!r}", option, value)
        )
    return nbytes


def _bytes_in(text: str) -> int:
    """The bytes that a text stands for; 0 if it is no size."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return 0
    number, unit = match.groups()
    return int(float(number) * _UNITS.get(unit.upper(), 0))


def reduction(option: Wording, value: Any) -> str:
    """How several values become one: sum, mean, median, or trimmed=K with a whole number above 0."""
    text = value.lower() if isinstance(value, str) else ""
    if text not in ("sum", "mean", "median") and not _TRIMMED.fullmatch(text):
        raise UsageError(say("{} must be sum, mean, median or trimmed=K, K being 1 or more, not {!r}", option, value))
    return text


def word(option: Wording, value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise UsageError(say("{} must be a non-empty string, not {!r}", option, value))
    return _utf8(option, value)


def _utf8(option: Wording, text: str) -> str:
    """Return a text that can be stored; other bytes of a command line are half surrogates in Python."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(say("{} must be valid UTF-8, not {!r}", option, text)) from error
    return text


def one_of(option: Wording | str, value: Any, known: Collection[str]) -> str:
    """One of the known words, given in upper or lower case."""
    words = {one.lower(): one for one in known}
    if not isinstance(value, str) or value.lower() not in words:
        raise UsageError(say("{} must be one of {}, not {!r}", option, ", ".join(known), value))
    return words[value.lower()]


def patterns(option: Wording, values: Any) -> list[str]:
    """Regular expressions, or prefixes; a single string is one of them, not a series of letters."""
    try:
        several = [values] if isinstance(values, str) else list(() if values is None else values)
    except TypeError as error:
        raise UsageError(say("{} must be strings, not {!r}", option, values)) from error
    if not all(isinstance(one, str) for one in several):
        raise UsageError(say("{} must be strings, not {!r}", option, values))
    return [_utf8(option, one) for one in several]


def path(what: Wording | str, value: Any) -> str:
    """A path that the system accepts.

    An empty path would be the current folder, and is nearly always a shell variable that is unset.
    """
    _refuse_data(value)
    try:
        text = os.fsdecode(value)
        nbytes = len(os.fsencode(text))
    except (TypeError, UnicodeError) as error:
        raise UsageError(say("{} must be a string or a path object, not {!r}", what, value)) from error
    if not text:
        raise UsageError(say("{} is empty", what), hint=Text("give a path", "check whether a shell variable is unset"))
    if "\0" in text:
        raise UsageError(say("{} must not contain a NUL: {!r}", what, text))
    if nbytes > MAX_PATH:
        raise UsageError(
            say("{} has {:,} bytes, where {:,} are allowed: {!r}", what, nbytes, MAX_PATH, shortened(text))
        )
    return text


def path_list(_argument: Wording, values: Any) -> list[str]:
    """One path or many; a string is one."""
    if isinstance(values, (str, bytes, os.PathLike)):
        return [path("a path", values)]
    _refuse_data(values)
    try:
        several = list(values)
    except TypeError as error:
        raise UsageError(_NOT_DATA, hint=_SAVE_FIRST) from error
    return [path("a path", value) for value in several]


# For those who expect functions of arrays.
_NOT_DATA = "paths must be those of safetensors files, not arrays or other objects"
_SAVE_FIRST = (
    "save a dict of arrays with safetensors.numpy.save_file, or of tensors with safetensors.torch.save_file, and give "
    "the path of the file"
)


def _refuse_data(value: Any) -> None:
    """Refuse an array, a state dict or an open file in place of a path; numpy's strings are paths."""
    if isinstance(value, (str, bytes)):
        return
    # Iterating over an open file would take its lines for paths.
    if hasattr(value, "read"):
        raise UsageError("paths must be those of safetensors files, not open files", hint="give the name of the file")
    if hasattr(value, "keys") or hasattr(value, "dtype"):
        raise UsageError(_NOT_DATA, hint=_SAVE_FIRST)
