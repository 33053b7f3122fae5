import math
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import VALUE_TYPES, encode, gaussian, write

from gradtool import norm
from gradtool.backends.storage import STORAGE
from gradtool.ops.layernorm.backward import Gradients
from gradtool.store.format.gradset import Selected
from gradtool.store.format.header import read_shard

# Around one tile, which has 65,536 elements, and a row of lanes, which has 2,048.
SIZES = [0, 1, 37, 2049, 65_535, 65_536, 65_537, 131_072, 200_001]
FACTS = ("max_abs", "nan", "inf", "zeros")


class Pieces:
    """The only tensor of a file, to be measured from stretches of it."""

    def __init__(self, path, backend):
        shard = read_shard(path)
        tensor = shard.tensors[0]
        self._itemsize = STORAGE[tensor.dtype].bits.itemsize
        self._data = path.read_bytes()[tensor.begin : tensor.end]
        self._output = Selected(shard, tensor)
        self.measurement = Gradients([[self._output]], [math.inf])
        self._backend = backend

    def add(self, begin, end):
        view = memoryview(bytearray(self._data[begin * self._itemsize : end * self._itemsize]))
        self.measurement.assemble(self._output, begin, view, view, self._backend)
        # A caller uses its memory again.
        view[:] = b"\xa5" * len(view)


def found(measurement):
    """What was found, with bits told apart."""
    facts = [getattr(measurement, fact)[0] for fact in FACTS]
    return repr([measurement.norms().whole, *facts])


def told(path):
    row = norm(path, per_tensor=True).per_tensor[0]
    return repr([row.norm, *(getattr(row, fact) for fact in FACTS)])


def stretches(elements, cuts):
    return list(pairwise([0, *sorted(cut for cut in cuts if 0 < cut < elements), elements]))


@settings(max_examples=40)
@given(
    elements=st.sampled_from(SIZES),
    cuts=st.lists(st.integers(0, 200_001) | st.sampled_from(SIZES), max_size=9),
    dtype=st.sampled_from(VALUE_TYPES),
    seed=st.integers(0, 99),
)
def test_stretches_cut_anywhere_in_any_order_give_the_bits_of_norm(
    tmp_path_factory, backend, elements, cuts, dtype, seed
):
    path = write(tmp_path_factory.getbasetemp() / "stitch", {"a": gaussian(elements, dtype, seed)})
    ranges = stretches(elements, cuts)
    ranges = np.random.default_rng(seed).permutation(ranges).tolist()
    pieces = Pieces(path, backend)
    for begin, end in ranges:
        pieces.add(begin, end)
    assert found(pieces.measurement) == told(path)


@pytest.mark.parametrize("length", [1, 1000, 65_535, 65_536, 65_537, 70_000, 131_073])
def test_stretches_of_one_length_from_the_last_to_the_first(tmp_path, backend, length):
    elements = 300 if length == 1 else 400_003
    path = write(tmp_path / "x", {"a": gaussian(elements, "F32")})
    pieces = Pieces(path, backend)
    for begin, end in reversed(stretches(elements, range(length, elements, length))):
        pieces.add(begin, end)
    assert found(pieces.measurement) == told(path)


def test_nan_inf_and_zeros_are_counted_once_and_the_first_is_found(tmp_path, backend):
    values = np.ones(140_000)
    values[[65_535, 65_536, 131_072]] = math.nan
    values[[70_000, 139_999]] = math.inf
    values[:3] = 0
    path = write(tmp_path / "x", {"a": encode(values, "BF16")})
    pieces = Pieces(path, backend)
    for begin, end in ((131_000, 140_000), (65_536, 131_000), (0, 65_530), (65_530, 65_536)):
        pieces.add(begin, end)
    measurement = pieces.measurement
    assert [int(getattr(measurement, fact)[0]) for fact in FACTS[1:]] == [3, 2, 3]
    assert int(measurement.first_nonfinite[0]) == 65_535
    assert found(measurement) == told(path)


def test_huge_values_are_measured_as_norm_does(tmp_path, backend):
    path = write(tmp_path / "x", {"a": gaussian(100_000, "F64") * 1e200})
    pieces = Pieces(path, backend)
    for begin, end in ((50_000, 100_000), (0, 50_000)):
        pieces.add(begin, end)
    assert pieces.measurement.norms().whole == norm(path).norm < math.inf


def test_threads_may_add_at_the_same_time(tmp_path, backend):
    path = write(tmp_path / "x", {"a": gaussian(200_001, "F32")})
    pieces, ranges = Pieces(path, backend), stretches(200_001, range(777, 200_001, 777))

    def work(start):
        for begin, end in ranges[start::8]:
            pieces.add(begin, end)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found(pieces.measurement) == told(path)
