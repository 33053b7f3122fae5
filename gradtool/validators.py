"""Converts values from a caller to plain Python ones, or raises an error that names the option."""

from __future__ import annotations

import math
import operator
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import Text, UsageError, say, shortened
from gradtool.store.format.limits import MAX_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Za-z]*)")
_REDUCTION = re.compile(r"sum|mean|median|trimmed=0{0,9}[1-9][0-9]{0,8}")
# Whole numbers are smaller: no count is larger, and Python prints no number of thousands of digits.
_TOO_LARGE = 1 << 63
# Characters in the ID of a call.
MAX_ID = 200
_UNITS = {"": 1, "B": 1} | {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}
# For those who expect functions of arrays.
_NOT_DATA = "expected paths of safetensors files, not arrays or other objects"
_SAVE_FIRST = (
    "save arrays with safetensors.numpy.save_file, or tensors with safetensors.torch.save_file, and pass the path"
)


class Range(NamedTuple):
    """The values that an option may have, in words and as a test, with the reason if that is not obvious."""

    words: str
    holds: Callable[[Any], bool]
    why: str = ""

    def require(self, option: str, value: Any) -> None:
        """Raise `UsageError` for a value out of range."""
        if not self.holds(value):
            raise invalid(option, self.words, value, f": {self.why}" if self.why else "")


NOT_NEGATIVE = Range("0 or more", lambda value: value >= 0)
NOT_NEGATIVE_FINITE = Range("0 or more and finite", lambda value: 0 <= value < math.inf)
# A sum of powers is off by 51 · 2^-53 at most: 8 for a power, 31 for the additions in a lane, 11 for folding the lanes
# and 1 for adding the tiles. The norm is off by that times 1/P, and by 1e-13 for the last power.
SMALLEST_ORDER = 0.01
ORDER = Range(
    f"{SMALLEST_ORDER} or more", lambda value: value >= SMALLEST_ORDER, "below that, rounding errors exceed 1e-12"
)
POSITIVE_FINITE = Range("above 0 and finite", lambda value: 0 < value < math.inf)
AT_LEAST_ONE = Range("at least 1", lambda value: value >= 1)
AT_LEAST_TWO = Range("at least 2", lambda value: value >= 2)  # noqa: PLR2004
FINITE = Range("finite", math.isfinite)
ALL_FINITE = Range("finite", lambda values: all(map(math.isfinite, values)))
FROM_MINUS_ONE_TO_ONE = Range("from -1 to 1", lambda value: -1 <= value <= 1)
CALLBACK = Range("a function, True or False", lambda value: callable(value) or isinstance(value, bool))
NOT_NAN = Range("a number", lambda value: not math.isnan(value))


def invalid(option: str, expected: str, value: Any, why: str = "") -> UsageError:
    """Return the error for a value that an option cannot have."""
    return UsageError(say("{} must be {}, not {!r}{}", option, expected, value, why))


def flag(option: str, value: Any) -> bool:
    """Require True or False, also as 1 or 0; nothing else, because a text such as "no" would count as true."""
    try:
        is_flag = value in (False, True)
    except ValueError:  # from an array
        is_flag = False
    if not is_flag:
        raise invalid(option, "True or False", value)
    return bool(value)


def number(option: str, value: Any) -> float:
    """Convert to a Python float; a numpy scalar would carry its precision into the arithmetic."""
    try:
        return float(_numeric(value))
    except OverflowError as error:
        raise UsageError(say("{} is beyond the range of float64", option)) from error
    except (TypeError, ValueError) as error:
        raise invalid(option, "a number", value) from error


def whole(option: str, value: Any) -> int:
    """Convert to a whole number."""
    try:
        integer = operator.index(_numeric(value))
    except (TypeError, ValueError) as error:
        raise invalid(option, "a whole number", value) from error
    if not -_TOO_LARGE < integer < _TOO_LARGE:
        raise UsageError(say("{} must be a whole number below 2^63", option))
    return integer


def _numeric(value: Any) -> Any:
    """Return a value that may be a number; raise `TypeError` for a text or a truth value, which Python converts."""
    if isinstance(value, (bool, bytes, str)):
        raise TypeError
    return value


def number_from(option: str, text: str) -> float:
    """Convert the text of a number, as a command line has it."""
    try:
        return float(_plain(text))
    except ValueError as error:
        raise invalid(option, "a number", text) from error


def whole_from(option: str, text: str) -> int:
    """Convert the text of a whole number."""
    try:
        integer = int(_plain(text))
    except ValueError as error:
        raise invalid(option, "a whole number", text) from error
    return whole(option, integer)


