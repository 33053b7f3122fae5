"""Makes Typer commands of declared options; alone in importing Typer."""

# No `from __future__ import annotations`: Typer reads those of `run`.

import inspect
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

import gradtool
from gradtool import completion, process, streams
from gradtool.declare import ARGUMENTS, GENERAL, PYTHON, Declared, Options, declared_of, usage_of
from gradtool.formats import chosen_format
from gradtool.options import Display
from gradtool.report.progress import progress as progress_bar
from gradtool.store import signals

# Every wrong use of the command line is one; where it is defined depends on the version of Typer.
UsageProblem: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

# The columns of names in help, and of the terminal that has room for help beside them.
_NAMES = 26
_ROOM = 68


# What other tools call an option, or what is easily typed for it.
_ALIASES = {
    "--inplace": "--write inplace", "--in-place": "--write inplace", "-i": "--write inplace",
    "--out": "--output", "--out-dir": "--output-dir", "-o": "--output",
    "--max-grad-norm": "--max-norm", "--clip-norm": "--max-norm", "--clip-value": "--max-value",
    "--ord": "--norm-type", "-p": "--norm-type", "--gpu": "--backend cuda", "--cuda": "--backend cuda",
    "--cpu": "--backend cpu", "--jobs": "--threads", "-j": "--threads", "--num-threads": "--threads", "-n": "--dry-run",
}  # fmt: skip


class Command(NamedTuple):
    """A command: the options that it takes, its line in the list of commands, and its help."""

    options: type[Options]
    summary: str
    text: str

    @property
    def name(self) -> str:
        """The word for it on the command line."""
        return self.options.operation.replace("_", "-")

    @property
    def declared(self) -> list[Declared]:
        """Its arguments and options, with those of the display."""
        return [*declared_of(self.options).values(), *declared_of(Display).values()]

    def run(self, **given: Any) -> Any:
        """Call its function, which is imported only now."""
        name = self.options.operation
        return getattr(import_module(gradtool.MODULES[name]), name)(**given)


class _Command(TyperCommand):
    """A command whose help has a heading for each group of options, and is the same for all versions of Typer."""

    declared: Sequence[Declared]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002 - as Typer has it
        return usage_of(self.declared)

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as Typer has it
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in self.declared:
            groups.setdefault(one.group, []).append((one.usage, one.help))
        groups.pop(PYTHON, None)
        groups[GENERAL].append(("-h, --help", "Show this message and exit."))
        for title, rows in groups.items():
            _write_list(formatter, title, rows)


class _Root(TyperGroup):
    """A list of commands that is not cut off at the right."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, self.commands[name].short_help or "") for name in self.list_commands(ctx)]
        _write_list(formatter, "Commands", rows)


def _write_list(formatter: Any, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Names with their help beside them, or below them on a narrow terminal."""
    width = _NAMES if formatter.width >= _ROOM else 2
    with formatter.section(title):
        formatter.write_dl([(name.ljust(width), text) for name, text in rows], col_max=width)


def _root(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Clip, accumulate, zero and measure gradients in safetensors files, in place, with reproducible bits."""
    if version:
        typer.echo(f"gradtool {gradtool.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def usage_message(error: Any, command: Command | None) -> tuple[str, str]:
    """Return what is wrong with a command line, and where to read how it is used."""
    message = error.format_message().rstrip(".")
    meant = _ALIASES.get(getattr(error, "option_name", ""))
    if meant is not None and (command is None or meant.split()[0] in {field.flag for field in command.declared}):
        message = f"No such option: {error.option_name}; use {meant}"
    return message, f"see gradtool {command.name} --help" if command else "see gradtool --help"


def app(commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    """Run a command line; return the exit code."""
    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:2], "--help"]
    words = completion.words() if completion.is_requested() else arguments
    named = [name for name in commands if name in words]
    root = typer.Typer(
        name="gradtool",
        cls=_Root,
        # Shown in the list of commands; for a command, its options would only take time.
        add_completion=completion.is_requested() or not (named or "--version" in arguments),
        # Plain help: rich would cost as much again as everything else that --help does.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={
            "help_option_names": ["-h", "--help"],
            # Typer itself would write lines of 50 columns on any narrower terminal.
            "terminal_width": max(30, min(80, shutil.get_terminal_size().columns) - 2),
        },
    )
    root.callback(invoke_without_command=True)(_root)
    # Typer prepares all options of all commands, needed or not. The list of commands needs none.
    for name in named or commands:
        command = commands[name]
        declared = command.declared if named else []
        cls = type("_Declared", (_Command,), {"declared": declared})
        root.command(name, cls=cls, help=command.text, short_help=command.summary)(_runner(command, declared))
    os.environ[completion.TAKES_NAME] = "1"
    group: Any = typer.main.get_command(root)
    completion.print_instead_of_installing(group)
    return int(group.main(arguments, prog_name="gradtool", standalone_mode=False) or 0)


def _runner(command: Command, declared: Sequence[Declared]) -> Callable[..., int]:
    """Return what Typer calls for a command: it calls the function and shows the result."""
    shows_progress = any(field.group == PYTHON for field in declared)

    def run(*, format: str | None, json: bool, quiet: bool, verbose: bool, **values: Any) -> int:  # noqa: A002
        given = {key: value for key, value in values.items() if value is not None}
        form = chosen_format(format, json=json)
        if form != "text" or not quiet:
            streams.require_stdout()
        result = None
        try:
            with progress_bar(command.name, wanted=not quiet) as progress:
                result = command.run(**given, progress=progress) if shows_progress else command.run(**given)
            return process.finish(command.name, result, form, quiet=quiet, verbose=verbose)
        except KeyboardInterrupt as error:
            # Here and not in main(), because Typer would make an exit code of it and drop the rest.
            return process.interrupted(error, work_done=result is not None or signals.is_committed())

    parameters = [_parameter(field) for field in declared if field.group != PYTHON]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameter(field: Declared) -> inspect.Parameter:
    """Make an option for Typer. One that is not given is None, because the function knows the default."""
    kind, default = _plain(field.types), field.default
    if not field.is_required and not isinstance(default, bool):
        kind, default = kind | None, None
    if field.group == ARGUMENTS:
        how: Any = typer.Argument(metavar=field.metavar)
    else:
        help_of_shell = completion.brief(field.text) if completion.is_requested() else None
        values = completion.values(field.choices)
        how = typer.Option(*field.flags, metavar=field.metavar, help=help_of_shell, autocompletion=values)
    annotation: Any = Annotated[kind, how]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _plain(types: Sequence[Any]) -> Any:
    """Return the type of a value on the command line: a flag, text, or several; `gradtool.validators` reads numbers."""
    if bool in types:
        return bool
    return list[str] if any(get_origin(one) in {Iterable, Sequence} for one in types) else str
