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
# Columns of a terminal that has room for bytes and the time that is left.
_WIDE = 70


@contextlib.contextmanager
def progress(label: str, *, wanted: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """Show a bar on stderr, with the pass and its GB/s, if that is a terminal and the work takes long enough."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    bar: Progress | None = None
    shown = ""
    due = time.perf_counter() + PATIENCE_SECONDS
    with contextlib.ExitStack() as stack:

        def advance(title: str, done: int, total: int) -> None:
            nonlocal bar, due, shown
            now = time.perf_counter()
            is_due = now > due
            if is_due:
                bar, due = bar or stack.enter_context(_bar()), now + _REFRESH_SECONDS
            if bar is None:
                return
            if title != shown or done < bar.tasks[0].completed:
                # With the total, because this draws the bar.
                bar.reset(bar.task_ids[0], description=f"{label}: {title}", total=total, completed=done, visible=True)
                shown = title
            bar.update(bar.task_ids[0], completed=done, total=total, refresh=is_due)

        yield advance


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
