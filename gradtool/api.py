"""The operations as Python functions: their errors name arguments and not options, and they show a progress bar."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from gradtool import options
from gradtool.errors import GradtoolError
from gradtool.report.progress import progress
from gradtool.signatures import Declared, options_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_Function = TypeVar("_Function", bound=Callable[..., Any])

_CLASSES = (
    options.AccumulateOptions,
    options.ClipOptions,
    options.LayerNormOptions,
    options.NormOptions,
    options.RecoverOptions,
    options.ZeroOptions,
)


def public(function: _Function) -> _Function:
    """The function as `gradtool` exports it."""

    @functools.wraps(function)
    def call(*arguments: Any, **given: Any) -> Any:
        with _bar(function.__name__, given), _in_python():
            return function(*arguments, **given)

    # So that it can be pickled: it is not the one of its module.
    call.__module__ = "gradtool"
    return call  # type: ignore[return-value]


@contextlib.contextmanager
def _bar(name: str, given: dict[str, Any]) -> Iterator[None]:
    """Replace `progress=True` by a bar."""
    if given.get("progress") is not True:
        yield
        return
    with progress(name, wanted=True) as given["progress"]:
        yield


@contextlib.contextmanager
def _in_python() -> Iterator[None]:
    """Rewrite the messages of an error of the block, which are those of the command line."""
    try:
        yield
    except GradtoolError as error:
        error.problems = tuple(replace(one, message=in_python(one.message)) for one in error.problems)
        if error.summary is not None:
            error.summary = in_python(error.summary)
        error.args = (error.summary or error.problems[0].message,)
        raise


def in_python(message: str) -> str:
    """The message with options as arguments: `nonfinite="zero"` for `--nonfinite zero`, `mean=True` for `--mean`."""
    message = re.sub(
        r"\bgradtool (norm|clip|accumulate|zero|layernorm-backward|recover)\b( --[a-z-]+)?", _call, message
    )
    message = re.sub(r"--([a-z][a-z-]*) (?=['\"])", _given, message)
    return re.sub(r"--(no-)?([a-z](?:[a-z-]*[a-z])?)(?:([ =])((?:[A-Za-z0-9_]+(?:, | or )?)+))?", _argument, message)


def _given(found: re.Match[str]) -> str:
    name = found[1].replace("-", "_")
    return f"{name}=" if name in _declared() else found[0]


def _call(found: re.Match[str]) -> str:
    return f"gradtool.{found[1].replace('-', '_')}({(found[2] or '').strip()})"


def _argument(found: re.Match[str]) -> str:
    negated, name, between, rest = found[1], found[2].replace("-", "_"), found[3] or "", found[4] or ""
    declared = _declared()
    if negated and name in declared:
        return f"{name}=False{between}{rest}"
    one = declared.get((negated or "").replace("-", "_") + name)
    if one is None:
        return found[0]
    if one.types == (bool,):
        return f"{one.name}=True{between}{rest}"
    known = "|".join(_choices(name))
    values = re.match(rf"(?:{known})\b(?:(?:, | or )(?:{known})\b)*", rest)
    if known and values:
        quoted = re.sub(r"\b(?!or\b)\w+", r'"\g<0>"', values[0])
        return f"{one.name}={quoted}{rest[values.end() :]}"
    return f"{one.name}{between}{rest}"


def _choices(name: str) -> set[str]:
    """What an option may be, in any of the operations that have it."""
    declared = (options_of(cls).get(name) for cls in _CLASSES)
    return {choice for one in declared if one is not None for choice in one.choices}


@functools.cache
def _declared() -> dict[str, Declared]:
    return {name: one for cls in _CLASSES for name, one in options_of(cls).items()}
