"""The engine of one process: its threads."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from gradtool.arrays import quiet
from gradtool.engines import Found, Pass, Staff, Worker
from gradtool.store.io.channel import Clock
from gradtool.store.io.workers import SMALL_BYTES, run
from gradtool.store.transaction.destination import DISCARD

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradtool.backends.protocol import Backend, Data
    from gradtool.engines import Progress
    from gradtool.store.format.header import Shard
    from gradtool.store.io.channel import Channel
    from gradtool.store.transaction.destination import Destination
    from gradtool.store.transaction.output import Output


class Threads:
    """Runs passes on up to `count` threads, and adds up time and bytes over all of them."""

    name: ClassVar = "threads"

    def __init__(self, backend: Backend, count: int = 1, progress: Progress | None = None, why: str = "") -> None:
        self.backend, self.count, self.progress = backend, count, progress
        # Why the backend was chosen.
        self.why = why
        self.clock = Clock()
        self._files = 0
        self._resident: dict[tuple[Shard, int, int], Data] = {}

    @property
    def staff(self) -> Staff:
        """This process alone."""
        return Staff(1, 1, 0, self.backend.name, self.why)

    def prepare(self, output: Output | None, shards: Sequence[Shard]) -> None:  # noqa: ARG002 - it is open here
        """Count the files; this process has opened them itself."""
        self._files = len(shards)

    def run(self, one: Pass[Found], destination: Destination = DISCARD) -> Found:
        """Run a pass, and write what the destination needs besides."""
        found, nbytes = one.empty(), one.nbytes(destination)
        tasks = (partial(self._do, task, destination, found) for task in one.tasks(self.backend, destination))
        clock = run(
            chain(destination.tasks(), tasks),
            # A thread for less than a few blocks costs more than it saves.
            threads=max(1, min(self.count, nbytes >> 20)),
            allocate=self.backend.memory,
            in_place=destination.in_place,
            on_bytes=self._counter(one.title, nbytes),
            are_small=nbytes <= self._files * SMALL_BYTES,
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
        with quiet():
            task(Worker(channel, self.backend, destination, self._resident), found)

    def _counter(self, title: str, whole: int) -> Callable[[int], None] | None:
        """What is told of the bytes that a pass reads."""
        if self.progress is None:
            return None
        progress, done = self.progress, 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            # Holes that are read over count too, so the whole is only an estimate until then.
            progress(title, done, max(done, whole))

        return count
