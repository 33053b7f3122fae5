"""Declares options: classes of fields whose values are checked, and the signatures made from them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from copy import copy
from inspect import Parameter, Signature, cleandoc
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
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
from gradtool.errors import Text, as_command, option, say

_Options = TypeVar("_Options", bound="Options")
_Result = TypeVar("_Result")
_Given = ParamSpec("_Given")

ARGUMENTS, OPTIONS, GENERAL, PYTHON = "Arguments", "Options", "General", "Python"
# The groups of help, in order. Those behind OPTIONS are shared by several operations.
GROUPS = (ARGUMENTS, OPTIONS, "Selection", "Output", "Compute", GENERAL, PYTHON)
_CHECKS: dict[Any, Callable[[Any, Any], Any]] = {
    bool: validators.flag,
    int: validators.whole,
    float: validators.number,
    str: validators.word,
    os.PathLike[str]: validators.path,
    Sequence[str]: validators.patterns,
    Sequence[float]: validators.numbers,
}
# How a command line spells those whose text is not their value.
_READERS: dict[Any, Callable[[Any, Any], Any]] = {
    int: validators.whole_from,
    float: validators.number_from,
    Sequence[float]: validators.numbers_from,
}


class Declared:
    """An option or an argument, as a class declares it: its name, type and group in help come from the class."""

    def __init__(
        self,
        help: str,  # noqa: A002
        metavar: str = "",
        range: validators.Range | None = None,  # noqa: A002
        *,
        default: Any = Parameter.empty,
        kw_only: bool = True,
        unset: str = "",
        short: str = "",
        check: Callable[[Text, Any], Any] | None = None,
    ) -> None:
        self.help, self.metavar, self.range, self.default = help, metavar, range, default
        self.group, self.unset, self.short, self.check = "" if kw_only else ARGUMENTS, unset, short, check

    def __set_name__(self, owner: type[Options], name: str) -> None:
        self.name, self.hint = name, owner.__annotations__[name]
        self.types = get_args(self.hint) if get_origin(self.hint) in {Union, UnionType} else (self.hint,)
        self.choices = get_args(self.types[0]) if get_origin(self.types[0]) is Literal else ()
        self.metavar = self.metavar or "|".join(self.choices)
        self.group = self.group or vars(owner).get("title", OPTIONS)

    @property
    def flags(self) -> tuple[str, ...]:
        """The names on the command line; an option that is on by default has one to turn it off."""
        flag = option(self.name).command
        if self.default is True:
            return flag, option(self.name, False).command
        return (self.short, flag) if self.short else (flag,)

    @property
    def usage(self) -> str:
        """The flags and the value, as help shows them."""
        separator = " / " if self.default is True else ", "
        return self.metavar if self.group == ARGUMENTS else f"{separator.join(self.flags)} {self.metavar}".rstrip()

    @property
    def default_text(self) -> str:
        """The default, as the command's help shows it; empty if that says nothing."""
        if self.unset:
            return str(as_command(self.unset))
        if self.default is True:
            return self.name.replace("_", "-")
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return str(self.default) if type(self.default) in {str, int} else ""

    @property
    def text(self) -> Text:
        """The help, with the range that a value must be in."""
        return say("{} Must be {}.", self.help, self.range.words) if self.range else say("{}", self.help)

    @property
    def label(self) -> Text:
        """Its name in messages."""
        return Text(self.name, self.metavar) if self.group == ARGUMENTS else option(self.name)

    def read(self, text: Any) -> Any:
        """Return the value that a text of the command line stands for, or several; it is not checked yet."""
        reader = None if self.check else _READERS.get(self.types[0])
        return reader(self.label, text) if reader else text

    def parse(self, value: Any) -> Any:
        """Convert and check a value."""
        if value is None and NoneType in self.types:
            return None
        name = self.label
        if self.choices:
            return validators.choice(name, value, self.choices)
        check = self.check or _CHECKS.get(self.types[0])
        checked = check(name, value) if check else value
        if self.range:
            self.range.require(name, checked)
        return checked


