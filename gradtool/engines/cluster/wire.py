"""What workers answer: JSON, which the command reads without believing anything.

A pickle can run code where it is read. So an answer holds numbers, strings, lists and arrays only. It is read into an
empty answer of the expected kind, which says what types may come, and how much. No number may be negative but counts in
an array among `signed_names`, binary exponents, and sums, which are checked where they are added up.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from array import array
from typing import TYPE_CHECKING, Any, TypeVar

from gradtool import errors
from gradtool.errors import GradtoolError, Problem, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

Answer = TypeVar("Answer")

# Errors that a worker may report, by name.
ERRORS: dict[str, type[GradtoolError]] = {k: kind for k, kind in vars(errors).items() if hasattr(kind, "exit_code")}
# Largest values of arrays of a binary exponent, and of a count of elements, of which many can be added up.
_LARGEST = {"i": 1 << 13, "q": 1 << 56}
_LARGEST_NUMBER = 1 << 64
_LONGEST_TEXT = 20_000
_MAX_PROBLEMS = 10_000
# Items of an array of any length.
_MAX_CONDENSED = 1 << 22


def packed(answer: object) -> bytes:
    """Pack an answer.

    It may be made of numbers, strings, None, lists, tuples, dataclasses, and objects whose `sent_names` name all
    attributes that need be sent, which may be arrays. Those named in `condensed_names` may have any length, and those
    named in `signed_names` counts below zero.
    """
    return json.dumps({"answer": to_tree(answer)}).encode()


def packed_error(error: GradtoolError) -> bytes:
    """Pack an error."""
    problems = [[_wordings(text) for text in dataclasses.astuple(problem)] for problem in error.problems]
    name = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERRORS)
    return json.dumps({"error": [name, _wordings(error.summary), problems]}).encode()


def unpacked(data: object, empty: Answer) -> Answer:
    """Unpack an answer into an empty answer.

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


def _names(value: Any) -> Sequence[str]:
    return getattr(value, "sent_names", None) or [field.name for field in dataclasses.fields(value)]


def to_tree(value: Any) -> Any:
    """Return a value as lists of what JSON has."""
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, array):
        # Mostly zeros, or a few numbers.
        return [value.typecode, base64.b64encode(zlib.compress(value.tobytes(), 1)).decode()]
    items = value if isinstance(value, (list, tuple)) else [getattr(value, name) for name in _names(value)]
    return list(map(to_tree, items))


def _filled(empty: Any, tree: Any) -> Any:
    """Return what a tree says, if it is like what is `empty`."""
    if empty is None or isinstance(empty, (int, float, str)):
        return _plain(tree, empty)
    if type(tree) is not list:
        raise ValueError("no list")
    if isinstance(empty, (list, tuple)):
        values = [_filled(value, branch) for value, branch in zip(empty, tree, strict=True)]
        return type(empty)(*values) if hasattr(empty, "_fields") else type(empty)(values)
    condensed, signed = getattr(empty, "condensed_names", ()), getattr(empty, "signed_names", ())
    for name, branch in zip(_names(empty), tree, strict=True):
        value = getattr(empty, name)
        if isinstance(value, array):
            value = _array(value, *branch, exact=name not in condensed, signed=name in signed)
        else:
            value = _filled(value, branch)
        setattr(empty, name, value)
    return empty


def _plain(value: Any, empty: Any) -> Any:
    if type(value) is not type(empty) or (type(value) is str and len(value) > _LONGEST_TEXT):
        raise ValueError("a value of another type")
    if type(value) in (int, float) and not 0 <= value < _LARGEST_NUMBER:
        raise ValueError("a number out of range")
    return value


def _array(empty: array[Any], typecode: object, text: Any, *, exact: bool, signed: bool) -> array[Any]:
    nbytes, inflate = (len(empty) if exact else _MAX_CONDENSED) * empty.itemsize, zlib.decompressobj()
    data = inflate.decompress(base64.b64decode(text, validate=True), nbytes + 1)
    if typecode != empty.typecode or not inflate.eof or len(data) > nbytes or (exact and len(data) < nbytes):
        raise ValueError("an array of another form")
    values = array(empty.typecode, data)
    largest = _LARGEST.get(empty.typecode, 0)
    least = -largest if signed or typecode == "i" else 0
    if values and largest and not least <= min(values) <= max(values) <= largest:
        raise ValueError("a number out of range")
    return values


def _error(name: Any, summary: Any, problems: Any) -> GradtoolError:
    if not 0 < len(problems) <= _MAX_PROBLEMS:
        raise ValueError("no problem, or too many")
    error = ERRORS[name].from_problems([Problem(*map(_text, problem)) for problem in problems])
    if any(None in (problem.code, problem.message) for problem in error.problems):
        raise ValueError("a problem without a message")
    error.summary = _text(summary)
    return error


def _wordings(text: str | None) -> str | list[str] | None:
    """Return a text, or both wordings of a text that has two."""
    return [str(text), text.command] if isinstance(text, Text) else text


def _text(tree: Any) -> Any:
    if isinstance(tree, list):
        return Text(*(_plain(wording, "") for wording in tree))
    return None if tree is None else _plain(tree, "")
