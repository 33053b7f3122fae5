"""Blocks that a backend reads from a file itself, against the same blocks in memory and the numpy backend."""

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
from support import FACTS, NUMPY_TYPES, VALUE_TYPES, block_of, bytes_of_memory, encode

from gradtool import tuning
from gradtool.backends import FileBlock, NormSpec, Piece
from gradtool.backends.cpu import NumpyBackend

COMPILER = shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
ROOM, SPEC = tuning.STREAM_BYTES, NormSpec()


def streamed(backend, data, pieces, spec=SPEC, *, lead=0, cut=0, room=ROOM):
    """What a backend finds in a block between other bytes of a file, or in one whose last `cut` bytes are missing."""
    stream = backend.stream(spec)
    if stream is None:
        pytest.skip("this backend reads no files")
    with tempfile.TemporaryFile() as file:
        file.write(bytes(lead) + bytes(data[: len(data) - cut]) + bytes(0 if cut else 1000))
        file.flush()
        return stream(FileBlock(file.fileno(), lead, len(data)), bytes_of_memory(room), pieces)


def assert_found(found, expected):
    for fact in FACTS:
        assert np.array_equal(getattr(found, fact), getattr(expected, fact), equal_nan=True), fact


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
    found = streamed(backend, data, pieces, spec, lead=lead, room=room).sums
    assert_found(found, NumpyBackend().tile_sums(data, pieces, spec))


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("exponent", [-1000, -1, 1000])
def test_tiles_out_of_range_are_divided_before_the_next_is_read(backend, dtype, exponent):
    rng = np.random.default_rng(5)
    values = np.ldexp(rng.standard_normal(200_003), exponent if dtype == "F64" else 0)
    data, pieces = block_of(encode(values, dtype), encode(values[:70_000], dtype))
    for order in (1.0, 2.0):
        found = streamed(backend, data, pieces, NormSpec(order), lead=3).sums
        assert_found(found, NumpyBackend().tile_sums(data, pieces, NormSpec(order)))


def test_many_tiny_tensors_are_read_at_once(backend):
    rng = np.random.default_rng(6)
    data, pieces = block_with_gaps([(VALUE_TYPES[i % 6], i % 5, i % 3) for i in range(3000)], rng)
    found = streamed(backend, data, pieces, lead=1)
    assert_found(found.sums, NumpyBackend().tile_sums(data, pieces, SPEC))
    # All but the gap before the first value.
    assert found.nbytes == len(data) - pieces[1].offset


def test_every_byte_is_read_once_though_tiles_lie_across_what_is_read_at_a_time(backend):
    data, pieces = block_of(np.ones(5, np.float32), np.ones(300_000), np.ones(400_001, np.float16), np.ones(7))
    assert streamed(backend, data, pieces, lead=2).nbytes == len(data)


def test_pieces_may_come_in_any_order_and_overlap(backend):
    data, pieces = block_with_gaps(
        [("F32", 100_000, 1), ("F64", 100_000, 0), ("F16", 300_000, 7)], np.random.default_rng(7)
    )
    pieces = [*reversed(pieces), pieces[1]._replace(elements=5), pieces[0]]
    assert_found(streamed(backend, data, pieces).sums, NumpyBackend().tile_sums(data, pieces, SPEC))


def test_a_gap_that_is_longer_than_the_room_is_not_read(backend):
    data = memoryview(bytes(4 * ROOM))
    pieces = [Piece("F32", 0, 1), Piece("F32", len(data) - 4, 1)]
    found = streamed(backend, data, pieces)
    assert found.nbytes == ROOM + 4
    assert found.sums.zeros.tolist() == [1, 1]
    assert found.seconds >= 0


def test_nothing_is_read_where_there_is_no_value(backend):
    found = streamed(backend, memoryview(b""), [Piece("F32", 0, 0)])
    assert (found.nbytes, found.seconds, found.sums.sums.tolist()) == (0, 0.0, [])


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E5M2"])
def test_the_first_nan_is_found_wherever_it_is(backend, dtype):
    values = np.ones(700_000)
    for first in (699_999, 400_000, 131_072, 131_071, 0):
        values[first] = math.nan
        data, pieces = block_of(encode(np.ones(5), dtype), encode(values, dtype))
        found = streamed(backend, data, pieces, lead=1).sums
        assert found.first_nonfinite.tolist() == [-1, first]


@pytest.mark.parametrize("cut", [1, 4, 500_000, 800_000])
def test_a_file_that_ends_within_the_block_is_noticed(backend, cut):
    data, pieces = block_of(np.ones(200_000, np.float32))
    with pytest.raises(EOFError):
        streamed(backend, data, pieces, lead=5, cut=cut)


def test_bytes_that_no_piece_needs_may_be_missing(backend):
    data, pieces = block_of(np.ones(10, np.float32), np.ones(10, np.float32))
    assert streamed(backend, data, pieces[:1], cut=40).nbytes == 40


def test_what_the_system_refuses_is_raised_with_its_number(backend, tmp_path):
    stream = backend.stream(SPEC)
    if stream is None:
        pytest.skip("this backend reads no files")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            stream(FileBlock(fd, 0, 4), bytes_of_memory(ROOM), [Piece("F32", 0, 1)])
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        stream(FileBlock(-1, 0, 4), bytes_of_memory(ROOM), [Piece("F32", 0, 1)])
    assert caught.value.errno == errno.EBADF


def test_only_orders_that_have_a_kernel_are_streamed(backend):
    assert backend.stream(NormSpec(3.0)) is None
    assert (backend.stream(SPEC) is None) == (backend.stream(NormSpec(1.0)) is None)


# Reads that are interrupted, and those that bring less than was asked for.
PREAD = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
static ssize_t some(int fd, void *to, size_t count, long at)
{
    static unsigned calls;
    if (++calls % 3 == 0) return errno = EINTR, -1;
    return syscall(SYS_pread64, fd, to, count > 70001 ? 70001 : count, at);
}
ssize_t pread(int fd, void *to, size_t count, off_t at) { return some(fd, to, count, at); }
ssize_t pread64(int fd, void *to, size_t count, off64_t at) { return some(fd, to, count, at); }
"""
READ = """
import sys, numpy as np
from support import backends, bytes_of_memory
from gradtool import tuning
from gradtool.backends import FileBlock, NormSpec, Piece
with open(sys.argv[1], "rb") as file:
    block, memory = FileBlock(file.fileno(), 3, 2_400_000), bytes_of_memory(tuning.STREAM_BYTES)
    found = backends()["compiled"]().stream(NormSpec())(block, memory, [Piece("F64", 0, 300_000)])
print(found.nbytes, [one.hex() for one in found.sums.sums.tolist()])
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
    assert done.stdout.strip() == f"2400000 {[one.hex() for one in expected.tolist()]}"
