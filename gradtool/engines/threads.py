"""The engine of one process: its threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from gradtool.engines import Found, Pass, Worker
from gradtool.store.io.channel import Clock
from gradtool.store.io.workers import run
from gradtool.store.transaction.destination import DISCARD

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradtool.backends import Backend, Data
    from gradtool.store.format.header import Shard
    from gradtool.store.io.channel import Channel
    from gradtool.store.transaction.destination import Destination

    # Called with the bytes done so far and the bytes of the whole call; one call at a time, from any thread.
    Progress = Callable[[int, int], None]


@dataclass
class Threads:
    """Runs passes on up to `count` threads, and adds up time and bytes over all of them.

    `expected_bytes` are those of the whole call, as far as they are known.
    """

    backend: Backend
    count: int = 1
    progress: Progress | None = None
    expected_bytes: int = 0
    clock: Clock = field(default_factory=Clock)
    _read_bytes: int = 0
    _resident: dict[tuple[Shard, int, int], Data] = field(default_factory=dict)

    def run(self, one: Pass[Found], destination: Destination = DISCARD) -> Found:
        """Run a pass, and write what the destination needs besides."""
        found, nbytes = one.empty(), one.nbytes(destination)
        self.expected_bytes = max(self.expected_bytes, self._read_bytes + nbytes)
        tasks = (partial(self._do, task, destination, found) for task in one.tasks(self.backend, destination))
        clock = run(
            chain(destination.tasks(), tasks),
            # A thread for less than a few blocks costs more than it saves.
            threads=max(1, min(self.count, nbytes >> 20)),
            allocate=self.backend.memory,
            in_place=destination.in_place,
            on_bytes=self._count,
        )
        self.clock.add(clock.each())
        self.clock.workers = max(self.clock.workers, clock.workers)
        return found

    def close(self) -> None:
        """Free what is left on the device for a pass that did not come."""
        self._resident.clear()

    def _do(
        self, task: Callable[[Worker, Found], None], destination: Destination, found: Found, channel: Channel
    ) -> None:
        # NaN, Inf and overflow are results; they are counted, and need no warning.
        with np.errstate(all="ignore"):
            task(Worker(channel, self.backend, destination, self._resident), found)

    def _count(self, nbytes: int) -> None:
        self._read_bytes += nbytes
        if self.progress is not None:
            # Holes that are read over count too, so the total is only an estimate until then.
            self.progress(self._read_bytes, max(self._read_bytes, self.expected_bytes))
