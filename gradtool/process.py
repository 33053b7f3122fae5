"""The command as a process: standard streams, signals, limits, exit codes, and the messages that explain them."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import resource
import select
import signal
import sys
from typing import TYPE_CHECKING, Any, cast

from gradtool import report
from gradtool.errors import (
    EXIT_BUG,
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
    from collections.abc import Sequence
    from types import FrameType
    from typing import TextIO

    from gradtool.report.delimited import Table

_STDERR = 2
# Many short lines of JSON are few system calls, and `| head -1` rarely breaks the pipe.
_BUFFER_BYTES = 1 << 16
# More files than any run opens.
_OPEN_FILES = 65_536
# A signal that has arrived and is not reported yet: Typer would turn it into a bare exit code.
pending: Ended | None = None
# Only the result, or an error, is left to print. One signal does not stop that; a second one does, because the output
# may never be read.
_is_reporting = False
_has_result = False
first_signal_ignored = False
# A signal has taken effect, and no other may interrupt the clean-up that it set off.
_has_ended = False


class Ended(KeyboardInterrupt):
    """A signal that asks the process to end, raised like Ctrl-C so that temporaries are removed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _File(io.FileIO):
    """A standard stream that waits while a pipe is full. A failure of stdout is an error, one of stderr is ignored."""

    def write(self, data: Any) -> int:
        try:
            while (nbytes := super().write(data)) is None:  # A pipe that does not block is full.
                poll = select.poll()
                poll.register(self, select.POLLOUT)
                poll.poll()
        except OSError as error:
            if self.fileno() == _STDERR or sys.stdout is None:
                return memoryview(data).nbytes
            raise _lost_stdout(error.strerror or str(error)) from error
        return nbytes


def replace_std_streams() -> None:
    """Open missing standard streams, replace Python's, and drop invalid sizes of the terminal."""
    for name in ("COLUMNS", "LINES"):
        # rich reads all that str.isdigit() takes for digits, such as ² or 5,000 nines.
        if re.fullmatch("[1-9][0-9]{0,4}", os.environ.get(name, "")) is None:
            os.environ.pop(name, None)
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # A data file must not get this descriptor, or a stray message could end up in it. Writing to the end of a
            # pipe that is read fails, and unlike /dev/null a pipe exists in every chroot.
            os.close(os.pipe()[1])
    # Whoever prints flushes.
    sys.stdout, sys.stderr = (
        # A name that the terminal's encoding lacks must not fail a call after its files are written.
        io.TextIOWrapper(
            io.BufferedWriter(_File(fd, "w", closefd=False), _BUFFER_BYTES),
            encoding="utf-8" if before is None else before.encoding,
            errors="backslashreplace",
            line_buffering=fd == _STDERR,
        )
        for fd, before in ((1, sys.stdout), (_STDERR, sys.stderr))
    )


