"""Declares options: a class of annotated fields whose objects arrive checked, and the signatures made of them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from inspect import Parameter, Signature, cleandoc
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NoReturn,
    ParamSpec,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

from gradtool import validators
from gradtool.errors import UsageError
from gradtool.wording import Wording, as_command, option, say

_Options = TypeVar("_Options", bound="Options")
_Result = TypeVar("_Result")
_Given = ParamSpec("_Given")

ARGUMENTS, OPTIONS, GENERAL, PYTHON = "Arguments", "Options", "General", "Python"
# The groups of help, in order. Those behind OPTIONS are shared by several operations.
GROUPS = (ARGUMENTS, OPTIONS, "Selection", "Output", "Compute", GENERAL, PYTHON)


class Option(NamedTuple):
    """What is declared of an option besides its name, type and default; `unset` says what None stands for."""

    help: str
    metavar: str = ""
    range: validators.Range | None = None
    unset: str = ""
    short: str = ""
    # Converts a value, if its type does not say how.
    check: Callable[[Wording, Any], Any] | None = None


class _Argument(NamedTuple):
    default: Any


def argument(*, default: Any = Parameter.empty, kw_only: Literal[False] = False) -> Any:  # noqa: ARG001 - read by types
    """Declare an argument without a flag: the default, unless it is required."""
    return _Argument(default)


class Declared(NamedTuple):
    """An option or argument with its name, type and default."""

    name: str
    hint: Any
    group: str
    option: Option
    default: Any

    @property
    def types(self) -> Sequence[Any]:
        """The type, or those of a union."""
        return get_args(self.hint) if get_origin(self.hint) in {Union, UnionType} else (self.hint,)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the option may be, if they are known."""
        return get_args(self.types[0]) if get_origin(self.types[0]) is Literal else ()

    @property
    def metavar(self) -> str:
        """The value, as help shows it."""
        return self.option.metavar or "|".join(self.choices)

    @property
    def wording(self) -> Wording:
        """The name, in messages."""
        return Wording(self.metavar, self.name) if self.group == ARGUMENTS else option(self.name)

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return option(self.name).command

    @property
    def flags(self) -> tuple[str, ...]:
        """The names on the command line; an option that is on by default has one to turn it off."""
        if self.default is True:
            return (f"{self.flag}/{option(self.name, False).command}",)
        return (self.option.short, self.flag) if self.option.short else (self.flag,)

    @property
    def usage(self) -> str:
        """The flags and the value, as help shows them."""
        flags = "" if self.group == ARGUMENTS else ", ".join(self.flags).replace("/", " / ")
        return f"{flags} {self.metavar}".strip()

    @property
    def is_required(self) -> bool:
        """Whether it must be given."""
        return self.default is Parameter.empty

    @property
    def default_text(self) -> str:
        """The default, as the command's help shows it; empty if that says nothing."""
        if self.default is True:
            return self.flag.removeprefix("--")
        if isinstance(self.default, (str, int, float)) and self.default is not False:
            return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return str(as_command(self.option.unset))

    @property
    def help(self) -> str:
        """The command's help, with the default."""
        default = f"  [default: {self.default_text}]" if self.default_text else ""
        return f"{as_command(self.option.help)}{default}"

    @property
    def text(self) -> str:
        """The command's help, with the range that a value must be in."""
        return f"{as_command(self.option.help)}{self.bounds}"

    @property
    def bounds(self) -> str:
        """The range that a value must be in, as a sentence."""
        return f" Must be {self.option.range.words}." if self.option.range else ""

    def parse(self, value: Any) -> Any:
        """Convert and check a value."""
        if value is None and NoneType in self.types:
            return None
        if self.choices:
            return validators.one_of(self.wording, value, self.choices)
        convert = self.option.check or next((check for kind, check in _CHECKS if kind == self.types[0]), None)
        plain = convert(self.wording, value) if convert else value
        accepted = self.option.range
        if accepted and not accepted.holds(plain):
            why = f": {accepted.why}" if accepted.why else ""
            raise UsageError(say("{} must be {}, not {!r}{}", self.wording, accepted.words, plain, why))
        return plain


_CHECKS: tuple[tuple[Any, Callable[[Any, Any], Any]], ...] = (
    (bool, validators.flag),
    (int, validators.whole),
    (float, validators.number),
    (str, validators.word),
    (os.PathLike[str], validators.path),
    (Sequence[str], validators.patterns),
    (Sequence[float], validators.numbers),
)


