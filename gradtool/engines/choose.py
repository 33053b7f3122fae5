"""Which engine a call uses."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gradtool.backends.choose import asked_for as backend_asked_for
from gradtool.backends.choose import choose as choose_backend
from gradtool.engines.threads import Threads, default_threads
from gradtool.errors import UsageError
from gradtool.wording import option, say

if TYPE_CHECKING:
    from gradtool.backends.choose import Choice
    from gradtool.engines.cluster.membership import Cluster
    from gradtool.engines.protocol import Engine, Progress
    from gradtool.options import Compute, Local

# More would only take memory.
MOST_THREADS = 256


class Asked(NamedTuple):
    """The engine that was asked for: its name, as it was given, and the address of its workers, if it has some."""

    name: str
    address: str | None


def asked_for(given: str | None) -> Asked:
    """The engine asked for, by default that of GRADTOOL_ENGINE or "threads"; `UsageError` if there is none."""
    source = "GRADTOOL_ENGINE" if given is None else option("engine")
    name = (os.environ.get("GRADTOOL_ENGINE") or "threads") if given is None else given
    kind, _, address = name.partition(":")
    if name != "threads" and (kind != "dask" or not address):
        raise UsageError(say("{} must be threads or dask:ADDRESS, not {!r}", source, name))
    return Asked(name, address or None)


def choose(options: Compute, progress: Progress | None) -> tuple[Engine, Choice | None]:
    """The engine of complete options; and the backend, if it is options here and not by the workers."""
    (name, address), threads = asked_for(options.engine), options.threads
    if address is None:
        return local(options, progress)
    from gradtool.engines.cluster.engine import Workers  # not needed by threads

    timeout = options.worker_timeout
    most = None if threads is None else min(threads, MOST_THREADS)
    join = partial(_join, address, timeout)
    # What the environment says here counts for the workers too.
    backend = backend_asked_for(options.backend)
    return Workers(name, join, backend, options.device, most, timeout, progress), None


def local(options: Local, progress: Progress | None) -> tuple[Threads, Choice]:
    """The threads of this process, and their backend."""
    choice = choose_backend(options.backend, options.device)
    count = min(options.threads or default_threads(), MOST_THREADS)
    return Threads(choice.backend, count, progress, choice.why), choice


def _join(address: str, timeout: float) -> Cluster:
    from gradtool.engines.cluster.dask import Dask

    return Dask(address, timeout)
