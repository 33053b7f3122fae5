"""Parses command lines with Typer, and writes help; no other module imports Typer."""

# No `from __future__ import annotations`: Typer reads those of `run`.

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Annotated, Any, NamedTuple, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

import gradtool
from gradtool.declare import ARGUMENTS, GENERAL, PYTHON, Declared, Options, declared_of
from gradtool.errors import UsageError, as_command, shortened
from gradtool.options import DisplayOptions

# The base of Typer's errors about a command line; where it is defined depends on the version of Typer.
_TyperError: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

_SUMMARY = (
    "Clip, accumulate, zero and measure gradients in safetensors files, in place, "
    "with bit-for-bit reproducible results."
)
# The columns of names in help, and of the terminal that has room for help beside them.
_NAMES, _ROOM = 26, 68
# Click breaks lines at hyphens but not at this character, which replaces them until help is printed.
_UNBROKEN = "\N{NON-BREAKING HYPHEN}"
# Characters of help that a shell shows beside an option; of a longer text, Typer would offer each line.
_BRIEF = 60
# With this in the environment, Typer's --show-completion takes the name of a shell instead of guessing it.
_TAKES_SHELL = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"

# Names of options in other tools, and likely slips.
_ALIASES = {
    "--inplace": "--write inplace", "--in-place": "--write inplace", "-i": "--write inplace",
    "--out": "--output", "--out-dir": "--output-dir", "-o": "--output",
    "--max-grad-norm": "--max-norm", "--clip-norm": "--max-norm", "--clip-value": "--max-value",
    "--ord": "--norm-type", "-p": "--norm-type", "--gpu": "--backend cuda", "--cuda": "--backend cuda",
    "--cpu": "--backend cpu", "--jobs": "--threads", "-j": "--threads", "--num-threads": "--threads", "-n": "--dry-run",
    "--ignore-journal": "--allow-unfinished",
}  # fmt: skip


class Command(NamedTuple):
    """A command: the options that it takes; its line in the list of commands and, after an empty line, its help."""

    options: type[Options]
    description: str

    @property
    def declared(self) -> list[Declared]:
        """Its arguments and options, with those of the display."""
        return [*declared_of(self.options).values(), *declared_of(DisplayOptions).values()]

    @property
    def usage(self) -> list[str]:
        """What follows the name in the line of usage."""
        arguments = [field for field in self.declared if field.group == ARGUMENTS]
        return [
            "[OPTIONS]",
            *(field.metavar if field.default is Parameter.empty else f"[{field.metavar}]" for field in arguments),
        ]


class _Command(TyperCommand):
    """A command whose help has a heading for each group of options, and is the same for all versions of Typer."""

    command: Command

    def get_help(self, ctx: Any) -> str:
        return str(super().get_help(ctx)).replace(_UNBROKEN, "-")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002 - as Typer has it
        return self.command.usage

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as Typer has it
        groups: dict[str, list[tuple[str, str]]] = {}
        for field in self.command.declared:
            default = f"  [default: {field.default_text}]" if field.default_text else ""
            text = f"{as_command(field.help)}{default}"
            groups.setdefault(field.group, []).append((field.usage, _unbroken(text)))
        groups.pop(PYTHON, None)
        groups[GENERAL].append(("-h, --help", "Show this message and exit."))
        for title, rows in groups.items():
            _write_list(formatter, title, rows)


def _unbroken(text: str) -> str:
    """Return a text in which no line is broken within the name of an option."""
    return re.sub(r"(?<=[\w-])-(?=\w)", _UNBROKEN, text)


class _Root(TyperGroup):
    """A list of commands that is not cut off at the right."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, self.commands[name].short_help or "") for name in self.list_commands(ctx)]
        _write_list(formatter, "Commands", rows)


def _write_list(formatter: Any, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Write names with their help beside them, or below them on a narrow terminal."""
    width = _NAMES if formatter.width >= _ROOM else 2
    with formatter.section(title):
        formatter.write_dl([(name.ljust(width), text) for name, text in rows], col_max=width)