@dataclass_transform(eq_default=False, kw_only_default=True, frozen_default=True, field_specifiers=(argument,))
class Options:
    """The options of a call: given by name or place, converted and checked, and never changed.

    A class declares each as a field: `eps: Annotated[float, Option("Help.", "E")] = 1e-6`. That is all that a dataclass
    would need; its decorator would take longer than all else that the start of a small call takes.

    Raises:
        TypeError: there is no such option, or an argument is missing.
        UsageError: a value is of a wrong type or out of range.
    """

    # The operation, as messages call it, and the group in help of the options that the class itself declares.
    operation: ClassVar[str] = ""
    title: ClassVar[str] = OPTIONS

    def __init__(self, *arguments: Any, **given: Any) -> None:
        declared = declared_of(type(self))
        names = [name for name, field in declared.items() if field.group == ARGUMENTS]
        if len(arguments) > len(names):
            raise TypeError(
                f"{self.operation}() takes {len(names)} positional arguments but {len(arguments)} were given"
            )
        for name, value in zip(names, arguments, strict=False):
            if name in given:
                raise TypeError(f"{self.operation}() got multiple values for argument {name!r}")
            given[name] = value
        values = {
            name: field.default if field.is_required else field.parse(field.default) for name, field in declared.items()
        }
        for name, value in given.items():
            if name not in declared:
                raise TypeError(f"{self.operation}() got an unexpected keyword argument {name!r}")
            values[name] = declared[name].parse(value)
        for name, value in values.items():
            if value is Parameter.empty:
                raise TypeError(f"{self.operation}() missing 1 required positional argument: {name!r}")
        vars(self).update(values)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"cannot assign to field {name!r}")

    def replace(self, **values: Any) -> Self:
        """Return the same with other values, which are checked already."""
        options = copy(self)
        vars(options).update(values)
        return options

    def is_default(self, name: str) -> bool:
        """Check whether an option is what it is if it is not given."""
        field = declared_of(type(self))[name]
        return bool(getattr(self, name) == field.parse(field.default))


# By class; `functools.cache` would do, but for types: mypy takes a class with `__init__` for unhashable.
_DECLARED: dict[type[Options], dict[str, Declared]] = {}


def declared_of(options: type[Options]) -> dict[str, Declared]:
    """Return what a class declares: arguments, its own options, then those it shares, group by group."""
    if options not in _DECLARED:
        _DECLARED[options] = _read(options)
    return _DECLARED[options]


def _read(options: type[Options]) -> dict[str, Declared]:
    declared = [
        _declared(kind, name, hint)
        for kind in reversed(options.__mro__)
        if issubclass(kind, Options) and kind is not Options
        for name, hint in vars(kind).get("__annotations__", {}).items()
    ]
    return {field.name: field for field in sorted(declared, key=lambda field: GROUPS.index(field.group))}


def _declared(kind: type[Options], name: str, annotation: Any) -> Declared:
    hint, entry = get_args(annotation)
    default, group = vars(kind)[name], vars(kind).get("title", OPTIONS)
    if isinstance(default, _Argument):
        return Declared(name, hint, ARGUMENTS, entry, default.default)
    return Declared(name, hint, group, entry, default)


def operation(
    options: Callable[_Given, _Options],
) -> Callable[[Callable[[_Options], _Result]], Callable[_Given, _Result]]:
    """Make a public function, which takes options by name, of one that takes them as an object."""

    def decorate(function: Callable[[_Options], _Result]) -> Callable[_Given, _Result]:
        @functools.wraps(function)
        def call(*arguments: _Given.args, **given: _Given.kwargs) -> _Result:
            if given.get("progress") is not True:
                return function(options(*arguments, **given))
            from gradtool.report.progress import progress  # only needed by Python

            with progress(function.__name__, wanted=True) as given["progress"]:
                return function(options(*arguments, **given))

        call.options = options  # type: ignore[attr-defined]
        return call

    return decorate


def document(function: Any) -> Any:
    """Write out the options of an operation in its signature, and as "Args:" in its docstring; return the operation."""
    declared = declared_of(function.options).values()
    parameters = [_parameter(one) for one in declared]
    function.__signature__ = Signature(parameters, return_annotation=function.__annotations__["return"])
    # Python -OO has no docstrings.
    text = cleandoc(function.__doc__ or "")
    head, title, tail = text.partition("Returns:\n" if "Returns:\n" in text else "Raises:\n")
    function.__doc__ = "\n".join([head + "Args:", *map(_entry, declared), "", title + tail])
    return function


def _parameter(one: Declared) -> Parameter:
    kind = Parameter.POSITIONAL_OR_KEYWORD if one.group == ARGUMENTS else Parameter.KEYWORD_ONLY
    return Parameter(one.name, kind, default=one.default, annotation=one.hint)


def _entry(one: Declared) -> str:
    unset = f" Default: {one.option.unset}." if one.option.unset else ""
    return f"    {one.name}: {one.option.help}{one.bounds}{unset}"


def usage_of(declared: Iterable[Declared]) -> list[str]:
    """Return what follows the name of a command in its line of usage."""
    arguments = [one for one in declared if one.group == ARGUMENTS]
    return ["[OPTIONS]", *(one.metavar if one.is_required else f"[{one.metavar}]" for one in arguments)]
