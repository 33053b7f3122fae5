"""The progress bar of a call; apart, because every command loads it, and rich is imported only once a bar is shown."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress

# Shorter work gets no progress bar.
PATIENCE_SECONDS = 0.5
_REFRESH_SECONDS = 0.1
# Columns of a terminal that has room for bytes, the rate and the time that is left.
_WIDE = 70


@contextlib.contextmanager
def progress(label: str, *, wanted: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """Show a bar on stderr, with the pass and the rate of all, if that is a terminal and the work takes long enough."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    bar: Progress | None = None
    shown, last, earlier = "", 0, 0
    began = time.perf_counter()
    due = began + PATIENCE_SECONDS
    with contextlib.ExitStack() as stack:

        def advance(title: str, done: int, total: int) -> None:
            nonlocal bar, due, shown, last, earlier
            # Within a pass, the bytes only grow.
            is_next = done <= last
            earlier, last = earlier + last * is_next, done
            now = time.perf_counter()
            is_due = now > due
            if is_due:
                bar, due = bar or stack.enter_context(_bar()), now + _REFRESH_SECONDS
            if bar is None:
                return
            task, rate = bar.task_ids[0], (earlier + done) / (now - began)
            if title != shown or is_next:
                # With the total, because this draws the bar.
                text = f"{label}: {title}"
                bar.reset(task, description=text, total=total, completed=done, visible=True, rate=rate)
                shown = title
            bar.update(task, completed=done, total=total, rate=rate, refresh=is_due)

        yield advance


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
