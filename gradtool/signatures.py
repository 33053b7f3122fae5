"""Reads the options that a function declares: to complete those given, and to write out its signature and docstring."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature, cleandoc, signature
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin

from gradtool import checks
from gradtool.errors import UsageError
from gradtool.options import Callback, Compute, Display, Option, Progress, Selection, Writing

_Options = TypeVar("_Options", bound=Mapping[str, object])
_Function = TypeVar("_Function", bound=Callable[..., Any])

ARGUMENTS, OPTIONS, GENERAL, PYTHON = "Arguments", "Options", "General", "Python"
# The options that several operations have, by group. All others are in the group OPTIONS.
GROUPS = {"Selection": Selection, "Output": Writing, "Compute": Compute, GENERAL: Display, PYTHON: Callback}
_CHECKS: dict[Any, Callable[[str, Any], Any]] = {
    bool: checks.flag,
    Progress: checks.callback,
    int: checks.whole,
    float: checks.number,
    str: checks.word,
    os.PathLike[str]: checks.path,
    Sequence[str]: checks.patterns,
    Sequence[float]: checks.numbers,
}


class Declared(NamedTuple):
    """An option or argument with its name and type."""

    name: str
    hint: Any
    group: str
    option: Option

    @property
    def types(self) -> Sequence[Any]:
        """Its type, or those of a union."""
        return get_args(self.hint) if get_origin(self.hint) in {Union, UnionType} else (self.hint,)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it may be, if they are known."""
        return get_args(self.types[0]) if get_origin(self.types[0]) is Literal else ()

    @property
    def metavar(self) -> str:
        """Its value, as help shows it."""
        return self.option.metavar or "|".join(self.choices)

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """Its names on the command line; an option that is on by default has one to turn it off."""
        if self.option.default is True:
            return (f"{self.flag}/{self.flag.replace('--', '--no-')}",)
        return (self.option.short, self.flag) if self.option.short else (self.flag,)

    @property
    def spelled(self) -> str:
        """How it is written, with its value."""
        flags = "" if self.group == ARGUMENTS else ", ".join(self.flags).replace("/", " / ")
        return f"{flags} {self.metavar}".strip()

    @property
    def is_required(self) -> bool:
        """Whether it must be given."""
        return self.option.default is Parameter.empty

    @property
    def default(self) -> str:
        """What it is if it is not given, as help shows it; empty if that says nothing."""
        value = self.option.default
        if value is True:
            return self.flag.removeprefix("--")
        if isinstance(value, (str, int, float)) and value is not False:
            return f"{value:g}" if isinstance(value, float) else str(value)
        return self.option.unset

    @property
    def help(self) -> str:
        """Its help, with the default."""
        return f"{self.option.help}  [default: {self.default}]" if self.default else self.option.help

    @property
    def text(self) -> str:
        """Its help, with the range that it must be in."""
        return f"{self.option.help} Must be {self.option.range.words}." if self.option.range else self.option.help

    def taken(self, value: Any) -> Any:
        """A value, converted and checked."""
        if value is None and NoneType in self.types:
            return None
        if self.choices:
            return checks.one_of(self.flag, value, self.choices)
        check, accepted = self.option.check or _CHECKS.get(self.types[0]), self.option.range
        plain = check(self.flag, value) if check else value
        if accepted and not accepted.holds(plain):
            why = f": {accepted.why}" if accepted.why else ""
            raise UsageError(f"{self.flag} must be {accepted.words}, not {plain!r}{why}")
        return plain


@functools.cache
def options_of(options: type[Mapping[str, object]]) -> dict[str, Declared]:
    """The options of a class: first its own, then those it shares, group by group."""
    shared = {name: title for title, group in GROUPS.items() for name in group.__annotations__}
    hints = options.__annotations__
    names = [*(name for name in hints if name not in shared), *(name for name in shared if name in hints)]
    return {name: _declared(name, hints[name], shared.get(name, OPTIONS)) for name in names}


def parameters_of(function: Signature) -> list[Declared]:
    """The arguments of a function, then the options that its keywords stand for."""
    declared: list[Declared] = []
    for one in function.parameters.values():
        if one.kind is Parameter.VAR_KEYWORD:
            declared += options_of(get_args(one.annotation)[0]).values()
        else:
            declared.append(_declared(one.name, one.annotation, ARGUMENTS, default=one.default))
    return declared


def usage_of(declared: Iterable[Declared]) -> list[str]:
    """What follows the name of a command in its line of usage."""
    arguments = [one for one in declared if one.group == ARGUMENTS]
    return ["[OPTIONS]", *(one.metavar if one.is_required else f"[{one.metavar}]" for one in arguments)]


def _declared(name: str, annotation: Any, group: str, **changes: Any) -> Declared:
    hint, option = get_args(annotation)
    return Declared(name, hint, group, option._replace(**changes))


def complete(function: str, options: type[_Options], given: _Options) -> _Options:
    """All options of a function: those given, converted and checked, and the defaults of the others.

    Raises:
        TypeError: there is no such option.
        UsageError: a value is of a wrong type or out of range.
    """
    declared = options_of(options)
    for name in given:
        if name not in declared:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    # Lists are made anew for each call.
    defaults = {name: value.copy() if isinstance(value, list) else value for name, value in _defaults_of(options)}
    return cast("_Options", defaults | {name: declared[name].taken(value) for name, value in given.items()})


def is_default(options: type[_Options], chosen: _Options, name: str) -> bool:
    """Whether a complete option is what it is if it is not given."""
    return bool(chosen[name] == options_of(options)[name].option.default)


@functools.cache
def _defaults_of(options: type[Mapping[str, object]]) -> list[tuple[str, Any]]:
    """The defaults of all options of a class, converted."""
    return [(name, one.taken(one.option.default)) for name, one in options_of(options).items()]


def documented(function: _Function) -> _Function:
    """Write out the options of a function in its signature, and as "Args:" in its docstring."""
    brief = signature(function, eval_str=True)
    declared = parameters_of(brief)
    full = brief.replace(parameters=[_parameter(one) for one in declared])
    function.__signature__ = full  # type: ignore[attr-defined]
    # Python -OO has no docstrings.
    text = cleandoc(function.__doc__ or "")
    head, title, tail = text.partition("Returns:\n" if "Returns:\n" in text else "Raises:\n")
    function.__doc__ = "\n".join([head + "Args:", *map(_entry, declared), "", title + tail])
    return function


def _parameter(one: Declared) -> Parameter:
    kind = Parameter.POSITIONAL_OR_KEYWORD if one.group == ARGUMENTS else Parameter.KEYWORD_ONLY
    return Parameter(one.name, kind, default=one.option.default, annotation=one.hint)


def _entry(one: Declared) -> str:
    unset = f" Default: {one.option.unset}." if one.option.unset else ""
    return f"    {one.name}: {one.text}{unset}"
