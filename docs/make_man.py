"""Prints the man page, made from the commands and the options: python docs/make_man.py > docs/gradtool.1."""

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence

import gradtool
from gradtool.cli import COMMANDS
from gradtool.declare import ARGUMENTS, OPTIONS, PYTHON, Declared, declared_of
from gradtool.errors import as_command, option
from gradtool.help import DOCS, TOPICS, markdown_of
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
Set to print errors and help without colour.
.SH FILES
.TP
.I .gradtool\-*
Logs, locks and temporaries of a run, beside the data while it works;
\fBgradtool recover\fR removes those of a crashed run.
.SH SEE ALSO
\fBgradtool help\fR \fITOPIC\fR prints a topic: {topics}.
.PP
{docs}
"""
# The entries of a list, each of which may have several lines.
ENTRIES = markdown_of("exit-codes").replace("\n  ", " ").replace("`", "")
CODES = re.findall(r"(?m)^- ([^:]+): (.*)$", ENTRIES)


def page() -> str:
    """Return the whole page."""
    groups = {title: group for title, group in SHARED.items() if title != PYTHON}
    filled = PAGE.format(
        version=escaped(gradtool.__version__),
        topics=escaped(", ".join(TOPICS)),
        docs=escaped(DOCS),
        synopsis="\n.br\n".join(synopsis(name) for name in COMMANDS),
        commands="\n".join(command(name) for name in COMMANDS),
        shared="\n".join(
            f".SH {title.upper()} OPTIONS\n{entries(declared_of(group).values())}" for title, group in groups.items()
        ),
        codes="\n".join(f".TP\n.B {code}\n{paragraph(text)}" for code, text in CODES),
    )
    return filled.strip()


def synopsis(name: str) -> str:
    """Return how a command is called."""
    return rf"\fBgradtool {escaped(name)}\fR {escaped(' '.join(COMMANDS[name].usage))}"


def command(name: str) -> str:
    """Return the section of a command."""
    text, examples = COMMANDS[name].description.partition("\n\n")[2].rstrip().split("\n\n\b\nExamples:\n")
    declared = COMMANDS[name].declared
    local = [field for field in declared if field.group in {ARGUMENTS, OPTIONS}]
    paragraphs = "\n.PP\n".join(paragraph(part) for part in text.split("\n\n"))
    return "\n".join(
        [
            f".SS gradtool {escaped(name)}",
            paragraphs,
            entries(local),
            f".PP\n{paragraph(f'And the options under {shared_of(declared)}.')}",
            f".PP\nExamples:\n.PP\n.EX\n{lines(escaped(inspect.cleandoc(examples)))}\n.EE",
        ]
    )


def entries(declared: Iterable[Declared]) -> str:
    """Return arguments and options, each with its meaning and its default."""
    rows = []
    for field in declared:
        default = f" Default: {field.default_text}." if field.default_text else ""
        rows.append(f".TP\n{usage(field)}\n{paragraph(as_command(field.text) + default)}")
    return "\n".join(rows)


def usage(field: Declared) -> str:
    """Return an option as it is typed: its names in bold, its value in italics."""
    if field.group == ARGUMENTS:
        return rf"\fI{escaped(field.metavar)}\fR"
    flags = re.sub(
        r"[^ ,/]+", lambda flag: rf"\fB{escaped(flag[0])}\fR", field.usage.removesuffix(field.metavar).strip()
    )
    return rf"{flags} \fI{escaped(field.metavar)}\fR" if field.metavar else flags


def shared_of(declared: Sequence[Declared]) -> str:
    """Return the groups of options that a command shares; with their names, if it does not have all of a group."""
    links = []
    for title, group in SHARED.items():
        flags = [option(field.name).command for field in declared if field.group == title and title != PYTHON]
        names = "" if len(flags) == len(declared_of(group)) else f" ({', '.join(flags)})"
        links += [f"{title.upper()} OPTIONS{names}"] if flags else []
    return ", ".join(links)


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
