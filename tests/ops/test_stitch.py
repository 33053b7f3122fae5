import math
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import FACTS, VALUE_TYPES, backends, bits_of, encode, gaussian, write

from gradtool import norm
from gradtool.backends import Terms
from gradtool.backends.storage import STORAGE
from gradtool.ops.measurement import Measurement
from gradtool.ops.stitch import Stitch, encoded
from gradtool.store.gradset import Selected
from gradtool.store.header import read_shard

# A tile has 65,536 elements, a row of lanes 2,048.
SIZES = [0, 1, 37, 2049, 65_535, 65_536, 65_537, 131_072, 200_001]


def stitched(path, backend, ranges):
    """What is found in the one tensor of a file, whose stretches come in the given order."""
    shard = read_shard(path)
    selected = Selected(shard, shard.tensors[0])
    measurement = Measurement([selected], Terms())
    stitch = Stitch(measurement, 0, selected, backend)
    data = path.read_bytes()[shard.data_start :]
    itemsize = STORAGE[selected.tensor.dtype].bits.itemsize
    for begin, end in ranges:
        # Memory that is used again, as the caller's is.
        view = memoryview(bytearray(data[begin * itemsize : end * itemsize]))
        stitch.add(begin, view)
        view[:] = b"\xff" * len(view)
    return measurement


def assert_as_norm(path, found):
    expected = norm(path, per_tensor=True).per_tensor[0]
    measured = (found.tensor_norm(0, 1.0, 1.0), *(getattr(found, fact)[0] for fact in FACTS[1:5]))
    assert str(measured) == str((expected.norm, expected.max_abs, expected.nan, expected.inf, expected.zeros)).replace(
        str(expected.max_abs), repr(found.max_abs[0]), 1 if expected.norm != expected.max_abs else 0
    )


@settings(max_examples=60)
@given(
    elements=st.sampled_from(SIZES),
    cuts=st.lists(st.integers(0, 200_001) | st.sampled_from(SIZES), max_size=9),
    dtype=st.sampled_from(VALUE_TYPES),
    shuffle=st.randoms(use_true_random=False),
    backend=st.sampled_from([backend for _, backend in backends()]),
)
def test_stretches_cut_anywhere_in_any_order_give_the_bits_of_norm(
    tmp_path_factory, elements, cuts, dtype, shuffle, backend
):
    pass
