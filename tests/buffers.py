"""What the tests of accumulate share: buffers and gradients with one tensor, and a look at what is refused."""

from pathlib import Path

import pytest
from support import encode, snapshot, write

from gradtool import accumulate
from gradtool.engines.cluster.wire import packed, unpacked
from gradtool.store.io.destination import DISCARD


def f32(*values):
    return encode(values, "F32")


def lay_out(folder, old, *grads, metadata=()):
    """A buffer and gradients with one tensor `a` each, or with the given ones."""
    paths = []
    for i, one in enumerate((old, *grads)):
        tensors = one if isinstance(one, dict) else {"a": one}
        own = metadata[i - 1] if i and metadata else None
        paths.append(write(folder / (f"g{i}" if i else "buffer"), tensors, own))
    return paths[0], paths[1:]


def refused(error, folder, path, grads, **options):
    """The problems of a call that must fail and leave every byte alone."""
    before = snapshot(folder)
    with pytest.raises(error) as caught:
        accumulate(grads, into=path, **options)
    assert snapshot(folder) == before
    return [(one.code, one.tensor, Path(one.file).name if one.file else None) for one in caught.value.problems]


def in_parts(threads, run, one, destination=DISCARD):
    """As other processes run a pass that writes nothing."""
    if destination is not DISCARD:
        return run(threads, one, destination)
    found = one.tally()
    for part in one.parts(destination):
        found.merge_part(part.places, unpacked(packed(run(threads, part.pass_).compact()), part.pass_.tally()))
    return found