def require_stdout() -> None:
    """Raise `SystemRefusedError` if nobody could read the result; called before a byte is changed."""
    if fcntl.fcntl(sys.stdout, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise _lost_stdout("it is closed")
    poll = select.poll()
    poll.register(sys.stdout, select.POLLOUT)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        raise _lost_stdout("its reader is gone")


def _lost_stdout(reason: str) -> SystemRefusedError:
    """Disable stdout, because more output would not help; return the error."""
    sys.stdout = cast("TextIO", None)
    return SystemRefusedError(f"cannot print the result on stdout: {reason}")


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


def install_handlers() -> None:
    """Let every signal that asks the process to end do so cleanly."""
    for number in signals.ENDING:
        # A signal that was ignored at the start, as under nohup, stays ignored; a profiler's handler stays as well.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    global pending, first_signal_ignored, _has_ended  # noqa: PLW0603 - signals are global too
    if _has_ended:
        return
    if (_is_reporting or signals.is_committed()) and not first_signal_ignored:
        first_signal_ignored = True
        return
    _has_ended = True
    pending = Ended(number)
    raise pending


def end_signals() -> None:
    """Ignore signals from now on, because only the exit code is left to return; raise a signal that was swallowed."""
    global _has_ended  # noqa: PLW0603
    _has_ended = True
    if pending:
        raise pending


def finish(command: str, result: Any, form: str, *, quiet: bool, verbose: bool, table: Table | None) -> int:
    """Print a result and its problems; return the exit code."""
    global _is_reporting, _has_result, pending
    # From here on, a signal has nothing to stop, nor had one that other code swallowed.
    _is_reporting, _has_result, pending = True, True, None
    problems = getattr(result, "problems", ())
    exit_code = EXIT_FOUND if problems else EXIT_OK
    outcome = report.Outcome(command, exit_code, result, problems, quiet=quiet, verbose=verbose, table=table)
    try:
        report.show(form, outcome)
        sys.stdout.flush()
    except (OSError, MemoryError, ImportError) as error:
        first = _as_gradtool_error(error).problems[0]
        raise SystemRefusedError(
            say("{} ({})", first.message, _completion()), file=first.file, hint=first.hint
        ) from error
    print_problems(problems)
    print_problems(outcome.warnings, level="warning")
    return exit_code


def fail(error: Exception) -> int:
    """Print why the command failed; return the exit code."""
    if os.environ.get("GRADTOOL_DEBUG"):
        import traceback

        sys.stderr.write(without_commands(traceback.format_exc()))
    if isinstance(error, (GradtoolError, OSError, MemoryError, ImportError)):
        error = _as_gradtool_error(error)
        return _print_failure(error.problems, error.exit_code, error.summary)
    notes = map(as_command, getattr(error, "__notes__", ()))
    message = "; ".join([f"bug in gradtool: {type(error).__name__}: {error}", *notes])
    return _print_failure([Problem("bug", message, hint="set GRADTOOL_DEBUG=1 for a traceback")], EXIT_BUG)


def interrupted(error: KeyboardInterrupt) -> int:
    """Print which signal ended the run, and what became of the files; return the exit code."""
    number = error.number if isinstance(error, Ended) else signal.SIGINT
    word = "interrupted" if number == signal.SIGINT else "terminated"
    if number not in (signal.SIGINT, signal.SIGTERM):
        word += f" by signal {number} ({signal.strsignal(number)})"
    if _is_reporting or signals.is_committed():
        # The result or an error may be half printed; another JSON object after it would not help.
        is_done = _has_result or signals.is_committed()
        when = f"after {_completion()}" if is_done else "while an error was printed"
        print_problems([Problem("interrupted", f"{word} {when}")])
        return 128 + number
    # Whatever changes files notes how far it got.
    notes = map(as_command, getattr(error, "__notes__", ["no file was changed"]))
    return _print_failure([Problem("interrupted", "; ".join([word, *notes]))], 128 + number)


def _completion() -> str:
    return "all files were written" if signals.is_committed() else "the operation completed"


def _print_failure(problems: Sequence[Problem], exit_code: int, summary: str | None = None) -> int:
    """Print problems on stderr, and in the format asked for on stdout, as far as that is still possible."""
    global _is_reporting, pending
    _is_reporting, pending = True, None
    print_problems(problems, summary)
    if sys.stdout is not None:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        with contextlib.suppress(SystemRefusedError, MemoryError, ImportError):
            form = report.requested_format(sys.argv[1:])
            report.show(form, report.Outcome(command, exit_code, None, problems, summary))
            sys.stdout.flush()
    return exit_code


def _as_gradtool_error(error: GradtoolError | OSError | MemoryError | ImportError) -> GradtoolError:
    """Return the gradtool error for what the system refused unexpectedly; a gradtool error stays as it is."""
    # Free the memory of the failed call: printing the error needs it.
    error.__traceback__ = None
    if isinstance(error, GradtoolError):
        return error
    if isinstance(error, ImportError):
        hint = "install gradtool again, or raise the limit on memory (ulimit -v or -d)"
        return SystemRefusedError(f"cannot load {error.name or 'a module'}", hint=hint)
    if isinstance(error, MemoryError):
        lower = say("reduce {}, or raise the limit on memory (ulimit -v or -d)", option("threads"))
        return SystemRefusedError("out of memory", hint=lower)
    if error.filename is not None:
        return from_os_error(error, os.fsdecode(error.filename))
    try:
        os.getcwd()  # noqa: PTH109 - pathlib is slow to import
    except OSError:
        return SystemRefusedError("the current folder no longer exists", hint="change to another folder")
    return SystemRefusedError(f"the system refused: {error.strerror or error}")
