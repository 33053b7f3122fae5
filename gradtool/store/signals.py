"""Signals that wait: while files are being changed, Ctrl-C and its like act only where that is safe."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What would have been called, by signal, while signals are held back; and those that came meanwhile.
_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
pending: list[int] = []
# The files are all new: there is nothing left that a signal could stop, only a result to be told.
_is_past_return = False


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Hold back Ctrl-C and its like, until `heed` is called or the block ends.

    A signal without a Python handler is left alone: it ends the process at once, as SIGKILL does, and a later run
    recovers. Only the main thread hears of signals, so in others there is nothing to hold back.
    """
    global _is_past_return  # noqa: PLW0603 - so are signals
    if _handlers or threading.current_thread() is not threading.main_thread():
        yield
        return
    _is_past_return = False
    pending.clear()
    before: dict[int, Callable[[int, FrameType | None], Any]] = {}
    try:
        for number in map(int, _ENDING):
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = _handlers[number] = handler
                signal.signal(number, _remember)
        yield
    finally:
        _handlers.clear()
        came, pending[:] = pending[:1], []
        _restore(dict(before))
        for number in came:
            # One is enough: another that came with it would tear into what the first one sets off.
            before[number](number, None)


def _restore(handlers: dict[int, Callable[[int, FrameType | None], Any]]) -> None:
    """Give every signal its handler back, though one that comes meanwhile may raise."""
    if handlers:
        number, handler = handlers.popitem()
        try:
            signal.signal(number, handler)
        finally:
            _restore(handlers)


def heed() -> None:
    """Let a signal that was held back act now: files can be left as they are, or put back."""
    if pending and threading.current_thread() is threading.main_thread():
        number = pending.pop(0)
        _handlers[number](number, None)


def pass_return() -> None:
    """Say that the files are all new, so that the call ends as done."""
    global _is_past_return  # noqa: PLW0603
    if threading.current_thread() is threading.main_thread():
        _is_past_return = True


def is_past_return() -> bool:
    """Whether the last call that changed files has changed them all."""
    return _is_past_return


def _remember(number: int, _frame: FrameType | None) -> None:
    pending.append(number)
