"""What engines and passes know of each other.

The threads of this process run the tasks of a pass (`threads`); other processes each run a part of it (`cluster`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradtool.backends.protocol import Backend
    from gradtool.engines.cluster.work import Part
    from gradtool.engines.worker import Worker
    from gradtool.store.format.tensors import Shard
    from gradtool.store.io.channel import Clock
    from gradtool.store.io.destination import Destination, WrittenFiles
    from gradtool.store.transaction.output import Output, Staging

    # Called with the title of a pass, the bytes that it has read, and all that it will; from one thread at a time.
    Progress = Callable[[str, int, int], None]


# What the tasks of a pass collect.
Result = TypeVar("Result")


class Pass(Protocol[Result]):
    """One pass over files, as a value: it can be pickled, and parts of it be run anywhere."""

    @property
    def title(self) -> str:
        """What it does, for a progress bar."""

    def tally(self) -> Result:
        """Begin with nothing. Other processes `compact` a tally to send it, and `merge_part` adds that of a part."""

    def nbytes(self, destination: WrittenFiles) -> int:
        """Count the bytes that are read in all, about."""

    def tasks(self, backend: Backend, destination: Destination) -> Iterator[Any]:
        """Yield what to work on, such as a block; in any order and on any thread."""

    def work(self, task: Any, worker: Worker, tally: Result) -> None:
        """Do a task, and add what it finds.

        Until the device is out of memory, the work must not have changed or added anything: its halves are next.
        """

    def halves(self, task: Any) -> Sequence[Any]:
        """Cut a task in two for a device that has no room for it; () if it is too small."""

    def parts(self, destination: WrittenFiles) -> Iterator[Part]:
        """Yield the parts for other processes, which cover the pass and all files of the destination."""


class Engine(Protocol):
    """What runs the passes of a call."""

    @property
    def name(self) -> str:
        """As it was asked for."""

    @property
    def clock(self) -> Clock:
        """Where the time went so far."""

    @property
    def workers(self) -> WorkerSummary:
        """Who did the work so far."""

    def prepare(self, output: Output | None, shards: Sequence[Shard]) -> None:
        """Make sure that these files can be worked on, and written where the output is locked."""

    def destination(self, staging: Staging) -> WrittenFiles:
        """Return the destination whose new files this engine writes."""

    def run(self, work: Pass[Result], destination: Any = ...) -> Result:
        """Run a pass, and write what the destination needs besides."""

    def close(self) -> None:
        """Free what no pass will need any more."""


class WorkerSummary(NamedTuple):
    """Who did the work of a call: the backends and why these, processes, their machines, waits and moved tasks."""

    backend: str
    why: str
    workers: int = 1
    hosts: int = 1
    retries: int = 0