def _root(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"gradtool {gradtool.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


class Request(NamedTuple):
    """What a command line asks for."""

    command: str
    options: Options
    display: DisplayOptions


def parse(commands: Mapping[str, Command], arguments: Sequence[str]) -> Request | None:
    """Parse a command line; return None if all it asks for has been printed, such as help.

    Raises:
        UsageError: there is no such command or option, or a value is wrong.
    """
    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:2], "--help"]
    completes = "_GRADTOOL_COMPLETE" in os.environ
    # Typer prepares all options of all commands, needed or not. The list of commands needs none.
    named = [name for name in commands if name in arguments or completes]
    root = typer.Typer(
        name="gradtool",
        cls=_Root,
        # Shown in the list of commands; for a command, its options would only take time.
        add_completion=completes or not (named or "--version" in arguments),
        # Plain help: rich would cost as much again as everything else that --help does.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={
            "help_option_names": ["-h", "--help"],
            # Typer itself would write lines of 50 columns on any narrower terminal.
            "terminal_width": max(30, min(80, shutil.get_terminal_size().columns) - 2),
        },
    )
    root.callback(invoke_without_command=True, help=_SUMMARY)(_root)
    for name in named or commands:
        _add(root, name, commands[name], with_options=bool(named), completes=completes)
    os.environ[_TAKES_SHELL] = "1"
    group: Any = typer.main.get_command(root)
    # No installer: it would edit start-up files.
    group.params = [parameter for parameter in group.params if parameter.name != "install_completion"]
    for parameter in group.params:
        if parameter.name == "show_completion":
            parameter.metavar, parameter.help = "SHELL", "Print the completion script for bash, zsh, fish or pwsh."
    try:
        request = group.main(arguments, prog_name="gradtool", standalone_mode=False)
    except _TyperError as error:
        name = next((word for word in arguments if word in commands), "")
        raise _usage_error(error, name, commands.get(name)) from error
    # Typer returns the exit code where it ends before the command is called.
    return request if isinstance(request, Request) else None


def _add(root: typer.Typer, name: str, command: Command, *, with_options: bool, completes: bool) -> None:
    """Add a command to the Typer application."""
    fields = [field for field in command.declared if with_options and field.group != PYTHON]

    def run(**values: Any) -> Request:
        declared = {field.name: field for field in fields}
        given = {key: declared[key].read(value) for key, value in values.items() if value is not None}
        display = {key: given.pop(key) for key in declared_of(DisplayOptions) if key in given}
        return Request(name, command.options(**given), DisplayOptions(**display))

    run.__signature__ = Signature(  # type: ignore[attr-defined]
        [_parameter(field, completes=completes) for field in fields]
    )
    summary, _, text = command.description.partition("\n\n")
    cls = type("_Command", (_Command,), {"command": command})
    root.command(name, cls=cls, help=_unbroken(text), short_help=summary)(run)


def _parameter(field: Declared, *, completes: bool) -> Parameter:
    """Make an option for Typer. An option that is not given is None, because the function knows the default."""
    # `gradtool.validators` reads numbers.
    is_several = any(get_origin(kind) in {Iterable, Sequence} for kind in field.types)
    kind: Any = bool if bool in field.types else list[str] if is_several else str
    default = field.default
    if default is not Parameter.empty and kind is not bool:
        kind, default = kind | None, None

    def complete(incomplete: str) -> list[str]:
        return [choice if choice.startswith(incomplete) else choice.lower() for choice in field.choices]

    if field.group == ARGUMENTS:
        how: Any = typer.Argument(metavar=field.metavar)
    else:
        flags = ["/".join(field.flags)] if field.default is True else field.flags
        how = typer.Option(
            *flags,
            metavar=field.metavar,
            # Help is written by `_Command`.
            help=shortened(as_command(field.text), _BRIEF) if completes else None,
            autocompletion=complete if field.choices else None,
        )
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, how])


def _usage_error(error: Any, name: str, command: Command | None) -> UsageError:
    """Return the error for a command line that Typer refuses, with a hint where to read about its use."""
    message = error.format_message().rstrip(".")
    message = message[:1].lower() + message[1:]
    hint = f"see gradtool {name} --help" if command else "see gradtool --help"
    alias = _ALIASES.get(getattr(error, "option_name", ""), "")
    if alias and (command is None or any(alias.split()[0] in field.flags for field in command.declared)):
        message, hint = f"no such option: {error.option_name}", f"use {alias}, or {hint}"
    return UsageError(message, hint=hint)