def numbers_from(option: str, texts: Sequence[str]) -> list[float]:
    """Convert the texts of several numbers."""
    return [number_from(option, text) for text in texts]


def _plain(text: str) -> str:
    """Return ASCII text; nothing for what only Python takes for a number, such as 1_0 and the digits of all scripts."""
    return "" if "_" in text or not text.isascii() else text


def size(option: str, value: Any) -> int:
    """Convert a number of bytes, or a text that may have a unit: 5GB is 5·10⁹ bytes, 1GiB is 2³⁰."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    try:
        nbytes = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else operator.index(_numeric(value))
    except TypeError:
        nbytes = 0
    if nbytes < 1:
        raise invalid(option, "a size, such as 5GB, 500MB, 1GiB or a number of bytes", value)
    return nbytes


def reduction(option: str, value: Any) -> str:
    """Require a way to reduce several values to a single value."""
    text = value.lower() if isinstance(value, str) else ""
    if not _REDUCTION.fullmatch(text):
        raise invalid(option, "sum, mean, median or trimmed=K with K at least 1", value)
    return text


def choice(option: str, value: Any, choices: Collection[str]) -> str:
    """Require a choice, given in upper or lower case."""
    for word in choices:
        if isinstance(value, str) and value.lower() == word.lower():
            return word
    raise invalid(option, f"one of {', '.join(choices)}", value)


def word(option: str, value: Any) -> str:
    """Require a text that is not empty and valid UTF-8; other bytes of a command line are half surrogates in Python."""
    if not isinstance(value, str) or not value:
        raise invalid(option, "a non-empty string", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(option, "valid UTF-8", value) from error
    return value


def call_id(option: str, value: Any) -> str:
    """Require the ID of a call, which a header and a terminal can show as it is."""
    text = word(option, value)
    if len(text) > MAX_ID or not text.isprintable():
        raise invalid(option, f"at most {MAX_ID} printable characters", shortened(text))
    return text


def numbers(option: str, values: Any) -> list[float]:
    """Convert several numbers, or a single one."""
    if isinstance(values, (str, bytes)):
        raise invalid(option, "a number or several", values)
    try:
        items = list(() if values is None else values)
    except TypeError:
        items = [values]
    return [number(option, item) for item in items]


def patterns(option: str, values: Any) -> list[str]:
    """Require regular expressions, or prefixes; a single string is one of them, not a series of letters."""
    try:
        items = [values] if isinstance(values, str) else list(() if values is None else values)
    except TypeError as error:
        raise invalid(option, "a string or several", values) from error
    if not all(isinstance(item, str) for item in items):
        raise invalid(option, "a string or several", values)
    return [item and word(option, item) for item in items]


def name_list(option: str, values: Any) -> list[str]:
    """Split names at commas; each may occur only once."""
    names = [name.strip() for value in patterns(option, values) for name in value.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise invalid(option, "different names, separated by commas", ",".join(names))
    return names


def path(option: str, value: Any) -> str:
    """Require a path that the system accepts.

    An empty path would be the current folder, and is nearly always a shell variable that is unset.
    """
    _require_no_data(value)
    try:
        text = os.fsdecode(value)
        nbytes = len(os.fsencode(text))
    except (TypeError, UnicodeError) as error:
        raise invalid(option, "a string or a path object", value) from error
    if not text:
        raise UsageError(
            say("{} is empty", option), hint=Text("give a path", "check whether a shell variable is unset")
        )
    if "\0" in text:
        raise UsageError(say("{} must not contain a NUL character: {!r}", option, text))
    if nbytes > MAX_PATH:
        message = say("{} is {:,} bytes long, above the limit of {:,}: {!r}", option, nbytes, MAX_PATH, shortened(text))
        raise UsageError(message)
    return text


def path_list(_argument: str, values: Any) -> list[str]:
    """Require a path or several; a string is a single path."""
    if isinstance(values, (str, bytes, os.PathLike)):
        return [path("a path", values)]
    _require_no_data(values)
    try:
        return [path("a path", value) for value in values]
    except TypeError as error:
        raise UsageError(_NOT_DATA, hint=_SAVE_FIRST) from error


def _require_no_data(value: Any) -> None:
    """Raise `UsageError` for an array, a state dict or an open file in place of a path; numpy's strings are paths."""
    if isinstance(value, (str, bytes)):
        return
    # Iterating over an open file would take its lines for paths.
    if hasattr(value, "read"):
        raise UsageError("expected paths of safetensors files, not open files", hint="pass the name of the file")
    if hasattr(value, "keys") or hasattr(value, "dtype"):
        raise UsageError(_NOT_DATA, hint=_SAVE_FIRST)
