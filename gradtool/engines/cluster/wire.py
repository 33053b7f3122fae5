"""What workers answer: JSON, which the command reads without believing anything.

A pickle can run code where it is read. So an answer holds numbers, strings, lists and arrays only. It is read into an
empty answer of the kind that is expected, which says what types may come, and how much. A number may be negative only
where the empty answer has a negative one, and a count only in an array that is one of `signed_names`. Binary exponents
may be negative, and so may sums, which are left to whoever adds them up.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from array import array
from typing import TYPE_CHECKING, Any, TypeVar

from gradtool import errors
from gradtool.errors import GradtoolError, Problem
from gradtool.wording import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

Answer = TypeVar("Answer")

# Errors that a worker may report, by name.
_ERRORS: dict[str, type[GradtoolError]] = {
    one.__name__: one
    for one in (errors.BackendUnavailableError, errors.BadInputError, errors.DeviceMemoryError, errors.NonFiniteError)
} | {one.__name__: one for one in (errors.SystemRefusedError, errors.UsageError)}
# Largest values of arrays of a binary exponent, and of a count of elements, of which many can be added up.
_LARGEST = {"i": 1 << 13, "q": 1 << 56}
_LARGEST_NUMBER = 1 << 64
_LONGEST_TEXT = 20_000
_MOST_PROBLEMS = 10_000
# Items of an array of any length.
_MOST_CONDENSED = 1 << 22


def packed(answer: object) -> bytes:
    """Pack an answer.

    It may be made of numbers, strings, None, arrays, lists, tuples, dictionaries, dataclasses, and objects whose
    `sent_names` name all attributes that need be sent. Arrays named in `condensed_names` may have any length, and
    those named in `signed_names` counts below zero.
    """
    return json.dumps({"answer": _tree(answer)}).encode()


def packed_error(error: GradtoolError) -> bytes:
    """Pack an error."""
    problems = [[_worded(text) for text in dataclasses.astuple(problem)] for problem in error.problems]
    name = next(one.__name__ for one in type(error).__mro__ if one.__name__ in _ERRORS)
    return json.dumps({"error": [name, _worded(error.summary), problems]}).encode()


def unpacked(data: object, empty: Answer) -> Answer:
    """Unpack an answer into an empty one.

    Raises:
        GradtoolError: that is what was packed.
        ValueError: it is no answer of this kind.
    """
    if type(data) is not bytes:
        raise ValueError("an answer that is not bytes")
    try:
        tree = json.loads(data)
        if "error" not in tree:
            filled: Answer = _filled(empty, tree["answer"])
            return filled
        error = _error(*tree["error"])
    except (TypeError, LookupError, ArithmeticError, RecursionError, zlib.error) as reason:
        raise ValueError("an answer of another form") from reason
    raise error


def _names(one: Any) -> Sequence[str]:
    """The attributes of an object that are sent."""
    return getattr(one, "sent_names", None) or [field.name for field in dataclasses.fields(one)]


def _tree(one: Any) -> Any:
    if one is None or isinstance(one, (int, float, str)):
        return one
    if isinstance(one, array):
        # Mostly zeros, or a few numbers.
        return [one.typecode, base64.b64encode(zlib.compress(one.tobytes(), 1)).decode()]
    if isinstance(one, dict):
        return {name: _tree(value) for name, value in one.items()}
    values = one if isinstance(one, (list, tuple)) else [getattr(one, name) for name in _names(one)]
    return [_tree(value) for value in values]


def _filled(empty: Any, tree: Any, *, exact: bool = True, signed: bool = False) -> Any:
    """What a tree says, if it is like what is `empty`; if not `exact`, an array may have another length."""
    if empty is None or isinstance(empty, (int, float, str)):
        return _plain(tree, empty)
    if isinstance(empty, array):
        return _array(empty, *tree, exact=exact, signed=signed)
    if isinstance(empty, dict):
        return {name: _filled(value, tree[name]) for name, value in empty.items()}
    if type(tree) is not list:
        raise ValueError("no list")
    if isinstance(empty, (list, tuple)):
        values = [_filled(value, one) for value, one in zip(empty, tree, strict=True)]
        return type(empty)(*values) if hasattr(empty, "_fields") else type(empty)(values)
    for name, one in zip(_names(empty), tree, strict=True):
        exact, signed = name not in getattr(empty, "condensed_names", ()), name in getattr(empty, "signed_names", ())
        setattr(empty, name, _filled(getattr(empty, name), one, exact=exact, signed=signed))
    return empty


def _plain(value: Any, empty: Any) -> Any:
    """A value of the same type and of ordinary size."""
    if type(value) is not type(empty) or (type(value) is str and len(value) > _LONGEST_TEXT):
        raise ValueError("a value of another type")
    if type(value) in (int, float) and not (-_LARGEST_NUMBER if empty < 0 else 0) <= value < _LARGEST_NUMBER:
        raise ValueError("a number out of range")
    return value


def _array(empty: array[Any], typecode: object, text: Any, *, exact: bool, signed: bool) -> array[Any]:
    """An array of the same type and length, whose numbers are in range."""
    most, inflate = (len(empty) if exact else _MOST_CONDENSED) * empty.itemsize, zlib.decompressobj()
    data = inflate.decompress(base64.b64decode(text, validate=True), most + 1)
    if typecode != empty.typecode or not inflate.eof or len(data) > most or (exact and len(data) < most):
        raise ValueError("an array of another form")
    values = array(empty.typecode, data)
    largest = _LARGEST.get(empty.typecode, 0)
    least = -largest if signed or typecode == "i" else 0
    if values and largest and not least <= min(values) <= max(values) <= largest:
        raise ValueError("a number out of range")
    return values


def _error(name: Any, summary: Any, problems: Any) -> GradtoolError:
    if not 0 < len(problems) <= _MOST_PROBLEMS:
        raise ValueError("no problem, or too many")
    error = _ERRORS[name].from_problems([Problem(*map(_text, problem)) for problem in problems])
    if any(None in (problem.code, problem.message) for problem in error.problems):
        raise ValueError("a problem without a message")
    error.summary = _text(summary)
    return error


def _worded(text: str | None) -> str | list[str] | None:
    """Return a text, or both wordings of one that has two."""
    return [str(text), text.command] if isinstance(text, Text) else text


def _text(tree: Any) -> Any:
    """Return the text that was packed, if there was any."""
    if isinstance(tree, list):
        return Text(*(_plain(wording, "") for wording in tree))
    return None if tree is None else _plain(tree, "")
