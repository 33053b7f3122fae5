"""Prints the man page, made from the commands and the options: python docs/make_man.py > docs/gradtool.1."""

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence

import gradtool
from gradtool.cli import COMMANDS
from gradtool.declare import ARGUMENTS, OPTIONS, PYTHON, Declared, declared_of
from gradtool.errors import as_command, option
from gradtool.options import SHARED

PAGE = r"""
.\" Made by python docs/make_man.py > docs/gradtool.1. Change gradtool/cli.py
.\" and gradtool/options.py instead.
.TH GRADTOOL 1 "" "gradtool {version}" "User Commands"
.SH NAME
gradtool \- clip, accumulate, zero and measure gradients in safetensors files
.SH SYNOPSIS
{synopsis}
.SH DESCRIPTION
Reads gradients (or any tensors) from safetensors files, treats all files of a
call as one vector, and writes results in place. The results have the same
bits for any number of threads and any way to spread tensors over files. After
a crash, all files of a call are old or all are new.
.PP
A path is a file, a folder, or an index (\fI*.safetensors.index.json\fR).
.SH COMMANDS
{commands}
{shared}
.SH EXIT STATUS
{codes}
.SH ENVIRONMENT
.TP
.B GRADTOOL_BACKEND
Compute backend: auto, cpu or cuda.
.TP
.B GRADTOOL_KERNELS
Set to numpy to run the cpu backend without the compiled kernels.
.TP
.B GRADTOOL_ENGINE
Where to run: threads, or dask:ADDRESS.
.TP
.B GRADTOOL_FORMAT
Output format: text, json, jsonl or github.
.TP
.B GRADTOOL_DEBUG
Set to 1 to print a traceback with each error.
.TP
.B NO_COLOR
Set to print errors without colour.
.SH FILES
.TP
.I .gradtool\-*
Logs, locks and temporaries of a run, beside the data while it works;
\fBgradtool recover\fR removes those of a crashed run.
"""
CODES = {
    0: "done",
    1: "a check found something, such as NaN",
    2: "wrong usage",
    3: "bad input: a file, a shape, a type or a name",
    4: "the backend or the engine is not available",
    5: "the system refused: permission, disk full, a file in use or half changed",
    "128 + N": "signal N ended the run: 130 for Ctrl-C, 143 for kill",
}


def page() -> str:
    """Return the whole page."""
    groups = {title: group for title, group in SHARED.items() if title != PYTHON}
    filled = PAGE.format(
        version=escaped(gradtool.__version__),
        synopsis="\n.br\n".join(synopsis(name) for name in COMMANDS),
        commands="\n".join(command(name) for name in COMMANDS),
        shared="\n".join(
            f".SH {title.upper()} OPTIONS\n{entries(declared_of(group).values())}" for title, group in groups.items()
        ),
        codes="\n".join(f".TP\n.B {code}\n{escaped(text)}" for code, text in CODES.items()),
    )
    return filled.strip()


def synopsis(name: str) -> str:
    """Return how a command is called."""
    return rf"\fBgradtool {escaped(name)}\fR {escaped(' '.join(COMMANDS[name].usage))}"


def command(name: str) -> str:
    """Return the section of a command."""
    text, examples = COMMANDS[name].description.partition("\n\n")[2].rstrip().split("\n\n\b\nExamples:\n")
    declared = COMMANDS[name].declared
    options = [item for item in declared if item.group in {ARGUMENTS, OPTIONS}]
    paragraphs = "\n.PP\n".join(paragraph(part) for part in text.split("\n\n"))
    return "\n".join(
        [
            f".SS gradtool {escaped(name)}",
            paragraphs,
            entries(options),
            f".PP\n{paragraph(f'And the options under {shared_of(declared)}.')}",
            f".PP\nExamples:\n.PP\n.EX\n{lines(escaped(inspect.cleandoc(examples)))}\n.EE",
        ]
    )


def entries(declared: Iterable[Declared]) -> str:
    """Return arguments and options, each with its meaning and its default."""
    rows = []
    for item in declared:
        default = f" Default: {item.default_text}." if item.default_text else ""
        rows.append(f".TP\n{usage(item)}\n{paragraph(as_command(item.text) + default)}")
    return "\n".join(rows)


def usage(item: Declared) -> str:
    """Return an option as it is typed: its names in bold, its value in italics."""
    if item.group == ARGUMENTS:
        return rf"\fI{escaped(item.metavar)}\fR"
    flags = re.sub(
        r"[^ ,/]+", lambda match: rf"\fB{escaped(match[0])}\fR", item.usage.removesuffix(item.metavar).strip()
    )
    return rf"{flags} \fI{escaped(item.metavar)}\fR" if item.metavar else flags


def shared_of(declared: Sequence[Declared]) -> str:
    """Return the groups of options that a command shares; with their names, if it does not have all of a group."""
    groups = []
    for title, group in SHARED.items():
        names = [option(item.name).command for item in declared if item.group == title and title != PYTHON]
        listed = "" if len(names) == len(declared_of(group)) else f" ({', '.join(names)})"
        groups += [f"{title.upper()} OPTIONS{listed}"] if names else []
    return ", ".join(groups)


def paragraph(text: str) -> str:
    """Return running text, in lines of fewer than 80 bytes, which troff's checkers ask for."""
    return lines(textwrap.fill(escaped(text), 72, break_on_hyphens=False, break_long_words=False))


def lines(text: str) -> str:
    """Lines, none of which is taken for a request because it begins with a dot or a quote."""
    return re.sub(r"(?m)^(?=[.'])", r"\\&", text)


def escaped(text: str) -> str:
    """Return the text with the characters escaped that mean something to troff."""
    return text.replace("\\", r"\e").replace("-", r"\-")


if __name__ == "__main__":
    print(page())
