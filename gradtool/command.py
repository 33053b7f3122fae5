"""Makes a Typer command of a function that declares its options; alone in importing Typer."""

# No `from __future__ import annotations`: Typer reads those of `run`.

import inspect
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeVar, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

import gradtool
from gradtool import completion, process, streams
from gradtool.formats import chosen_format
from gradtool.options import Display
from gradtool.report.progress import progress as progress_bar
from gradtool.signatures import ARGUMENTS, GENERAL, PYTHON, Declared, options_of, parameters_of, usage_of
from gradtool.store import signals

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Every wrong use of the command line is one; where it is defined depends on the version of Typer.
UsageProblem: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

# The functions that are commands, and what each does in a few words, by the names of the commands.
COMMANDS: dict[str, tuple[Callable[..., Any], str]] = {}

# The columns of names in help, and of the terminal that has room for help beside them.
_NAMES = 26
_ROOM = 68


# What other tools call an option, or what is easily typed for it.
_MEANT = {
    "--inplace": "--write inplace", "--in-place": "--write inplace", "-i": "--write inplace",
    "--out": "--output", "--out-dir": "--output-dir", "-o": "--output",
    "--max-grad-norm": "--max-norm", "--clip-norm": "--max-norm", "--clip-value": "--max-value",
    "--ord": "--norm-type", "-p": "--norm-type", "--gpu": "--backend cuda", "--cuda": "--backend cuda",
    "--cpu": "--backend cpu", "--jobs": "--threads", "-j": "--threads", "--num-threads": "--threads", "-n": "--dry-run",
}  # fmt: skip


class _Command(TyperCommand):
    """A command whose help has a heading for each group of options, and is the same for all versions of Typer."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002 - as Typer has it
        return usage_of(declared_of(str(self.name)))

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as Typer has it
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in declared_of(str(self.name)):
            groups.setdefault(one.group, []).append((one.spelled, one.help))
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


def command(summary: str) -> Callable[[_Function], _Function]:
    """Make a command of a function, under its name, with the options that it declares and those of the display."""

    def add(function: _Function) -> _Function:
        COMMANDS[function.__name__.replace("_", "-")] = (function, summary)
        return function

    return add


def usage_message(error: Any, arguments: Sequence[str]) -> str:
    """What is wrong with a command line, and where to read how it is used."""
    message = error.format_message().rstrip(".")
    command = next((word for word in arguments if word in COMMANDS), None)
    meant = _MEANT.get(getattr(error, "option_name", ""))
    if meant is not None and (command is None or meant.split()[0] in {one.flag for one in declared_of(command)}):
        message = f"No such option: {error.option_name}; use {meant}"
    return f"{message} (see gradtool {command} --help)" if command else f"{message} (see gradtool --help)"


def app(arguments: Sequence[str]) -> int:
    """Run a command line; the exit code."""
    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:2], "--help"]
    words = completion.words() if completion.is_asked() else arguments
    named = [name for name in COMMANDS if name in words]
    root = typer.Typer(
        name="gradtool",
        cls=_Root,
        # Shown in the list of commands; for a command, its options would only take time.
        add_completion=completion.is_asked() or not (named or "--version" in arguments),
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
    for name in named or COMMANDS:
        function, summary = COMMANDS[name]
        run = _runner(name, declared_of(name) if named else [])
        root.command(name, cls=_Command, help=inspect.getdoc(function), short_help=summary)(run)
    os.environ[completion.TAKES_NAME] = "1"
    group: Any = typer.main.get_command(root)
    completion.print_instead_of_installing(group)
    return int(group.main(arguments, prog_name="gradtool", standalone_mode=False) or 0)


def declared_of(name: str) -> list[Declared]:
    """What a command's function declares, and the options of the display."""
    function, _ = COMMANDS[name]
    return [*parameters_of(inspect.signature(function)), *options_of(Display).values()]


def _runner(name: str, declared: Sequence[Declared]) -> Callable[..., int]:
    """What Typer calls for a command: calls its function and shows the result."""
    function, _ = COMMANDS[name]
    shows_progress = any(one.group == PYTHON for one in declared)

    def run(*, format: str | None, json: bool, quiet: bool, verbose: bool, **values: Any) -> int:  # noqa: A002
        given = {key: value for key, value in values.items() if value is not None}
        form = chosen_format(format, json=json)
        if form != "text" or not quiet:
            streams.require_stdout()
        result = None
        try:
            with progress_bar(name, wanted=not quiet) as progress:
                result = function(**given, progress=progress) if shows_progress else function(**given)
            return process.finish(name, result, form, quiet=quiet, verbose=verbose)
        except KeyboardInterrupt as error:
            # Here and not in main(), because Typer would make an exit code of it and drop the rest.
            return process.interrupted(error, work_done=result is not None or signals.is_committed())

    parameters = [_parameter(one) for one in declared if one.group != PYTHON]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameter(one: Declared) -> inspect.Parameter:
    """What Typer makes an option of. One that is not given is None, because the function knows the default."""
    kind, default = _plain(one.types), one.option.default
    if not one.is_required and not isinstance(default, bool):
        kind, default = kind | None, None
    is_argument = one.group == ARGUMENTS
    if is_argument:
        how: Any = typer.Argument(metavar=one.metavar)
    else:
        help_of_shell = completion.brief(one.option.help) if completion.is_asked() else None
        values = completion.values(one.choices)
        how = typer.Option(*one.flags, metavar=one.metavar, help=help_of_shell, autocompletion=values)
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, how])


def _plain(types: Sequence[Any]) -> Any:
    """The type of a value on the command line: a flag, text, or several; `gradtool.checks` reads numbers."""
    if bool in types:
        return bool
    return list[str] if any(get_origin(one) in {Iterable, Sequence} for one in types) else str
