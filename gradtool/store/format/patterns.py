"""Regular expressions on names of tensors, which files choose: matching is limited in time.

Python's `re` may take forever for a name of 30 characters, and lets no other thread run meanwhile; but it lets the main
thread handle signals. So a timer of CPU time ends it: SIGVTALRM, because SIGALRM may be sent to end the process, and
SIGPROF belongs to profilers.
"""

from __future__ import annotations

import re
import signal
import threading
import time
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from gradtool.errors import BadInputError, UsageError, shortened
from gradtool.wording import option, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    _T = TypeVar("_T")

# Seconds for a pattern and all names; 400,000 of them take half a second.
LIMIT = 10.0


class _TimeUp(Exception):  # noqa: N818 - it never leaves this module
    pass


def compiled(patterns: Sequence[str], name: str) -> list[re.Pattern[str]]:
    """Compile the patterns of an option; raises `UsageError` for one that is not a regular expression."""
    expressions = []
    for pattern in patterns:
        try:
            with warnings.catch_warnings(action="ignore"):
                expressions.append(re.compile(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            from gradtool.store.format.hints import shell_pattern_hint  # only needed for the error

            what = say("{} is not a regular expression: {}", option(name, pattern), error)
            raise UsageError(what, hint=shell_pattern_hint(name, pattern)) from error
    return expressions


def matching(names: set[str], patterns: Iterable[re.Pattern[str]], name: str) -> set[str]:
    """Find the names that any pattern of an option matches; raises `BadInputError` for a pattern that matches none."""
    matched: set[str] = set()
    for pattern in patterns:
        matches = partial(_matches, pattern)
        matches_of = {tensor for tensor, is_match in apply(pattern, matches, names, name) if is_match}
        if not matches_of:
            from gradtool.store.format.hints import shell_pattern_hint  # only needed for the error

            what = say("{} matches no tensor name", option(name, pattern.pattern))
            raise BadInputError(what, code="no-match", hint=shell_pattern_hint(name, pattern.pattern, names))
        matched |= matches_of
    return matched


def _matches(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.search(name) is not None


def apply(
    pattern: re.Pattern[str], function: Callable[[str], _T], names: Iterable[str], option_name: str
) -> list[tuple[str, _T]]:
    """Return each name with what a function, which uses a pattern of an option, makes of it.

    Raises:
        BadInputError: that takes too long; the name is that of the tensor.
    """
    name, results = "", []
    try:
        with _limited(LIMIT):
            for name in names:
                results.append((name, function(name)))
    except _TimeUp as error:
        what = "{} takes more than {:g} s of CPU time to match the name"
        raise BadInputError(
            say(what, option(option_name, pattern.pattern), LIMIT),
            tensor=shortened(name),
            code="limit",
            hint="avoid a repetition in a group that is repeated, such as (a+)*, which may take forever",
        ) from error
    return results


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_TimeUp` in the block once this thread has computed for so long.

    Only the main thread handles signals, and only Python's own handlers can be put back; and a timer that runs already
    is that of the program that calls. There, nothing is limited.
    """
    before = signal.getsignal(signal.SIGVTALRM)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before is None or signal.getitimer(signal.ITIMER_VIRTUAL) != (0.0, 0.0):
        yield
        return
    end = time.thread_time() + seconds
    is_armed = True

    def check(_number: int, _frame: object) -> None:
        nonlocal is_armed
        # The timer counts the time of other threads too.
        if is_armed and time.thread_time() >= end:
            is_armed = False
            raise _TimeUp

    try:
        signal.signal(signal.SIGVTALRM, check)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 10)
        try:
            yield
        finally:
            is_armed = False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
