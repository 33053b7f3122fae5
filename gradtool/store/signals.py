"""Deferred signals: while files are being changed, Ctrl-C and similar signals act only where that is safe."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    Handlers = dict[int, Callable[[int, FrameType | None], Any]]

# The signals that do not ask a process to end: by default they are ignored, or stop or continue it; nothing can handle
# them; they report a fault of the program itself; or Python ignores them, and a write fails instead.
_NOT_ENDING = {
    "SIGCHLD", "SIGCONT", "SIGINFO", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH", "SIGKILL",
    "SIGBUS", "SIGEMT", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP", "SIGPIPE", "SIGXFSZ",
}  # fmt: skip
if sys.platform != "linux":
    _NOT_ENDING.add("SIGIO")  # ignored by default
# All others: Ctrl-C, `kill`, a closed terminal, a limit of processor time, timers, the real-time signals.
ENDING = sorted(int(number) for number in signal.valid_signals() if getattr(number, "name", "") not in _NOT_ENDING)
# The original handlers while signals are deferred, and the signals that have arrived since.
_handlers: Handlers = {}
pending: list[int] = []
# The note of an exception that is raised once all files are new.
WRITTEN = "all files were written before"
# All files are new: nothing is left for a signal to stop, only the result to print.
_is_committed = False


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defer Ctrl-C and similar signals until `deliver` is called or the block ends.

    A signal without a Python handler is left alone: it kills the process at once, as SIGKILL does, and a later run
    recovers. Python handles signals in the main thread only, so in other threads there is nothing to defer.
    """
    global _is_committed  # noqa: PLW0603 - signals are global too
    if _handlers or threading.current_thread() is not threading.main_thread():
        yield
        return
    _is_committed = False
    pending.clear()
    try:
        for number in ENDING:
            handler = signal.getsignal(number)
            if callable(handler):
                _handlers[number] = handler
                signal.signal(number, lambda number, _: pending.append(number))
        yield
    finally:
        before = dict(_handlers)
        _handlers.clear()
        came, pending[:] = pending[:], []
        _restore(dict(before))
        try:
            for number in came:
                # If a handler raises, later signals are dropped: they would interrupt the clean-up that it sets off.
                before[number](number, sys._getframe())  # noqa: SLF001 - handlers of profilers look at it
        except BaseException as error:
            # It hides the exception that ended the block, but not what that says of the files.
            for note in getattr(error.__context__, "__notes__", [WRITTEN] * _is_committed):
                error.add_note(note)
            raise


def _restore(handlers: Handlers) -> None:
    """Restore every handler, even if a signal arrives meanwhile and its handler raises."""
    if handlers:
        number, handler = handlers.popitem()
        try:
            signal.signal(number, handler)
        finally:
            _restore(handlers)


def deliver() -> None:
    """Let a deferred signal act now; called where files can be left as they are or put back."""
    if pending and threading.current_thread() is threading.main_thread():
        number = pending.pop(0)
        _handlers[number](number, sys._getframe())  # noqa: SLF001


def mark_committed() -> None:
    """Note that all files are new, so that the call ends as done."""
    global _is_committed  # noqa: PLW0603
    if threading.current_thread() is threading.main_thread():
        _is_committed = True


def is_committed() -> bool:
    """Whether the last call that changed files has changed them all."""
    return _is_committed
