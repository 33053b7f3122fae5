"""The arguments of the Python functions, made into plain values or refused; the command line hands in plain ones."""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any

from gradtool.errors import UsageError
from gradtool.store.format.paths import checked_path

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def number(option: str, value: Any) -> float:
    """A Python float: a numpy scalar of less precision would carry its precision into the arithmetic."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{option} must be a number, not {value!r}") from error


def optional_number(option: str, value: Any) -> float | None:
    """As `number`, with None for an option that is not given."""
    return None if value is None else number(option, value)


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


def optional_count(option: str, value: Any) -> int | None:
    """A whole number of at least 1, or None."""
    if value is None:
        return None
    count = whole(option, value)
    if count < 1:
        raise UsageError(f"{option} must be at least 1, not {count}")
    return count


def optional_index(option: str, value: Any) -> int | None:
    """A whole number of at least 0, or None."""
    if value is None:
        return None
    index = whole(option, value)
    if index < 0:
        raise UsageError(f"{option} must be 0 or more, not {index}")
    return index


def norm_order(value: Any) -> float:
    """The order of a norm: above 0, or infinite."""
    order = number("--norm-type", value)
    if not order > 0:
        raise UsageError(f"--norm-type must be above 0, not {order!r}")
    return order


def optional_word(option: str, value: Any) -> str | None:
    """A text that is not empty, or None for an option that is not given."""
    return None if value is None else word(option, value)


def word(option: str, value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise UsageError(f"{option} must be a word, not {value!r}")
    return value


def one_of(option: str, value: Any, known: Collection[str]) -> None:
    """Raise `UsageError` for a word that is not one of those known."""
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"{option} must be one of {', '.join(known)}, not {value!r}")


def patterns(option: str, values: str | Iterable[str] | None) -> list[str]:
    """Regular expressions; a single string is one of them, not a series of letters."""
    try:
        found = [values] if isinstance(values, str) else list(values or ())
    except TypeError as error:
        raise UsageError(f"{option} must be regular expressions, not {values!r}") from error
    if not all(isinstance(one, str) for one in found):
        raise UsageError(f"{option} must be regular expressions, not {values!r}")
    return found


def paths(values: Any) -> list[str]:
    """One path or many; a string is one."""
    if isinstance(values, (str, bytes, os.PathLike)):
        return [checked_path("a path", values)]
    try:
        return [checked_path("a path", value) for value in values]
    except TypeError as error:
        raise UsageError(f"paths must be paths, not {values!r}") from error


def optional_path(option: str, value: Any) -> str | None:
    """A path, or None for an option that is not given."""
    return None if value is None else checked_path(option, value)