def field(*given: Any, **more: Any) -> Any:
    """Declare an option, or an argument if it is not `kw_only`; for type checkers, it is a value of any type.

    `unset` says what None stands for, `short` is a short flag, and `check` converts a value whose type does not say
    how.
    """
    return Declared(*given, **more)


@dataclass_transform(eq_default=False, kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Options:
    """The options of a call: converted, checked and frozen.

    A class declares each as a field: `eps: float = field("Help.", "E", default=1e-6)`. That is all that a dataclass
    would need; its decorator would take longer than all else that the start of a small call takes.

    Raises:
        TypeError: there is no such option, or an argument is missing.
        UsageError: a value is of a wrong type or out of range.
    """

    # The operation, as messages call it, and the group in help of the options that the class itself declares.
    operation: ClassVar[str] = ""
    title: ClassVar[str] = OPTIONS

    def __init__(self, *arguments: Any, **given: Any) -> None:
        try:
            bound = _signature_of(type(self)).bind(*arguments, **given)
        except TypeError as error:
            raise TypeError(f"{self.operation}() {error}") from None
        bound.apply_defaults()
        declared = declared_of(type(self))
        vars(self).update({name: declared[name].parse(value) for name, value in bound.arguments.items()})

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"cannot assign to field {name!r}")

    def replace(self, **values: Any) -> Self:
        """Return a copy with other values, which are not checked."""
        options = copy(self)
        vars(options).update(values)
        return options

    def is_default(self, name: str) -> bool:
        """Check whether an option has its default value."""
        declared = declared_of(type(self))[name]
        return bool(getattr(self, name) == declared.parse(declared.default))


def _cached(function: Callable[[type[Options]], _Result]) -> Callable[[type[Options]], _Result]:
    # A class, which mypy does not take for hashable.
    return functools.cache(function)  # type: ignore[return-value]


@_cached
def declared_of(options: type[Options]) -> dict[str, Declared]:
    """Return the declarations of a class by name: arguments, its own options, then the shared ones, group by group."""
    # All bases but Options and object.
    declared = {name: vars(base)[name] for base in reversed(options.__mro__[:-2]) for name in base.__annotations__}
    return dict(sorted(declared.items(), key=lambda entry: GROUPS.index(entry[1].group)))


@_cached
def _signature_of(options: type[Options]) -> Signature:
    kinds = {ARGUMENTS: Parameter.POSITIONAL_OR_KEYWORD}
    parameters = [
        Parameter(name, kinds.get(entry.group, Parameter.KEYWORD_ONLY), default=entry.default, annotation=entry.hint)
        for name, entry in declared_of(options).items()
    ]
    return Signature(parameters)


def operation(
    options: Callable[_Given, _Options],
) -> Callable[[Callable[[_Options], _Result]], Callable[_Given, _Result]]:
    """Turn a function of an options object into a public function that takes the options by name."""

    def decorate(function: Callable[[_Options], _Result]) -> Callable[_Given, _Result]:
        @functools.wraps(function)
        def call(*arguments: _Given.args, **given: _Given.kwargs) -> _Result:
            if given.get("progress") is not True:
                return function(options(*arguments, **given))
            from gradtool.report.progress import progress  # only needed by Python

            with progress(function.__name__, wanted=True) as bar:
                return function(options(*arguments, **given).replace(progress=bar))

        call.options = options  # type: ignore[attr-defined]
        return call

    return decorate


def document(function: Any) -> Any:
    """Write out the options of an operation in its signature, and as "Args:" in its docstring; return it."""
    function.__signature__ = _signature_of(function.options).replace(
        return_annotation=function.__annotations__["return"]
    )
    # Python -OO has no docstrings.
    text = cleandoc(function.__doc__ or "")
    head, title, tail = text.partition("Returns:\n" if "Returns:\n" in text else "Raises:\n")
    entries = [
        f"    {entry.name}: {entry.text}{f' Default: {entry.unset}.' if entry.unset else ''}"
        for entry in declared_of(function.options).values()
    ]
    function.__doc__ = "\n".join([head + "Args:", *entries, "", title + tail])
    return function
