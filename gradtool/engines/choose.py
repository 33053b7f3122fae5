"""Which engine a call uses."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gradtool.backends.choose import choose as choose_backend
from gradtool.backends.choose import requested as requested_backend
from gradtool.engines.threads import Threads, default_threads
from gradtool.errors import UsageError, option, say

if TYPE_CHECKING:
    from gradtool.backends.choose import Choice
    from gradtool.engines.cluster.engine import Workers
    from gradtool.options import ComputeOptions, LocalComputeOptions

    # An engine runs the passes of a call: the threads of this process do tasks, workers elsewhere do parts.
    Engine = Threads | Workers

# More would only take memory.
MAX_THREADS = 256


def requested_engine(name: str | None) -> tuple[str, str | None]:
    """Return an engine, by default GRADTOOL_ENGINE or "threads", and its address; or raise `UsageError`."""
    source = "GRADTOOL_ENGINE" if name is None else option("engine")
    name = (os.environ.get("GRADTOOL_ENGINE") or "threads") if name is None else name
    kind, _, address = name.partition(":")
    if name != "threads" and (kind != "dask" or not address):
        raise UsageError(say("{} must be threads or dask:ADDRESS, not {!r}", source, name))
    return name, address or None


def choose(options: ComputeOptions, progress: object) -> tuple[Engine, Choice | None]:
    """Return the engine of complete options, and the backend unless workers choose it.

    It calls `progress`, if that can be called, and `progress.waiting`, if there is such a method.
    """
    name, address = requested_engine(options.engine)
    if address is None:
        return local(options, progress)
    from gradtool.engines.cluster.engine import Workers  # not needed by threads

    threads = None if options.threads is None else min(options.threads, MAX_THREADS)
    # The environment of this process counts for the workers, too.
    options = options.replace(backend=requested_backend(options.backend), threads=threads)
    return Workers(name, address, options, progress), None


def local(options: LocalComputeOptions, progress: object) -> tuple[Threads, Choice]:
    """Return the threads of this process, and their backend."""
    choice = choose_backend(options.backend, options.device)
    count = min(options.threads or default_threads(), MAX_THREADS)
    return Threads(choice.backend, count, progress if callable(progress) else None, choice.why), choice
