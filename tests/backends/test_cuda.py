"""What the host hands to the CUDA kernels, and sizes that no test has the memory for."""

import numpy as np
import pytest
import support
from support import block_of, canonical_tile_sums, gaussian

from gradtool.backends.cuda import jobs as cuda_jobs
from gradtool.backends.cuda.device import DeviceBlock
from gradtool.backends.values import Addend, AddMode, NormSpec, Patch, Piece


@pytest.fixture
def shim():
    try:
        return support.shim()
    except ImportError as error:
        pytest.skip(str(error))


def test_a_piece_may_lie_beyond_4_gib_of_its_block(shim):
    array = gaussian(70_000, "BF16")
    block, (piece,) = block_of(array)
    far = 5 << 30
    held = shim.to_device(block)
    result = shim.tile_sums(
        DeviceBlock(held.buffer, held.address - far, far), [piece._replace(offset=far)], NormSpec(1.0)
    )
    assert result.sums.tolist() == canonical_tile_sums(np.abs(array.astype(float)).tolist())


def test_a_tensor_may_have_more_than_2_to_the_32_elements(shim):
    array = gaussian(65_536 + 100, "F32")
    array[65_540] = np.nan
    held = shim.to_device(block_of(array)[0])
    # The last two of many tiles, as if all before them were there too.
    before = (1 << 33) // 65_536
    tiles = cuda_jobs.Tiles.from_pieces([Piece("F32", 0, array.size)], None)
    tiles.table["elements"] = (1 << 33) + array.size
    ((_, _, fields),) = tiles.by_type()
    rows = fields["piece"]
    rows["first_block"], rows["first_sum"] = -before, -before
    results = np.zeros(tiles.results, np.int64)
    job = cuda_jobs.make_job(
        shim.device,
        cuda_jobs.TILES_JOB,
        block=held.address - 4 * (1 << 33),
        sums=results.ctypes.data,
        exponents=results.ctypes.data + 8 * tiles.total,
        statistics=results.ctypes.data + 16 * tiles.total,
        piece=rows.ctypes.data,
        pieces=1,
        order=1.0,
    )
    shim.device.launch("F32", "measure_absolute", 2, cuda_jobs.THREADS, job.argument)
    shim.device.wait()
    result = tiles.unpack(results)
    assert result.sums[0] == canonical_tile_sums(np.abs(array[:65_536].astype(float)).tolist())[0]
    assert (result.nan[0], result.first_nonfinite[0]) == (1, (1 << 33) + 65_540)


def test_addends_are_cut_at_the_pieces_they_are_for():
    pieces = [Piece("F32", 0, 3), Piece("BF16", 12, 0), Piece("F32", 16, 5)]
    addends = [Addend("F64", 100, 4, 1, 0.5), Addend("BF16", 0, 3, 5, 2.0)]
    ((dtype, blocks, fields),) = cuda_jobs.additions(pieces, [0, 3, 3, 8], addends)
    assert fields["addend"].tolist() == [(0, 100, 1, 2, 0.5), (0, 116, 0, 2, 0.5), (3, 0, 2, 3, 2.0)]
    assert (dtype, blocks) == ("F32", 2)
    # Offset, elements, first block, first sum, first addend, addends, number.
    assert fields["target"].tolist() == [(0, 3, 0, 0, 0, 1, 0), (16, 5, 1, 3, 1, 2, 2)]


def test_what_was_there_is_added_once():
    first, last, keeps, divides = 1, 2, 4, 8
    for divisor, when in ((None, 0), (3.0, 2)):
        rule = AddMode(divisor=divisor, factor=1.0)
        flags = [cuda_jobs.add_flags(rule, is_first=k == 0, is_last=k == 2) for k in range(3)]
        assert [bool(batch & keeps) for batch in flags] == [k == when for k in range(3)]
        assert [batch & 3 for batch in flags] == [first, 0, last]
        assert [bool(batch & divides) for batch in flags] == [False, False, divisor is not None]
    both = cuda_jobs.add_flags(AddMode(buffer_weight=0, factor=0.5, rounds=False), is_first=True, is_last=True)
    assert both == first | last | 16


@pytest.mark.parametrize(
    ("rows", "columns", "blocks"),
    [(1, 1, 1), (16, 1024, 1), (17, 1024, 2), (8, 1025, 1), (5, 16_384, 5), (3, 1 << 18, 3)],
)
def test_rows_are_shared_out_by_their_chunks(rows, columns, blocks):
    assert cuda_jobs.row_blocks(rows, columns) == blocks


def test_rows_that_are_too_long_are_refused():
    with pytest.raises(ValueError, match="262,144"):
        cuda_jobs.row_blocks(1, (1 << 18) + 1)
    patch = Patch(1, (1 << 18) + 1, 1, b"", "F32", b"", "F32", np.empty(0), np.empty(0), np.empty(0))
    with pytest.raises(ValueError, match="262,144"):
        cuda_jobs.gradient_blocks(patch)
