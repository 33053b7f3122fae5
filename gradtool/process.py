"""How a run meets the system: signals, limits, and the exit code with what is said about it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any

from gradtool import memory, report
from gradtool.errors import EXIT_FOUND, EXIT_OK, GradtoolError, Problem, SystemRefusedError, from_os_error
from gradtool.store import signals

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

# More files than any run has open.
_OPEN_FILES = 65_536
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A signal that has come and has not been told of: Typer makes a bare exit code of those that it meets.
pending: Ended | None = None
# What is left is to say how it ended, in a moment. One signal does not stop that; a second one does, for it may be that
# nobody reads what we say.
_is_ending = False
was_spared = False
# A signal has had its effect, and no other shall tear into the clean-up that it has set off.
_has_ended = False


class Ended(KeyboardInterrupt):
    """A signal that asks us to end, taken as Ctrl-C is, so that temporaries are removed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def finish(command: str, result: Any, *, json: bool, quiet: bool) -> int:
    """Show a result and what was found; the exit code."""
    say_last_words()
    problems = getattr(result, "problems", ())
    if json or not quiet:
        _show(command, result, problems, json=json)
    report.complain(problems)
    if not quiet:
        report.complain(getattr(result, "warnings", ()), level="warning")
    return EXIT_FOUND if problems else EXIT_OK


def _show(command: str, result: Any, problems: Sequence[Problem], *, json: bool) -> None:
    try:
        report.show(command, result, problems, as_json=json)
    except (SystemRefusedError, MemoryError) as error:
        reason = str(refused(error))
        raise SystemRefusedError(f"{reason}; the work itself is done") from error


def fail(*problems: Problem, exit_code: int, summary: str | None = None) -> int:
    """Say what is wrong wherever it can still be said; the exit code, which does not depend on that."""
    say_last_words()
    report.complain(problems, summary)
    if "--json" in sys.argv[1:] and sys.stdout is not None:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        with contextlib.suppress(SystemRefusedError, MemoryError, ImportError):
            report.print_json(command, exit_code, {}, problems)
    return exit_code


def refused(error: OSError | MemoryError | ImportError) -> GradtoolError:
    """The error for what the system refused where that was not foreseen."""
    # What the failed call still holds is the memory that it takes to say so.
    error.__traceback__ = None
    if isinstance(error, ImportError):
        # Under a limit, a module may be too large to load.
        why = f"not enough memory, perhaps: {memory.REMEDY}" if memory.is_limited() else "install gradtool again"
        return SystemRefusedError(f"cannot load {error.name or 'a module'}; {why}")
    if isinstance(error, MemoryError):
        return SystemRefusedError(f"out of memory; use fewer --threads, or {memory.REMEDY}")
    if isinstance(error, GradtoolError):
        return error
    if error.filename is not None:
        return from_os_error(error, os.fsdecode(error.filename))
    try:
        os.getcwd()  # noqa: PTH109 - pathlib is slow to import
    except OSError:
        return SystemRefusedError("the current folder is gone; change to another one")
    return SystemRefusedError(f"the system refused: {error.strerror or error}")


def interrupted(error: KeyboardInterrupt, *, work_done: bool = False) -> int:
    """Say what the run was ended by, and what became of the files; the exit code."""
    global pending  # noqa: PLW0603
    pending = None
    number = error.number if isinstance(error, Ended) else signal.SIGINT
    word = "interrupted" if number == signal.SIGINT else "terminated"
    notes = ["the work itself is done"] if work_done else getattr(error, "__notes__", [])
    problem, exit_code = Problem("interrupted", "; ".join([word, *notes])), 128 + number
    if not work_done:
        return fail(problem, exit_code=exit_code)
    # Its result may be half printed; another object after it would not mend that.
    report.complain([problem])
    return exit_code


def show_traceback() -> None:
    """Print where the current exception comes from, for those who asked to see it."""
    if os.environ.get("GRADTOOL_DEBUG"):
        import traceback

        traceback.print_exc()


def take_signals() -> None:
    """Have every signal that asks us to end end us cleanly."""
    for number in _ENDING:
        # One that was ignored when we were started, as under nohup, stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def say_last_words() -> None:
    """Only what is printed is left: a signal has nothing to stop, nor had one that was lost in foreign code."""
    global _is_ending, pending
    _is_ending, pending = True, None


def leave_signals() -> None:
    """Let no signal tear into what is left: to say the exit code."""
    global _has_ended  # noqa: PLW0603
    _has_ended = True


def _end(number: int, _frame: FrameType | None) -> None:
    global pending, was_spared, _has_ended  # noqa: PLW0603
    if _has_ended:
        return
    if (_is_ending or signals.is_past_return()) and not was_spared:
        was_spared = True
        return
    _has_ended = True
    pending = Ended(number)
    raise pending


def allow_open_files() -> None:
    """Raise this process's limit on open files as far as it may, for a run holds several for each folder."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some systems have another limit, below the one that they tell of.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
