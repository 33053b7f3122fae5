"""Text, and for GitHub Actions an annotation for each error and warning, and a section on the page of the run."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from gradtool.errors import Problem, as_command, shortened
from gradtool.report import step_summary, text
from gradtool.report.messages import and_more, print_problems, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.report import Outcome

# GitHub shows ten errors and ten warnings of a step, and this many characters of each.
_MOST = 10
_MOST_CHARACTERS = 4000
# What the runner reads back (ActionCommand.cs of github.com/actions/runner).
_ESCAPED = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_IN_MESSAGES = str.maketrans(_ESCAPED)
_IN_PROPERTIES = str.maketrans(_ESCAPED | {":": "%3A", ",": "%2C"})


def show(outcome: Outcome) -> None:
    """Print the result as text, then the annotations; write the section."""
    text.show(outcome)
    refused = step_summary.append(outcome)
    warnings = [*outcome.warnings, *refused]
    lines = [
        *_annotations(outcome.command, "error", outcome.problems, outcome.summary),
        *_annotations(outcome.command, "warning", warnings),
    ]
    sys.stdout.write("".join(lines))
    print_problems(refused, level="warning")


def _annotations(command: str, level: str, problems: Sequence[Problem], summary: str | None = None) -> Iterator[str]:
    """Yield as many as GitHub shows; the last ones say how many more there are, and sum them up."""
    room = _MOST if summary is None else _MOST - 1
    shown = [problem.as_command() for problem in (problems if len(problems) <= room else problems[: room - 1])]
    # What sums them up has the hint that they share.
    common = None if summary is None or not shown else shown[-1].hint
    for problem in shown:
        text = _with_hint(problem.line, None if problem.hint == common else problem.hint)
        yield _annotation(level, f"gradtool {command} ({problem.code})", text, problem.file)
    if len(shown) < len(problems):
        yield _annotation(level, f"gradtool {command}", and_more(len(problems) - len(shown)))
    if summary is not None:
        yield _annotation(level, f"gradtool {command}", _with_hint(as_command(summary), common))


def _with_hint(message: str, hint: str | None) -> str:
    return f"{message}. {hint[0].upper()}{hint[1:]}" if hint else message


def _annotation(level: str, title: str, message: str, file: str | None = None) -> str:
    """A workflow command. The message names the file too, because the log shows nothing else."""
    properties = {"file": _in_workspace(file), "title": title} if file else {"title": title}
    said = ",".join(f"{key}={printable(value).translate(_IN_PROPERTIES)}" for key, value in properties.items())
    message = printable(shortened(message, _MOST_CHARACTERS)).translate(_IN_MESSAGES)
    return f"::{level} {said}::{message}\n"


def _in_workspace(file: str) -> str:
    """The path from the root of the repository, for a file in it; GitHub links no others."""
    workspace = os.environ.get("GITHUB_WORKSPACE")
    if not workspace:
        return file
    try:
        path = os.path.relpath(file, workspace)
    except OSError:  # The current folder is gone.
        return file
    return file if path == os.pardir or path.startswith(os.pardir + os.sep) else path
