import math

import numpy as np
import pytest
from buffers import f32, lay_out, refused
from hypothesis import given
from hypothesis import strategies as st
from support import VALUE_TYPES, bits_of, bytes_of_memory, encode, read, write

from gradtool import BadInputError, accumulate, tuning
from gradtool.ops.aligned_read import is_broadcastable, positions, read_broadcast
from gradtool.store.format.gradset import Selected
from gradtool.store.format.header import read_shard
from gradtool.store.io.blocks import Span
from gradtool.store.io.channel import Channel

SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)


@st.composite
def broadcasts(draw):
    """A shape, one that broadcasts to it, and a range of elements."""
    shape = draw(st.lists(st.integers(1, 5), max_size=5).map(tuple))
    own = tuple(1 if draw(st.booleans()) else size for size in shape)[draw(st.integers(0, len(shape))) :]
    start = draw(st.integers(0, math.prod(shape) - 1))
    return own, shape, start, draw(st.integers(start + 1, math.prod(shape)))


def broadcasts_in_numpy(own, shape):
    try:
        np.broadcast_to(np.zeros(own), shape)
    except ValueError:
        return False
    return True


@given(own=SHAPES, shape=SHAPES)
def test_what_broadcasts_is_what_numpy_says(own, shape):
    assert is_broadcastable(own, shape) == broadcasts_in_numpy(own, shape)


@pytest.mark.parametrize(
    ("own", "shape", "expected"),
    [
        ((), (), True),
        ((), (2, 3), True),
        ((3,), (2, 3), True),
        ((2, 1), (2, 3), True),
        ((1,), (0,), True),
        ((0,), (1,), False),
        ((1,), (), False),
        ((1, 3), (3,), False),
        ((2,), (2, 3), False),
        ((2, 3), (2, 1), False),
    ],
)
def test_a_tensor_broadcasts_to_a_larger_one_and_never_the_other_way(own, shape, expected):
    assert is_broadcastable(own, shape) is expected


@given(broadcasts())
def test_positions_are_those_of_numpy(case):
    own, shape, start, stop = case
    expected = np.broadcast_to(np.arange(math.prod(own)).reshape(own), shape).ravel()[start:stop]
    assert positions(own, shape, start, stop).tolist() == expected.tolist()


def spread_of(path, shape, start, stop):
    """The elements that `read_broadcast` gives, and how many bytes it read; what lies behind them must stay."""
    shard = read_shard(path)
    one = next(Selected(shard, tensor) for tensor in shard.tensors if tensor.name == "a")
    channel, target = Channel(4, bytes_of_memory), memoryview(bytearray(b"\xee" * ((stop - start) * 8 + 8)))
    read_broadcast(one, shape, Span(0, "F32", start, stop - start, 0), target, channel)
    channel.close()
    itemsize = one.tensor.nbytes // one.tensor.elements
    assert bytes(target[(stop - start) * itemsize :]).strip(b"\xee") == b""
    return bytes(target[: (stop - start) * itemsize]), channel.clock.read_bytes


@given(case=broadcasts(), dtype=st.sampled_from(VALUE_TYPES), window=st.sampled_from([1, 2, 7, 1 << 18]))
def test_spread_elements_are_those_of_numpy_whatever_the_window(tmp_path_factory, case, dtype, window):
    own, shape, start, stop = case
    array = encode(np.arange(math.prod(own)).reshape(own) - 3, dtype)
    path = write(tmp_path_factory.getbasetemp() / "spread", {"before": np.ones(3, np.uint8), "a": array})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "WINDOW_ELEMENTS", window)
        found, _ = spread_of(path, shape, start, stop)
    assert found == np.broadcast_to(array, shape).ravel()[start:stop].tobytes()


def test_a_run_that_wraps_round_a_large_tensor_reads_its_two_ends_and_not_what_lies_between(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "WINDOW_ELEMENTS", 100)
    array = encode(np.random.default_rng(1).standard_normal(100_000), "F32")
    path = write(tmp_path / "x", {"a": array})
    found, nbytes = spread_of(path, (3, 100_000), 99_970, 100_010)
    assert np.array_equal(np.frombuffer(found, np.uint32), bits_of(np.r_[array[-30:], array[:10]]))
    assert nbytes < 1000


def test_the_bits_of_a_nan_are_spread_as_they_are(tmp_path):
    array = np.array([0x7FA0_1234], np.uint32).view(np.float32)
    found, _ = spread_of(write(tmp_path / "x", {"a": array}), (2, 3), 0, 6)
    assert np.frombuffer(found, np.uint32).tolist() == [0x7FA0_1234] * 6


@pytest.mark.parametrize(
    ("grad", "expected"),
    [
        (f32(10, 20, 30), [[11, 22, 33], [14, 25, 36]]),
        (encode(10, "F32"), [[11, 12, 13], [14, 15, 16]]),
        (encode([[10], [20]], "BF16"), [[11, 12, 13], [24, 25, 26]]),
        (encode([[10, 20, 30]], "F64"), [[11, 22, 33], [14, 25, 36]]),
    ],
)
def test_a_gradient_broadcasts_to_the_shape_of_the_buffer(tmp_path, grad, expected):
    path, grads = lay_out(tmp_path, encode([[1, 2, 3], [4, 5, 6]], "F32"), grad)
    accumulate(grads, into=path)
    assert read(path)["a"].tolist() == expected


def test_a_gradient_never_broadcasts_the_other_way(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(1, 2), "b": f32(1)}, {"a": encode([[1, 2], [3, 4]], "F32"), "b": f32(1)})
    with pytest.raises(BadInputError, match=r"\[2, 2\] does not broadcast to \[2\], its shape in the buffer") as caught:
        accumulate(grads, into=path)
    assert caught.value.exit_code == 3
    assert refused(BadInputError, tmp_path, path, grads) == [("shape", "a", "g1")]
    path, grads = lay_out(tmp_path, encode(1, "F32"), f32(1))
    assert refused(BadInputError, tmp_path, path, grads) == [("shape", "a", "g1")]
