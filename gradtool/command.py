"""Parses command lines with Typer, and writes help; no other module imports Typer."""

# No `from __future__ import annotations`: Typer reads those of `run`.

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Annotated, Any, NamedTuple, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

import gradtool
from gradtool import help as topics
from gradtool.declare import ARGUMENTS, GENERAL, PYTHON, Declared, Options, declared_of
from gradtool.errors import UsageError, as_command, shortened
from gradtool.options import DisplayOptions

# The base of Typer's errors about a command line; where it is defined depends on the version of Typer.
_TyperError: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

_SUMMARY = (
    "Clip, accumulate, zero and measure gradients in safetensors files, in place, "
    "with bit-for-bit reproducible results."
)
# The columns of names in help, also in brief help, and of the terminal that has room for help beside them.
_NAMES, _BRIEF_NAMES, _ROOM = 26, 17, 68
# Click breaks lines at hyphens but not at this character, which replaces them until help is printed.
_UNBROKEN = "\N{NON-BREAKING HYPHEN}"
# Characters of help that a shell shows beside an option; of a longer text, Typer would offer each line.
_BRIEF = 60
# Commands named in a hint.
_MAX_NAMED = 3
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
    """A command: the options that it takes; its line in the list of commands and, after an empty line, its help.

    `common` are the names of the options that are used most.
    """

    options: type[Options]
    common: str
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
    # The help is one screen.
    is_brief: bool

    def get_help(self, ctx: Any) -> str:
        last = f"{ctx.command_path} --help shows all options." if self.is_brief else f"Documentation: {topics.DOCS}"
        return _styled(f"{super().get_help(ctx)}\n\n{last}")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002 - as Typer has it
        return self.command.usage

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as Typer has it
        groups: dict[str, list[tuple[str, str]]] = {}
        if self.is_brief:
            fields = {field.name: field for field in self.command.declared}
            common = [fields[name] for name in self.command.common.split()]
            # The first sentence, up to a parenthesis.
            texts = [re.split(r"\.( |$)|; | \(", as_command(field.help))[0] for field in common]
            rows = [(field.usage, f"{_unbroken(text)}.") for field, text in zip(common, texts, strict=True)]
            _write_list(formatter, "Options used most", rows, _BRIEF_NAMES)
            return
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


def _styled(text: str) -> str:
    """Return help with headings that stand out, and the hyphens that it is printed with."""
    text = text.replace(_UNBROKEN, "-")
    return re.sub(r"(?m)^(Usage:|\S.*:$|  Examples:$)", lambda match: topics.heading(match[0]), text)


class _Root(TyperGroup):
    """A list of commands that is not cut off at the right."""

    def get_help(self, ctx: Any) -> str:
        return _styled(f"{super().get_help(ctx)}\n\nDocumentation: {topics.DOCS}")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, self.commands[name].short_help or "") for name in self.list_commands(ctx)]
        _write_list(formatter, "Commands", rows)
        more = [
            ("COMMAND -h", "The options used most, with examples."),
            ("COMMAND --help", "All options."),
            ("help TOPIC", f"{', '.join(topics.TOPICS[:-1])} or {topics.TOPICS[-1]}."),
        ]
        _write_list(formatter, "Help", [(name, _unbroken(text)) for name, text in more])


def _write_list(formatter: Any, title: str, rows: Sequence[tuple[str, str]], names: int = _NAMES) -> None:
    """Write names with their help beside them, or below them on a narrow terminal."""
    width = names if formatter.width >= _ROOM else 2
    with formatter.section(title):
        # Colours have no width.
        cells = [(f"{topics.literal(name)}{' ' * (width - len(name))}", text) for name, text in rows]
        formatter.write_dl(cells, col_max=width)


def _root(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
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
        topic = "-".join(arguments[1:])
        if topic in topics.TOPICS:
            typer.echo(topics.text_of(topic))
            return None
        if topic and topic not in commands:
            raise UsageError(f"no such command or topic {topic!r}", hint=f"topics are {', '.join(topics.TOPICS)}")
        arguments = [*arguments[1:], "--help"]
    if arguments[:1] == ["version"]:
        arguments = ["--version", *arguments[1:]]
    completes = "_GRADTOOL_COMPLETE" in os.environ
    # Typer prepares all options of all commands, needed or not. The list of commands needs none.
    named = [name for name in commands if name in arguments or completes]
    root = typer.Typer(
        name="gradtool",
        cls=_Root,
        # Shown in the list of commands; for a command, its options would only take time.
        add_completion=completes or not (named or "--version" in arguments or "-V" in arguments),
        # Plain help: rich would cost as much again as everything else that --help does.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "terminal_width": topics.width(),
        },
    )
    root.callback(invoke_without_command=True, help=_SUMMARY)(_root)
    for name in named or commands:
        _add(root, name, commands[name], with_options=bool(named), completes=completes, brief="--help" not in arguments)
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
        raise _usage_error(error, name, commands) from error
    # Typer returns the exit code where it ends before the command is called.
    return request if isinstance(request, Request) else None


def _add(root: typer.Typer, name: str, command: Command, *, with_options: bool, completes: bool, brief: bool) -> None:
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
    if brief:
        text = f"{summary}\n\n\b{text.partition(chr(8))[2]}"
    cls = type("_Command", (_Command,), {"command": command, "is_brief": brief})
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


def _usage_error(error: Any, name: str, commands: Mapping[str, Command]) -> UsageError:
    """Return the error for a command line that Typer refuses, with a hint where to read about its use."""
    command, flag = commands.get(name), getattr(error, "option_name", "")
    message = error.format_message().rstrip(".")
    message = message[:1].lower() + message[1:]
    hint = f"see gradtool {name} --help" if command else "see gradtool --help"
    # An option of this command by another name, or else of other commands.
    alias = _ALIASES.get(flag, flag)
    flags = {other: [flag for field in each.declared for flag in field.flags] for other, each in commands.items()}
    others = [other for other in commands if flag and alias.split()[0] in flags[other]]
    if alias != flag and (command is None or name in others):
        message, hint = f"no such option: {flag}", f"use {alias}, or {hint}"
    elif command and name not in others and others and flag.startswith("--"):
        listed = [*others[:_MAX_NAMED], *(["others"] if others[_MAX_NAMED:] else [])]
        joined = " and ".join(filter(None, [", ".join(listed[:-1]), listed[-1]]))
        message, hint = f"no such option: {flag}", f"{alias.split()[0]} is an option of {joined}; {hint}"
    return UsageError(message, hint=hint)
