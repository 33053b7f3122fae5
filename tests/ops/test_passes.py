"""Which blocks the tasks of passes are about."""

from unittest import mock

import numpy as np
from support import write

from gradtool import tuning
from gradtool.backends.protocol import NormSpec, Tolerance
from gradtool.ops.diff.comparison import Compare
from gradtool.ops.histogram import CountExponents
from gradtool.ops.passes import Measure
from gradtool.store.io.destination import DISCARD, NewFile, Overwritten
from gradtool.store.transaction.inputs import Inputs

SPEC = NormSpec()


def test_only_a_pass_that_writes_nothing_has_a_backend_read_for_itself(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": np.ones(5 << 20, np.float32)})
    opened = Inputs([str(path)]).open()
    measure = Measure(opened.selected, SPEC)
    backend = mock.Mock(block_bytes=tuning.BLOCK_BYTES)
    in_place = Overwritten([NewFile(opened.shards[0], 0)], None)
    counts = {}
    passes = (
        measure,
        CountExponents(opened.selected, NormSpec()),
        Compare(opened.selected, NormSpec(), opened.selected, Tolerance()),
    )
    for name, reads, destination in (("reads", True, DISCARD), ("writes", True, in_place), ("cannot", False, DISCARD)):
        backend.reads_files.return_value = reads
        counts[name] = [len(list(one.tasks(backend, destination))) for one in passes]
    assert counts == {"reads": [3, 3, 5], "writes": [10, 10, 10], "cannot": [10, 10, 10]}
