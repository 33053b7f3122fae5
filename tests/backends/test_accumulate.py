"""The weighted add of every backend against Python floats, ml_dtypes and exact fractions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import (
    LOSSES,
    NUMPY_TYPES,
    STATISTICS,
    VALUE_TYPES,
    bits_of,
    block_of,
    encode,
    gaussian,
    rounded_once,
    stored,
)

from gradtool.backends.cpu import NumpyBackend
from gradtool.backends.storage import STORAGE
from gradtool.backends.values import Addend, AddMode, NormSpec, Piece


def whole(array, weight=1.0):
    """One source that adds an array to a piece of the same length."""
    block, (piece,) = block_of(array, lead=1)
    return block, [Addend(piece.dtype, piece.offset, array.size, 0, weight)]


@pytest.mark.parametrize("old_type", VALUE_TYPES)
@pytest.mark.parametrize("grad_type", VALUE_TYPES)
def test_every_type_into_every_type_is_a_float64_sum_rounded_once(backend, old_type, grad_type):
    old, grads = gaussian(3000, old_type, seed=1), [gaussian(3000, grad_type, seed=seed) for seed in (2, 3)]
    block, pieces = block_of(old, lead=3)
    backend.accumulate(block, pieces, iter([whole(grads[0], 0.7), whole(grads[1], -3.0)]), AddMode(), NormSpec())
    with np.errstate(all="ignore"):
        wide = old.astype(np.float64) + 0.7 * grads[0].astype(np.float64)
        expected = rounded_once(wide + -3.0 * grads[1].astype(np.float64), old_type)
    assert stored(block, pieces[0]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [dtype for dtype in VALUE_TYPES if NUMPY_TYPES[dtype].itemsize < 4])
def test_a_float64_sum_is_not_rounded_twice(backend, dtype):
    """Just above and below a tie, by less than float32 can tell."""
    storage = STORAGE[dtype]
    codes = np.arange(storage.overflow or 0x7F7F, dtype=storage.bits)[:-1]
    low = codes.view(NUMPY_TYPES[dtype]).astype(np.float64)
    high = (codes + storage.bits.type(1)).view(NUMPY_TYPES[dtype]).astype(np.float64)
    ties = (low + high) / 2
    for offset, expected in ((1 + 2**-50, codes + 1), (1 - 2**-50, codes), (1, codes + codes % 2)):
        block, pieces = block_of(np.zeros(len(codes), NUMPY_TYPES[dtype]))
        backend.accumulate(block, pieces, iter([whole(ties * offset)]), AddMode(buffer_weight=0), NormSpec())
        assert np.array_equal(bits_of(stored(block, pieces[0])), expected.astype(storage.bits)), offset


def hard_to_round(dtype):
    """Values of a type, ties, and what float64 has on either side of them; subnormals, ends of ranges, and any bits."""
    kind, rng = NUMPY_TYPES[dtype], np.random.default_rng(7)
    exact_values = np.arange(STORAGE[dtype].overflow or 0x7F80, dtype=f"u{kind.itemsize}").view(kind).astype(np.float64)
    exact_values = np.append(exact_values[np.isfinite(exact_values)], 2 * exact_values[-1] - exact_values[-2])
    exact = np.concatenate([exact_values, (exact_values[:-1] + exact_values[1:]) / 2, 2.0 ** np.arange(-1074, 1024)])
    around = [exact, np.nextafter(exact, np.inf), np.nextafter(exact, 0)]
    special = [np.inf, np.nan, np.finfo(np.float64).max, 5e-324]
    bits = rng.integers(0, 2**64, 1 << 14, np.uint64).view(np.float64)
    values = np.concatenate([*around, special, bits])
    return rng.permutation(np.concatenate([values, -values]))


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_what_is_hard_to_round_is_rounded_once(backend, dtype):
    with np.errstate(all="ignore"):
        values = hard_to_round(dtype) if NUMPY_TYPES[dtype].itemsize < 4 else hard_to_round("BF16")
        expected = rounded_once(values, dtype)
    block, pieces = block_of(np.zeros(len(values), NUMPY_TYPES[dtype]))
    backend.accumulate(block, pieces, iter([whole(values)]), AddMode(buffer_weight=0), NormSpec())
    assert np.array_equal(bits_of(stored(block, pieces[0])), bits_of(expected))


def test_beyond_the_largest_value_is_infinite_and_f8_e4m3_has_a_nan_instead(backend):
    for dtype in VALUE_TYPES[1:]:
        block, pieces = block_of(encode([0, 0, 0], dtype))
        result = backend.accumulate(
            block, pieces, iter([whole(np.array([1e300, -1e300, np.nan]))]), AddMode(), NormSpec()
        )
        values = stored(block, pieces[0]).astype(float)
        if dtype == "F8_E4M3":
            assert bits_of(stored(block, pieces[0])).tolist() == [0x7F, 0x7F, 0x7F]
        else:
            assert np.array_equal(values, [math.inf, -math.inf, math.nan], equal_nan=True)
        assert result.nan[0] + result.inf[0] == 3
        assert bits_of(stored(block, pieces[0]))[2] == STORAGE[dtype].quiet_nan


def test_the_sums_are_those_of_what_was_written(backend):
    block, pieces = block_of(gaussian(70_001, "BF16"), gaussian(5, "F64"))
    source, _ = block_of(gaussian(70_006, "F32", seed=8))
    written = backend.accumulate(
        block, pieces, iter([(source, [Addend("F32", 0, 70_006, 0, 0.3)])]), AddMode(), NormSpec()
    )
    again = backend.tile_sums(block, pieces, NormSpec())
    for statistic in STATISTICS:
        assert getattr(written, statistic).tolist() == getattr(again, statistic).tolist()


def test_minus_zero_survives_when_nothing_is_added_to_it(backend):
    block, pieces = block_of(encode([5, 5], "F32"))
    backend.accumulate(block, pieces, iter([whole(encode([-0.0, 0.0], "F32"))]), AddMode(buffer_weight=0), NormSpec())
    assert np.signbit(stored(block, pieces[0])).tolist() == [True, False]


def test_a_divisor_divides_the_sum_and_not_what_was_there(backend):
    block, pieces = block_of(encode([10, 20], "F32"))
    sources = [whole(encode([3, 6], "F32"), 2.0), whole(encode([1, 1], "BF16"), 1.0)]
    backend.accumulate(block, pieces, iter(sources), AddMode(divisor=3.0), NormSpec())
    assert stored(block, pieces[0]).tolist() == [np.float32(10 + 7 / 3), np.float32(20 + 13 / 3)]


def test_a_factor_multiplies_before_the_rounding(backend):
    block, pieces = block_of(encode([60_000], "F16"))
    backend.accumulate(block, pieces, iter([whole(encode([60_000], "F16"))]), AddMode(factor=0.001), NormSpec())
    assert stored(block, pieces[0]).tolist() == [120.0]


def test_unrounded_sums_are_measured_and_nothing_is_written(backend):
    block, pieces = block_of(encode([60_000, 1], "F16"), encode([2], "F16"))
    before = bytes(block)
    result = backend.accumulate(
        block, pieces, iter([whole(encode([60_000, 2, 2], "F16"))]), AddMode(rounds=False), NormSpec()
    )
    assert bytes(block) == before
    assert (result.sums.tolist(), result.max_abs.tolist()) == ([120_000.0**2 + 9, 16.0], [120_000.0, 4.0])
    assert result.inf.tolist() == [0, 0]


@pytest.mark.parametrize("batches", [1, 2])
def test_sums_that_become_zero_or_subnormal_by_rounding_are_counted(backend, batches):
    # Of F16, the smallest normal value is 2^-14, and the smallest 2^-24. An exact subnormal loses nothing.
    wide = np.zeros(3000)
    wide[[1, 2047, 2048, 2500, 2999]] = [1e-9, -1e-5, 2.0**-20, 2.0**-14, 0.1]
    block, pieces = block_of(encode([1.0], "F32"), np.zeros(3000, np.float16), np.zeros(3000), lead=1)
    source, (piece,) = block_of(np.concatenate([[1e-50], wide, wide * 1e-310]))
    batch = source, [Addend("F64", piece.offset, 6001, 0, 1 / batches)]
    for rounds in (True, False):
        result = backend.accumulate(block, pieces, iter([batch] * batches), AddMode(False, rounds=rounds), NormSpec())
        expected = [[1, 1, 0], [0, 1, 0]] if rounds else [[0, 0, 0], [0, 0, 0]]
        assert [getattr(result, statistic).tolist() for statistic in LOSSES] == expected


def test_a_source_may_have_parts_in_any_order_and_leave_some_out(backend):
    block, pieces = block_of(encode([1, 2, 3], "F32"), encode([10, 20], "BF16"))
    source, parts = block_of(encode([7], "F64"), encode([100, 200, 300], "F8_E5M2"), lead=5)
    addends = [Addend("F8_E5M2", parts[1].offset, 2, 3, 1.0), Addend("F64", parts[0].offset, 1, 1, 2.0)]
    backend.accumulate(block, pieces, iter([(source, addends)]), AddMode(), NormSpec())
    assert stored(block, pieces[0]).tolist() == [1, 16, 3]
    assert stored(block, pieces[1]).astype(float).tolist() == [10 + 96, 20 + 192]


def test_a_source_is_done_with_before_the_next_is_asked_for(backend):
    values = [gaussian(5000, "F32", seed) for seed in range(4)]
    memory = memoryview(bytearray(values[0].nbytes))

    def sources():
        for grad in values[1:]:
            memory[:] = grad.tobytes()
            yield memory, [Addend("F32", 0, 5000, 0, 1.0)]
        memory[:] = b"\xa5" * len(memory)

    block, pieces = block_of(values[0])
    backend.accumulate(block, pieces, sources(), AddMode(), NormSpec())
    wide = values[0].astype(np.float64)
    for addend in values[1:]:
        wide += addend
    assert stored(block, pieces[0]).tobytes() == wide.astype(np.float32).tobytes()


@pytest.mark.parametrize("start", [0, 1, 7, 8, 9])
def test_an_addend_may_begin_and_end_anywhere_in_a_piece(backend, start):
    for count in range(20):
        # What lies before and behind it is not zero.
        source, parts = block_of(np.full(3, 1e30), np.arange(1.0, 1 + count), np.full(20, 1e30))
        block, pieces = block_of(np.zeros(40, np.float32))
        backend.accumulate(
            block, pieces, iter([(source, [Addend("F64", parts[1].offset, count, start, 1.0)])]), AddMode(), NormSpec()
        )
        expected = np.zeros(40)
        expected[start : start + count] = np.arange(1.0, 1 + count)
        assert stored(block, pieces[0]).tolist() == expected.tolist()


PIECES = st.lists(st.tuples(st.sampled_from(VALUE_TYPES), st.sampled_from([0, 1, 37, 2049, 65_537])), max_size=3)


@given(shapes=PIECES, grad_type=st.sampled_from(VALUE_TYPES), seed=st.integers(0, 99), divisor=st.none() | st.just(0.3))
def test_every_backend_gives_the_bits_of_the_reference(backend, shapes, grad_type, seed, divisor):
    rng = np.random.default_rng(seed)

    def anything(count, dtype):
        return rng.integers(0, 256, count * NUMPY_TYPES[dtype].itemsize, np.uint8).view(NUMPY_TYPES[dtype])

    arrays = [anything(count, dtype) for dtype, count in shapes]
    grad = anything(sum(count for _, count in shapes), grad_type)
    rule = AddMode(
        buffer_weight=[0, 1.0, 0.9, -0.3][seed % 4], divisor=divisor, factor=[1.0, 0.377][seed % 2], rounds=seed % 5 > 0
    )
    spec = NormSpec([1.0, 2.0, math.inf][seed % 3])
    expected = None
    for tested in (NumpyBackend(), backend):
        block, pieces = block_of(*arrays, lead=3)
        result = tested.accumulate(block, pieces, iter([whole(grad, 0.1), whole(grad, 1.0)]), rule, spec)
        results = [bytes(block), *(getattr(result, name).tobytes() for name in (*STATISTICS[1:], *LOSSES))]
        expected = expected or (results, result.sums)
        assert results == expected[0]
        assert np.array_equal(result.sums, expected[1], equal_nan=True)


def test_pieces_may_be_none_at_all(backend):
    result = backend.accumulate(memoryview(bytearray(8)), [], iter(()), AddMode(), NormSpec())
    assert result.sums.tolist() == []
    assert backend.tile_sums(memoryview(bytearray(8)), [Piece("F32", 0, 0)], NormSpec()).sums.tolist() == []
