"""Random gradient sets, and results that must be the same whichever engine made them."""

import time
from dataclasses import asdict

import numpy as np
from support import gaussian, write_index

from gradtool.backends.storage import STORAGE
from gradtool.reduction import TILE

_DTYPES = list(STORAGE)
# Who did it, where, and how long it took.
_DIFFER = {"seconds", "timings", "backend", "backend_why", "threads", "engine", "workers", "hosts", "retries", "wrote"}
_DIFFER |= {"call", "output"}


def random_set(folder, seed, *, like=None, prefix=""):
    """Tensors of random types in random shards: of several tiles, of one, empty; or those of another set's sizes."""
    rng = np.random.default_rng(seed)
    sizes = [*rng.integers(1, 3 * TILE, 5).tolist(), 0, 1, TILE] if like is None else like
    arrays = [gaussian(size, _DTYPES[rng.integers(len(_DTYPES))], seed=i) for i, size in enumerate(sizes)]
    homes = rng.integers(0, rng.integers(1, 5), len(arrays)).tolist()
    shards = {}
    for number, (home, array) in enumerate(zip(homes, arrays, strict=True)):
        shards.setdefault(f"{prefix}{home}.safetensors", {})[f"t{number}"] = array
    write_index(folder, shards)
    return sizes


def content_of(folder):
    """The bytes of all files of a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def facts_of(result):
    """What does not depend on the engine, of a result or of its JSON; floats to the last bit."""
    facts = dict(result) if isinstance(result, dict) else asdict(result)
    for summary in ("call", "output"):
        facts |= facts.pop(summary, {})
    return {key: _without_files(value) for key, value in facts.items() if key not in _DIFFER}


def _without_files(value):
    if isinstance(value, (list, tuple)):
        return [_without_files(one) for one in value]
    return {key: repr(one) for key, one in value.items() if key != "file"} if isinstance(value, dict) else repr(value)


def soon(holds, seconds=30.0):
    """Whether something holds, or comes to hold: a worker that is no longer needed needs a moment to notice."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
