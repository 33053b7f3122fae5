import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support import NUMPY_TYPES, write

from gradtool import tuning
from gradtool.store.format.header import read_shard
from gradtool.store.io.blocks import plan

UNIT = 65_536
TYPES = ["F64", "F32", "BF16", "F8_E4M3"]
TENSORS = st.lists(st.tuples(st.sampled_from(TYPES), st.sampled_from([0, 1, 300, 65_537, 200_000])), max_size=7)


def shard_of(folder, tensors, padding=0):
    arrays = {f"t{i}": np.zeros(n, NUMPY_TYPES[dtype]) for i, (dtype, n) in enumerate(tensors)}
    return read_shard(write(folder / "x.safetensors", arrays, padding=padding))


@given(tensors=TENSORS, every=st.integers(1, 3), whole=st.booleans(), padding=st.sampled_from([0, 5, 3_000_000]))
def test_blocks_hold_every_wanted_element_once_and_cut_only_at_tiles(tmp_path_factory, tensors, every, whole, padding):
    shard = shard_of(tmp_path_factory.getbasetemp(), tensors, padding)
    wanted = list(enumerate(shard.tensors))[::every]
    found = list(plan(shard, wanted, UNIT, tuning.BLOCK_BYTES, whole=whole))
    done = dict.fromkeys((number for number, _ in wanted), 0)
    for block in found:
        assert 0 < block.end - block.begin <= tuning.BLOCK_BYTES
        for span in block.spans:
            tensor = shard.tensors[span.tensor]
            itemsize = NUMPY_TYPES[span.dtype].itemsize
            assert span.start == done[span.tensor]
            assert span.start % UNIT == 0
            assert block.begin + span.offset == tensor.begin + span.start * itemsize
            assert block.begin + span.offset + span.elements * itemsize <= block.end
            done[span.tensor] += span.elements
    assert done == {number: tensor.elements for number, tensor in wanted}
    edges = [(block.begin, block.end) for block in found]
    if whole:
        assert [begin for begin, _ in edges] == [0, *(end for _, end in edges[:-1])]
        assert edges[-1][1] == shard.size
    else:
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(edges))


def test_tiny_tensors_share_a_block(tmp_path):
    shard = shard_of(tmp_path, [("F32", 10)] * 2000)
    assert len(list(plan(shard, enumerate(shard.tensors), UNIT, tuning.BLOCK_BYTES))) == 1


def test_a_hole_is_skipped_when_it_is_large(tmp_path):
    shard = shard_of(tmp_path, [("F32", 10), ("F32", 10), ("F32", 200_000), ("F32", 10)])
    wanted = [(0, shard.tensors[0]), (1, shard.tensors[1]), (3, shard.tensors[3])]
    assert [len(block.spans) for block in plan(shard, wanted, UNIT, tuning.BLOCK_BYTES)] == [2, 1]
