"""What another process is told to run; a module, because a spawned process imports it by name."""

import os

from gradtool import backends
from gradtool.engines.threads import Threads
from gradtool.ops.accumulate.add import Add
from gradtool.store.transaction.destination import NewFiles


def run_part(one, destination, number):
    """In another process: the part of a pass that is about one file; both come in one pickle, and share its shards."""
    shards = list(dict.fromkeys(selected.shard for selected in targets_of(one)))[number : number + 1]
    if isinstance(destination, NewFiles):
        destination = destination.only(shards)
    return Threads(backends.choose("cpu").backend, 1).run(one.over(shards), destination)


def targets_of(one):
    return one.targets if isinstance(one, Add) else one.selected


def strike_at(fault):
    """In another process: be struck."""
    os.environ["GRADTOOL_FAULT"] = fault
