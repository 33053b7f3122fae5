"""What a call shows on stderr while it works: a bar, on a terminal, and a line if it waits for something.

It is apart, because every command loads it, and rich is imported only once a bar is shown.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from gradtool.errors import Problem
from gradtool.report.messages import print_problems

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress

# Shorter work gets no progress bar.
PATIENCE_SECONDS = 0.5
_REFRESH_SECONDS = 0.1
# Columns of a terminal that has room for bytes and the time that is left.
_WIDE = 70


class _Lines:
    """What is shown off a terminal: a line if the call waits for something."""

    def waiting(self, what: str) -> None:
        """Say what the call waits for; before its first pass, so that there is no bar yet."""
        print_problems([Problem("waiting", f"waiting for {what}")], level="note")


class _Bar(_Lines):
    """What is shown on a terminal: a bar, too, with the pass and its GB/s, if the work takes long enough."""

    def __init__(self, label: str, stack: contextlib.ExitStack) -> None:
        self._label, self._stack, self._shown = label, stack, ""
        self._bar: Progress | None = None
        self._due = time.perf_counter() + PATIENCE_SECONDS

    def __call__(self, title: str, done: int, total: int) -> None:
        now = time.perf_counter()
        is_due = now > self._due
        if is_due:
            self._bar, self._due = self._bar or self._stack.enter_context(_bar()), now + _REFRESH_SECONDS
        if (bar := self._bar) is None:
            return
        if title != self._shown or done < bar.tasks[0].completed:
            label = f"{self._label}: {title}"
            # With the total, because this draws the bar.
            bar.reset(bar.task_ids[0], description=label, total=total, completed=done, visible=True)
            self._shown = title
        bar.update(bar.task_ids[0], completed=done, total=total, refresh=is_due)


@contextlib.contextmanager
def progress(label: str, *, wanted: bool) -> Iterator[_Lines | None]:
    """Show progress on stderr until the end of the `with` block, if it is wanted."""
    with contextlib.ExitStack() as stack:
        yield None if not wanted else _Bar(label, stack) if sys.stderr.isatty() else _Lines()


def _bar() -> Progress:
    from rich import progress as bars  # slow to import
    from rich.console import Console

    console = Console(stderr=True)
    columns: list[bars.ProgressColumn] = [bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=None)]
    if console.width >= _WIDE:
        columns += [bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn()]
    else:
        columns += [bars.TaskProgressColumn()]
    # Without a refreshing thread of its own, which the system may refuse.
    bar = bars.Progress(*columns, console=console, transient=True, auto_refresh=False)
    bar.add_task("", visible=False)
    return bar
