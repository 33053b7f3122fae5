"""The command as a process: signals, limits, exit codes, and the messages that explain them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any

from gradtool import report
from gradtool.errors import (
    EXIT_FOUND,
    EXIT_OK,
    GradtoolError,
    Problem,
    SystemRefusedError,
    as_command,
    from_os_error,
    option,
    say,
)
from gradtool.report.messages import print_problems, without_commands
from gradtool.store import signals

if TYPE_CHECKING:
    from types import FrameType

# More files than any run opens.
_OPEN_FILES = 65_536
# A signal that has arrived and is not reported yet: Typer would turn it into a bare exit code.
pending: Ended | None = None
# Only the result is left to print. One signal does not stop that; a second one does, because the output may never be
# read.
_is_reporting = False
first_signal_ignored = False
# A signal has taken effect, and no other may interrupt the clean-up that it set off.
_has_ended = False


class Ended(KeyboardInterrupt):
    """A signal that asks the process to end, raised like Ctrl-C so that temporaries are removed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def finish(command: str, result: Any, form: str, *, quiet: bool, verbose: bool) -> int:
    """Print a result and the problems found; return the exit code."""
    start_reporting()
    problems = getattr(result, "problems", ())
    exit_code = EXIT_FOUND if problems else EXIT_OK
    outcome = report.Outcome(command, exit_code, result, problems, quiet=quiet, verbose=verbose)
    try:
        report.show(form, outcome)
        sys.stdout.flush()
    except (SystemRefusedError, MemoryError) as error:
        first = system_error(error).problems[0]
        raise SystemRefusedError(say("{}; the work itself is done", first.message), hint=first.hint) from error
    print_problems(problems)
    print_problems(outcome.warnings, level="warning")
    return exit_code


def fail(*problems: Problem, exit_code: int, summary: str | None = None) -> int:
    """Print what is wrong, as far as that is still possible; return the exit code."""
    start_reporting()
    print_problems(problems, summary)
    if sys.stdout is not None:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        with contextlib.suppress(SystemRefusedError, MemoryError, ImportError):
            form = report.requested_format(sys.argv[1:])
            report.show(form, report.Outcome(command, exit_code, None, problems, summary))
            sys.stdout.flush()
    return exit_code


def system_error(error: OSError | MemoryError | ImportError) -> GradtoolError:
    """Return the gradtool error for what the system refused unexpectedly."""
    # Free the memory of the failed call: printing the error needs it.
    error.__traceback__ = None
    if isinstance(error, ImportError):
        hint = "install gradtool again, or raise the limit on memory (ulimit -v or -d)"
        return SystemRefusedError(f"cannot load {error.name or 'a module'}", hint=hint)
    if isinstance(error, MemoryError):
        hint = say("lower {}, or raise the limit on memory (ulimit -v or -d)", option("threads"))
        return SystemRefusedError("out of memory", hint=hint)
    if isinstance(error, GradtoolError):
        return error
    if error.filename is not None:
        return from_os_error(error, os.fsdecode(error.filename))
    try:
        os.getcwd()  # noqa: PTH109 - pathlib is slow to import
    except OSError:
        return SystemRefusedError("the current folder is gone", hint="change to another folder")
    return SystemRefusedError(f"the system refused: {error.strerror or error}")


def interrupted(error: KeyboardInterrupt, *, work_done: bool = False) -> int:
    """Print which signal ended the run, and what became of the files; return the exit code."""
    global pending  # noqa: PLW0603
    pending = None
    number = error.number if isinstance(error, Ended) else signal.SIGINT
    word = "interrupted" if number == signal.SIGINT else "terminated"
    if number not in (signal.SIGINT, signal.SIGTERM):
        word += f" by signal {number} ({signal.strsignal(number)})"
    # Whatever changes files notes how far it got.
    notes = ["the work itself is done"] if work_done else getattr(error, "__notes__", ["no file was changed"])
    problem, exit_code = Problem("interrupted", "; ".join([word, *map(as_command, notes)])), 128 + number
    if not work_done:
        return fail(problem, exit_code=exit_code)
    # The result may be half printed; another JSON object after it would not help.
    print_problems([problem])
    return exit_code


def show_traceback() -> None:
    """Print the traceback of the current exception if GRADTOOL_DEBUG is set."""
    if os.environ.get("GRADTOOL_DEBUG"):
        import traceback

        sys.stderr.write(without_commands(traceback.format_exc()))


def install_handlers() -> None:
    """Let every signal that asks the process to end do so cleanly."""
    for number in signals.ENDING:
        # One that was ignored at the start, as under nohup, stays ignored; a profiler's handler stays as well.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def start_reporting() -> None:
    """Note that only printing is left: a signal has nothing to stop, nor had one that foreign code swallowed."""
    global _is_reporting, pending
    _is_reporting, pending = True, None


def ignore_signals() -> None:
    """Ignore signals from now on: only the exit code is left to return."""
    global _has_ended  # noqa: PLW0603
    _has_ended = True


def _end(number: int, _frame: FrameType | None) -> None:
    global pending, first_signal_ignored, _has_ended  # noqa: PLW0603
    if _has_ended:
        return
    if (_is_reporting or signals.is_committed()) and not first_signal_ignored:
        first_signal_ignored = True
        return
    _has_ended = True
    pending = Ended(number)
    raise pending


def adjust_limits() -> None:
    """Allow as many open files as possible, and get a signal before the limit of processor time kills."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some systems have a lower limit than they report.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    # `ulimit -t` sets both limits. At the soft one, the system sends SIGXCPU; at the hard one, it kills.
    if soft == hard != resource.RLIM_INFINITY and hard > 1:
        resource.setrlimit(resource.RLIMIT_CPU, (hard - 1, hard))
