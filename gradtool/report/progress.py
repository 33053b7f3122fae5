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
# Columns of a terminal that has room for bytes, the rate and the time that is left.
_WIDE = 70


class _Lines:
    """What is shown off a terminal: a line if the call waits for something."""

    def waiting(self, what: str) -> None:
        """Say what the call waits for; before its first pass, so that there is no bar yet."""
        print_problems([Problem("", f"waiting for {what}")], level="note")


class _Bar(_Lines):
    """What is shown on a terminal: a bar, too, with the pass and the rate of all, if the work takes long enough."""

    def __init__(self, label: str, stack: contextlib.ExitStack) -> None:
        self._label, self._stack = label, stack
        self._bar: Progress | None = None
        self._shown, self._last, self._earlier = "", 0, 0
        self._began = time.perf_counter()
        self._due = self._began + PATIENCE_SECONDS

    def __call__(self, title: str, done: int, total: int) -> None:
        # Within a pass, the bytes only grow.
        is_next = done <= self._last
        self._earlier, self._last = self._earlier + self._last * is_next, done
        now = time.perf_counter()
        is_due = now > self._due
        if is_due:
            self._bar, self._due = self._bar or self._stack.enter_context(_bar()), now + _REFRESH_SECONDS
        if (bar := self._bar) is None:
            return
        task, rate = bar.task_ids[0], (self._earlier + done) / (now - self._began)
        if title != self._shown or is_next:
            # With the total, because this draws the bar.
            text = f"{self._label}: {title}"
            bar.reset(task, description=text, total=total, completed=done, visible=True, rate=rate)
            self._shown = title
        bar.update(task, completed=done, total=total, rate=rate, refresh=is_due)


@contextlib.contextmanager
def progress(label: str, *, wanted: bool) -> Iterator[_Lines | None]:
    """Show progress on stderr until the end of the `with` block, if it is wanted."""
    with contextlib.ExitStack() as stack:
        yield None if not wanted else _Bar(label, stack) if sys.stderr.isatty() else _Lines()


def _bar() -> Progress:
    from rich import progress as bars  # slow to import
    from rich.console import Console
    from rich.text import Text

    from gradtool.errors import size_of

    class Numbers(bars.ProgressColumn):
        def render(self, task: bars.Task) -> Text:
            done, total, rate = map(size_of, (task.completed, task.total or 0, task.fields["rate"]))
            return Text(f"{done} of {total}, {rate}/s")

    console = Console(stderr=True)
    bar = bars.BarColumn(None, style="dim", complete_style="cyan", finished_style="cyan")
    columns: list[bars.ProgressColumn] = [bars.TextColumn("{task.description}"), bar]
    if console.width >= _WIDE:
        columns += [Numbers(), bars.TimeRemainingColumn(compact=True)]
    else:
        columns += [bars.TextColumn("{task.percentage:>3.0f}%")]
    # Without a refreshing thread of its own, which the system may refuse.
    shown = bars.Progress(*columns, console=console, transient=True, auto_refresh=False)
    shown.add_task("", visible=False, rate=0.0)
    return shown
