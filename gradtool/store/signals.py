"""Signals that wait: steps that are to be taken together."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold back Ctrl-C and its like until the end of the block, and let them act there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        pending.append(number)

    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is None:
                continue  # Whoever put something else than Python there could not get it back.
            before[number] = signal.signal(number, remember)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for pended in pending:
            signal.raise_signal(pended)
