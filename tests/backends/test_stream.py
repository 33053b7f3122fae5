"""Blocks that a backend reads from a file itself, against the same blocks in memory and the numpy backend."""

import contextlib
import errno
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import NUMPY_TYPES, STATISTICS, VALUE_TYPES, block_of, bytes_of_memory, encode

from gradtool import tuning
from gradtool.arrays import int64s
from gradtool.backends.cpu import NumpyBackend
from gradtool.backends.values import FileBlock, NormSpec, Piece, Tolerance

COMPILER = shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
ROOM, SPEC = tuning.STREAM_BYTES, NormSpec()


@contextlib.contextmanager
def in_file(data, *, lead=0, cut=0, room=ROOM):
    """A block between other bytes of a file, or at the end of one, whose last `cut` bytes are missing."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(lead) + bytes(data[: len(data) - cut]) + bytes(0 if cut else 1000))
        file.flush()
        yield FileBlock(file.fileno(), lead, len(data), bytes_of_memory(room), int64s(3))


def reads(backend, spec=SPEC):
    if not backend.reads_files(spec):
        pytest.skip("this backend reads no files")


def streamed(backend, data, pieces, spec=SPEC, **options):
    """What a backend finds in a block of a file, and the bytes that it read."""
    reads(backend, spec)
    with in_file(data, **options) as block:
        result = backend.tile_sums(block, pieces, spec)
        block.check()
        assert block.report[1] >= 0
        return result, block.report[0]


def assert_found(result, expected):
    for statistic in STATISTICS:
        assert np.array_equal(getattr(result, statistic), getattr(expected, statistic), equal_nan=True), statistic


def block_with_gaps(shapes, rng):
    """A block of random bits, in which NaN, Inf and sums beyond float64 are frequent, and its pieces."""
    data, pieces = bytearray(), []
    for dtype, elements, gap in shapes:
        data += b"\xff" * gap
        pieces.append(Piece(dtype, len(data), elements))
        data += rng.bytes(elements * NUMPY_TYPES[dtype].itemsize)
    return memoryview(data), pieces


# Up to several tiles, and gaps that are longer than what is read at a time.
SHAPES = st.lists(
    st.tuples(
        st.sampled_from(VALUE_TYPES),
        st.sampled_from([0, 1, 37, 2049, 65_537, 200_003]),
        st.sampled_from([0, 1, 600_001]),
    ),
    max_size=5,
)


@settings(max_examples=60)
@given(
    shapes=SHAPES,
    seed=st.integers(0, 99),
    order=st.sampled_from([1.0, 2.0, math.inf]),
    lead=st.integers(0, 9),
    room=st.sampled_from([ROOM, ROOM + 13, 3 * ROOM]),
)
def test_what_is_streamed_has_the_bits_of_the_reference(backend, shapes, seed, order, lead, room):
    data, pieces = block_with_gaps(shapes, np.random.default_rng(seed))
    spec = NormSpec(order, drop_nonfinite=seed % 2 == 1)
    result = streamed(backend, data, pieces, spec, lead=lead, room=room)[0]
    assert_found(result, NumpyBackend().tile_sums(data, pieces, spec))


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("exponent", [-1000, -1, 1000])
def test_tiles_out_of_range_are_divided_before_the_next_is_read(backend, dtype, exponent):
    rng = np.random.default_rng(5)
    values = np.ldexp(rng.standard_normal(200_003), exponent if dtype == "F64" else 0)
    data, pieces = block_of(encode(values, dtype), encode(values[:70_000], dtype))
    for order in (1.0, 2.0):
        result = streamed(backend, data, pieces, NormSpec(order), lead=3)[0]
        assert_found(result, NumpyBackend().tile_sums(data, pieces, NormSpec(order)))


def test_many_tiny_tensors_are_read_at_once(backend):
    rng = np.random.default_rng(6)
    data, pieces = block_with_gaps([(VALUE_TYPES[i % 6], i % 5, i % 3) for i in range(3000)], rng)
    result, nbytes = streamed(backend, data, pieces, lead=1)
    assert_found(result, NumpyBackend().tile_sums(data, pieces, SPEC))
    # All but the gap before the first value.
    assert nbytes == len(data) - pieces[1].offset


def test_every_byte_is_read_once_though_tiles_lie_across_what_is_read_at_a_time(backend):
    data, pieces = block_of(np.ones(5, np.float32), np.ones(300_000), np.ones(400_001, np.float16), np.ones(7))
    assert streamed(backend, data, pieces, lead=2)[1] == len(data)


def test_pieces_may_come_in_any_order_and_overlap(backend):
    data, pieces = block_with_gaps(
        [("F32", 100_000, 1), ("F64", 100_000, 0), ("F16", 300_000, 7)], np.random.default_rng(7)
    )
    pieces = [*reversed(pieces), pieces[1]._replace(elements=5), pieces[0]]
    assert_found(streamed(backend, data, pieces)[0], NumpyBackend().tile_sums(data, pieces, SPEC))


def test_a_gap_that_is_longer_than_the_room_is_not_read(backend):
    data = memoryview(bytes(4 * ROOM))
    pieces = [Piece("F32", 0, 1), Piece("F32", len(data) - 4, 1)]
    result, nbytes = streamed(backend, data, pieces)
    assert nbytes == ROOM + 4
    assert result.zeros.tolist() == [1, 1]


def test_nothing_is_read_where_there_is_no_value(backend):
    result, nbytes = streamed(backend, memoryview(b""), [Piece("F32", 0, 0)])
    assert (nbytes, result.sums.tolist()) == (0, [])


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E5M2"])
def test_the_first_nan_is_found_wherever_it_is(backend, dtype):
    values = np.ones(700_000)
    for first in (699_999, 400_000, 131_072, 131_071, 0):
        values[first] = math.nan
        data, pieces = block_of(encode(np.ones(5), dtype), encode(values, dtype))
        result = streamed(backend, data, pieces, lead=1)[0]
        assert result.first_nonfinite.tolist() == [-1, first]


@pytest.mark.parametrize("cut", [1, 4, 500_000, 800_000])
def test_a_file_that_ends_within_the_block_is_noticed(backend, cut):
    data, pieces = block_of(np.ones(200_000, np.float32))
    with pytest.raises(EOFError):
        streamed(backend, data, pieces, lead=5, cut=cut)


def test_bytes_that_no_piece_needs_may_be_missing(backend):
    data, pieces = block_of(np.ones(10, np.float32), np.ones(10, np.float32))
    assert streamed(backend, data, pieces[:1], cut=40)[1] == 40


def test_what_the_system_refuses_is_raised_with_its_number(backend, tmp_path):
    reads(backend)
    fd = os.open(tmp_path, os.O_RDONLY)
    errors = []
    for descriptor in (fd, -1):
        block = FileBlock(descriptor, 0, 4, bytes_of_memory(ROOM), int64s(3))
        backend.tile_sums(block, [Piece("F32", 0, 1)], SPEC)
        with pytest.raises(OSError, match=r"directory|descriptor") as caught:
            block.check()
        errors.append(caught.value.errno)
    os.close(fd)
    assert errors == [errno.EISDIR, errno.EBADF]


def test_only_orders_that_have_a_kernel_are_streamed(backend):
    assert not backend.reads_files(NormSpec(3.0))
    assert backend.reads_files(SPEC) == backend.reads_files(NormSpec(1.0))


@settings(max_examples=40)
@given(shapes=SHAPES, seed=st.integers(0, 99), order=st.sampled_from([1.0, 2.0, math.inf]), lead=st.integers(0, 9))
def test_what_is_counted_while_it_is_read_is_what_the_reference_counts(backend, shapes, seed, order, lead):
    data, pieces = block_with_gaps(shapes, np.random.default_rng(seed))
    spec = NormSpec(order, drop_nonfinite=seed % 2 == 1)
    reads(backend, spec)
    with in_file(data, lead=lead) as block:
        sums, counts = backend.histogram(block, pieces, spec)
        block.check()
    expected = NumpyBackend().histogram(data, pieces, spec)
    assert_found(sums, expected[0])
    assert counts == expected[1]


def two_blocks(shapes, rng):
    """Two blocks of pieces as long as each other: mostly of near values, some of them NaN, Inf, or equal."""
    blocks = [bytearray(), bytearray()], [[], []]
    for dtype, b_type, elements, gap in shapes:
        values = rng.standard_normal(elements)
        values[rng.random(elements) < rng.choice([0, 0.001])] = rng.choice([math.nan, math.inf])
        near = values * (1 + rng.choice([0, 1e-3]) * rng.standard_normal(elements))
        for data, pieces, kind, array, lead in zip(
            *blocks, (dtype, b_type), (values, near), (gap, gap // 3), strict=True
        ):
            pieces.append(Piece(kind, len(data) + lead, elements))
            data.extend(b"\xff" * lead + encode(array, kind).tobytes())
    return [(memoryview(data), pieces) for data, pieces in zip(*blocks, strict=True)]


def compared(backend, a, b, tolerance=Tolerance(), **options):  # noqa: B008 - a value
    """What a backend finds between two blocks of files, and the bytes that it read of each."""
    reads(backend)
    (left, a_pieces), (right, b_pieces) = a, b
    with in_file(left, **options) as x, in_file(right, lead=3, cut=options.get("cut", 0)) as y:
        result = backend.differences(x, a_pieces, y, b_pieces, [tolerance] * len(a_pieces))
        for block in (x, y):
            block.check()
    return result, x.report[0], y.report[0]


PAIRS = st.lists(
    st.tuples(
        st.sampled_from(VALUE_TYPES),
        st.sampled_from(VALUE_TYPES),
        st.sampled_from([0, 1, 37, 2049, 65_537, 140_003]),
        st.sampled_from([0, 1, 600_001]),
    ),
    max_size=4,
)


@settings(max_examples=40)
@given(shapes=PAIRS, seed=st.integers(0, 99), lead=st.integers(0, 9), room=st.sampled_from([ROOM, ROOM + 13, 3 * ROOM]))
def test_two_files_that_are_read_side_by_side_differ_as_in_the_reference(backend, shapes, seed, lead, room):
    rng = np.random.default_rng(seed)
    a, b = two_blocks(shapes, rng)
    tolerance = Tolerance(*rng.choice([0, 1e-3], 3).tolist())
    result, *_ = compared(backend, a, b, tolerance, lead=lead, room=room)
    expected = NumpyBackend().differences(*a, *b, [tolerance] * len(shapes))
    assert [field.tobytes() for field in result] == [field.tobytes() for field in expected]


def test_every_byte_of_both_files_is_read_once(backend):
    a, b = two_blocks([("F64", "BF16", 300_000, 0), ("F16", "F32", 400_001, 0)], np.random.default_rng(9))
    assert compared(backend, a, b)[1:] == (len(a[0]), len(b[0]))


def test_a_file_and_one_in_memory_are_compared(backend):
    reads(backend)
    (left, a_pieces), (right, b_pieces) = two_blocks([("F32", "F16", 200_000, 5)], np.random.default_rng(10))
    expected = NumpyBackend().differences(left, a_pieces, right, b_pieces, [Tolerance()])
    with in_file(left) as x, in_file(right) as y:
        assert backend.differences(x, a_pieces, right, b_pieces, [Tolerance()]) == expected
        assert backend.differences(left, a_pieces, y, b_pieces, [Tolerance()]) == expected


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("cut", [1, 300_000, 799_999])
def test_of_two_files_the_one_that_ends_early_is_told(backend, side, cut):
    reads(backend)
    a, b = two_blocks([("F32", "F32", 200_000, 0)], np.random.default_rng(11))
    cuts = [cut * (side == 0), cut * (side == 1)]
    with in_file(a[0], cut=cuts[0]) as x, in_file(b[0], cut=cuts[1]) as y:
        backend.differences(x, a[1], y, b[1], [Tolerance()])
        assert [block.report[2] for block in (x, y)] == [-(side == 0), -(side == 1)]


# Reads that are interrupted, and those that bring less than was asked for.
PREAD = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
static ssize_t read_part(int fd, void *to, size_t count, long at)
{
    static unsigned calls;
    if (++calls % 3 == 0) return errno = EINTR, -1;
    return syscall(SYS_pread64, fd, to, count > 70001 ? 70001 : count, at);
}
ssize_t pread(int fd, void *to, size_t count, off_t at) { return read_part(fd, to, count, at); }
ssize_t pread64(int fd, void *to, size_t count, off64_t at) { return read_part(fd, to, count, at); }
"""
READ = """
import sys, numpy as np
from support import backends, bytes_of_memory
from gradtool import tuning
from gradtool.arrays import int64s
from gradtool.backends.values import FileBlock, NormSpec, Piece
with open(sys.argv[1], "rb") as file:
    block = FileBlock(file.fileno(), 3, 2_400_000, bytes_of_memory(tuning.STREAM_BYTES), int64s(3))
    result = backends()["compiled"]().tile_sums(block, [Piece("F64", 0, 300_000)], NormSpec())
print(block.report[0], [total.hex() for total in result.sums.tolist()])
"""


@pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="replaces a function of the C library of Linux")
def test_reads_that_are_short_or_interrupted_are_carried_on(tmp_path):
    pytest.importorskip("gradtool.backends._kernels", reason="the compiled kernels were not built")
    data, pieces = block_of(np.random.default_rng(8).standard_normal(300_000))
    (tmp_path / "file").write_bytes(b"abc" + bytes(data))
    (tmp_path / "pread.c").write_text(PREAD)
    library = tmp_path / "pread.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, tmp_path / "pread.c"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-P", "-c", READ, tmp_path / "file"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    expected = NumpyBackend().tile_sums(data, pieces, SPEC).sums
    assert done.stdout.strip() == f"2400000 {[total.hex() for total in expected.tolist()]}"
