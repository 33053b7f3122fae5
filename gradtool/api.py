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
from gradtool.signatures import Declared, documented, options_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gradtool.errors import Problem

# What is said of the shell and of usage lines, and what a function says instead.
_WORDS = {
    "the shell did not expand the ~: leave it out of quotes, or write $HOME": "~ is not expanded: use Path.expanduser",
    "patterns are expanded by the shell, not by gradtool: leave out the quotes": "patterns are not expanded: use glob",
    " is empty; is a shell variable unset?": " is empty",
    "gradtool accumulate OLD GRAD...": "gradtool.accumulate([OLD, GRAD, ...])",
}
_Function = TypeVar("_Function", bound=Callable[..., Any])

_OPTIONS = {
    "accumulate": options.AccumulateOptions,
    "check": options.CheckOptions,
    "clip": options.ClipOptions,
    "diff": options.DiffOptions,
    "info": options.InfoOptions,
    "layernorm_backward": options.LayerNormOptions,
    "norm": options.NormOptions,
    "recover": options.RecoverOptions,
    "zero": options.ZeroOptions,
}


def public(function: _Function) -> _Function:
    """The function as `gradtool` exports it."""

    @functools.wraps(function)
    def call(*arguments: Any, **given: Any) -> Any:
        name = function.__name__
        with _bar(name, given), _in_python(name):
            return _warned(name, function(*arguments, **given))

    # So that it can be pickled: it is not the one of its module.
    call.__module__ = "gradtool"
    call.__doc__ = in_python(documented(call).__doc__ or "", function.__name__)
    return call  # type: ignore[return-value]


@contextlib.contextmanager
def _bar(name: str, given: dict[str, Any]) -> Iterator[None]:
    """Replace `progress=True` by a bar."""
    if given.get("progress") is not True:
        yield
        return
    with progress(name, wanted=True) as given["progress"]:
        yield


def _warned(function: str, result: Any) -> Any:
    """The result with its warnings and problems rewritten as errors are; not what `check` says, which are commands."""
    said = {} if function == "check" else {key: getattr(result, key, ()) for key in ("warnings", "problems")}
    changes = {key: tuple(_problem(one, function) for one in several) for key, several in said.items() if several}
    return replace(result, **changes) if changes else result


@contextlib.contextmanager
def _in_python(function: str) -> Iterator[None]:
    """Rewrite the messages of an error of the block, which are those of the command line."""
    try:
        yield
    except GradtoolError as error:
        error.problems = tuple(_problem(one, function) for one in error.problems)
        if error.summary is not None:
            error.summary = in_python(error.summary, function)
        error.args = (error.summary or error.problems[0].message,)
        raise


def _problem(one: Problem, function: str) -> Problem:
    return replace(one, message=in_python(one.message, function))


def in_python(message: str, function: str | None = None) -> str:
    """The message of a function: `nonfinite="zero"` for `--nonfinite zero`, `mean=True` for `--mean`."""
    declared = _declared(function)
    for words, instead in _WORDS.items():
        message = message.replace(words, instead)
    message = re.sub(r"^(A|B|PATH) (?=must |is |- is )", lambda found: found[0].lower(), message)
    message = re.sub(
        r"\bgradtool (norm|check|info|clip|diff|accumulate|zero|layernorm-backward|recover|doctor)\b( --[a-z0-9-]+)?",
        _call,
        message,
    )
    message = re.sub(r"--([a-z][a-z0-9-]*) (?=['\"])", functools.partial(_given, declared), message)
    argument = functools.partial(_argument, declared)
    return re.sub(
        r"--(no-)?([a-z](?:[a-z0-9-]*[a-z0-9])?)(?:([ =])((?:[A-Za-z0-9_]+(?:, | or )?)+))?", argument, message
    )


def _given(declared: Mapping[str, Declared], found: re.Match[str]) -> str:
    name = found[1].replace("-", "_")
    return f"{name}=" if name in declared else found[0]


def _call(found: re.Match[str]) -> str:
    return f"gradtool.{found[1].replace('-', '_')}({(found[2] or '').strip()})"


def _argument(declared: Mapping[str, Declared], found: re.Match[str]) -> str:
    negated, name, between, rest = found[1], found[2].replace("-", "_"), found[3] or "", found[4] or ""
    if negated and name in declared:
        return f"{name}=False{between}{rest}"
    one = declared.get((negated or "").replace("-", "_") + name)
    if one is None:
        return found[0]
    # What must be True or False, and the stand-in for a value, are said of the argument itself.
    tail = rest.removeprefix(one.metavar)
    if tail != rest and not tail[:1].isalnum():
        return one.name + tail
    if one.types == (bool,) and rest != "must":
        return f"{one.name}=True{between}{rest}"
    known = "|".join(_choices(name))
    values = re.match(rf"(?:{known})\b(?:(?:, | or )(?:{known})\b)*", rest)
    if known and values:
        quoted = re.sub(r"\b(?!or\b)\w+", r'"\g<0>"', values[0])
        return f"{one.name}={quoted}{rest[values.end() :]}"
    return f"{one.name}{between}{rest}"


def _choices(name: str) -> set[str]:
    """What an option may be, in any of the operations that have it."""
    declared = (options_of(cls).get(name) for cls in _OPTIONS.values())
    return {choice for one in declared if one is not None for choice in one.choices}


@functools.cache
def _declared(function: str | None) -> dict[str, Declared]:
    """All options; of those that differ between functions, such as `mean`, that of the function."""
    own = [_OPTIONS[function]] if function in _OPTIONS else []
    return {name: one for cls in (*_OPTIONS.values(), *own) for name, one in options_of(cls).items()}
