"""Files that are written with another header: where their bytes go, and what is reserved for them."""

import numpy as np
from support import write

from gradtool.store.format.header import read_shard
from gradtool.store.io.destination import NewFile


def test_a_longer_header_is_reserved_and_moves_what_is_copied_behind_it(tmp_path):
    shard = read_shard(write(tmp_path / "x", {"a": np.ones(8), "b": np.ones(8)}))
    start, end = shard.data_start, shard.size
    zeros = [(start, start + 64)]
    file = NewFile(shard, end, copies=[(0, start, 0), (start + 64, end, start + 64)], zeros=zeros, changes=64)
    new = file.with_header(b"h" * (start + 40))
    assert (new.size, new.shift, new.changes) == (end + 40, 40, 64 + start + 40)
    assert new.copies == [(start + 64, end, start + 104)]
    assert new.ranges == [(0, start + 40), (start + 104, end + 40)]
    assert file.with_header(b"h" * start)._replace(zeros=()).ranges is None
    assert file._replace(copies=[(0, end, 0)]).with_header(b"h" * start).copies == [(start, end, start)]
    assert file._replace(copies=None).with_header(b"h" * start).copies is None
