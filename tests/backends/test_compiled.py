import contextlib
import math

import numpy as np
import pytest

kernels = pytest.importorskip("gradtool.backends._kernels", reason="the compiled kernels were not built")


def arguments(pieces=((1, 0, 4),), **changed):
    """A call that works, and what a test changes about it."""
    good = {
        "block": bytearray(16),
        "pieces": np.array(pieces, np.int64),
        "factors": np.ones(1),
        "wide": None,
        "limit": math.inf,
        "term": 2,
        "drops": False,
        "sums": np.zeros(1),
        "exponents": np.zeros(1, np.int32),
        "statistics": np.zeros((1, 7), np.int64),
        "bins": None,
        "largest": None,
    }
    return list((good | changed).values())


# Outside a block of 16 bytes, or of no type.
WRONG_PIECES = [
    {"pieces": [piece]}
    for piece in ((1, 0, 5), (1, 13, 1), (1, -4, 1), (1, 0, -1), (1, 0, 2**62), (6, 0, 1), (-1, 0, 1))
]


def test_a_correct_call_works():
    kernels.run(*arguments())


@pytest.mark.parametrize(
    "wrong",
    [
        *WRONG_PIECES,
        {"sums": np.zeros(2)},
        {"sums": np.zeros(0)},
        {"exponents": np.zeros(1, np.int16)},
        {"exponents": np.zeros(2, np.int32)},
        {"statistics": np.zeros((0, 7), np.int64)},
        {"statistics": np.zeros((1, 6), np.int64)},
        {"factors": np.zeros(2)},
        {"block": bytes(16)},
        {"wide": np.zeros(3)},
        {"wide": np.zeros(4), "factors": None, "block": bytes(16)},
    ],
)
def test_no_call_reaches_outside_its_buffers(wrong):
    with pytest.raises(ValueError, match=r"needed|outside|storage type"):
        kernels.run(*arguments(**wrong))


def test_reading_needs_no_writable_block():
    kernels.run(*arguments(block=bytes(16), factors=None))


@pytest.fixture
def sixteen(tmp_path):
    """An open file of four float32."""
    (tmp_path / "file").write_bytes(np.arange(4, dtype="f4").tobytes())
    with (tmp_path / "file").open("rb") as file:
        yield file


def file_block(file, **changed):
    """A block of a file that can be read, and what a test changes about it."""
    good = {"fd": file.fileno(), "begin": 0, "nbytes": 16, "memory": bytearray(16), "report": np.zeros(3, np.int64)}
    return tuple((good | changed).values())


def test_a_correct_reading_works(sixteen):
    call = arguments(block=file_block(sixteen), factors=None)
    kernels.run(*call)
    assert (call[7].tolist(), call[9][0, 1:].tolist()) == ([14.0], [0, 0, 1, -1, 0, 0])
    assert call[9].view(np.float64)[0, 0] == 3
    nbytes, nanoseconds, problem = call[0][-1]
    assert (nbytes, problem) == (16, 0)
    assert nanoseconds >= 0


TWO_TILES = {"pieces": [(0, 0, 65_537)], "sums": np.zeros(2), "exponents": np.zeros(2, np.int32)}
WRONG_FILE_BLOCKS = [
    {"memory": bytearray(15)},
    {"nbytes": 15},
    {"nbytes": -1},
    {"begin": -1},
    {"begin": 2**63 - 16},
    {"report": np.zeros(2, np.int64)},
]


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        *(
            ({}, wrong)
            for wrong in [*WRONG_PIECES, {"sums": np.zeros(2)}, {"factors": np.ones(1)}, {"wide": np.zeros(4)}]
        ),
        *((changed, {}) for changed in WRONG_FILE_BLOCKS),
        ({"nbytes": 1 << 22}, TWO_TILES),
    ],
)
def test_no_reading_reaches_outside_its_buffers(sixteen, changed, wrong):
    with pytest.raises(ValueError, match=r"needed|outside|storage type"):
        kernels.run(*arguments(**({"block": file_block(sixteen, **changed), "factors": None} | wrong)))


@pytest.mark.parametrize("wrong", [{"memory": bytes(16)}, {"report": bytes(24)}, {"fd": "3"}])
def test_a_reading_needs_a_descriptor_and_writable_memory(sixteen, wrong):
    with pytest.raises((TypeError, BufferError)):
        kernels.run(*arguments(block=file_block(sixteen, **wrong), factors=None))


def test_what_a_call_takes_is_free_after_it_whether_it_worked_or_not(sixteen):
    for wrong in ({}, {"pieces": [(1, 0, 5)]}, {"statistics": b"read only"}):
        memory, report = bytearray(16), bytearray(24)
        block = file_block(sixteen, memory=memory, report=report)
        with contextlib.suppress(ValueError, TypeError, BufferError):
            kernels.run(*arguments(**({"block": block, "factors": None} | wrong)))
        # Not possible while a buffer is in use.
        memory.append(0)
        report.append(0)


def counting(**changed):
    """A call that counts exponents, and what a test changes about it."""
    return arguments(**({"factors": None, "bins": np.zeros(277, np.int64), "largest": np.zeros(1)} | changed))


def test_a_correct_counting_works():
    call = counting(block=np.array([1, 2, 3, 0], np.float32).tobytes())
    kernels.run(*call)
    assert (call[10][call[10] > 0].tolist(), call[11].tolist()) == ([1, 2], [3.0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"bins": np.zeros(276, np.int64)},
        {"bins": np.zeros(278, np.int64)},
        {"bins": bytes(8 * 277)},
        {"largest": np.zeros(2)},
        {"largest": np.zeros(0)},
        {"largest": bytes(8)},
        {"largest": None},
        {"pieces": [(0, 0, 2)]},
    ],
)
def test_no_counting_reaches_outside_its_buffers(wrong):
    with pytest.raises(ValueError, match="needed"):
        kernels.run(*counting(**wrong))


def addition(addends=((1, 0, 4, 0),), **changed):
    """A call of the other kernel that works, and what a test changes about it."""
    good = {
        "sums": np.zeros(4),
        "source": bytes(16),
        "addends": np.array(addends, np.int64),
        "weights": np.ones(1),
        "fresh": False,
    }
    return list((good | changed).values())


def test_a_correct_addition_works():
    kernels.add(*addition())


@pytest.mark.parametrize(
    "wrong",
    [
        {"addends": [(1, 0, 5, 0)]},
        {"addends": [(1, 4, 4, 0)]},
        {"addends": [(1, 0, 4, 1)]},
        {"addends": [(1, 0, 4, -1)]},
        {"addends": [(1, 0, 0, 5)]},
        {"addends": [(1, 0, -1, 0)]},
        {"addends": [(1, 0, 2**62, 0)]},
        {"addends": [(6, 0, 1, 0)]},
        {"weights": np.ones(2)},
    ],
)
def test_no_addition_reaches_outside_its_buffers(wrong):
    with pytest.raises(ValueError, match=r"needed|outside|storage type"):
        kernels.add(*addition(**wrong))


def trimming(addends=((1, 0, 4, 0), (1, 0, 4, 0), (1, 0, 4, 0)), **changed):
    """A call that computes a median of three, and what a test changes about it."""
    good = {
        "values": np.zeros(4),
        "source": np.arange(4, dtype="f4").tobytes(),
        "addends": np.array(addends, np.int64),
        "weights": np.ones(3),
        "count": 3,
        "dropped": 1,
        "finite": True,
        "network": np.array([(0, 1), (1, 2), (0, 1)], np.int32),
        "scratch": np.empty(4 * 128),
    }
    return list((good | changed).values())


def test_a_correct_median_works():
    call = trimming()
    kernels.trimmed_means(*call)
    assert call[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"addends": [(1, 0, 5, 0)] * 3},
        {"addends": [(1, 0, 4, 1)] * 3},
        {"addends": [(1, 0, 4, 0)] * 2, "weights": np.ones(2)},
        {"addends": [(1, 0, 4, 0), (1, 0, 4, 0), (1, 0, 3, 0)]},
        {"addends": [(1, 0, 3, 0), (1, 0, 3, 1), (1, 0, 3, 0)]},
        {"weights": np.ones(2)},
        {"count": 0},
        {"count": -3},
        {"dropped": 2},
        {"dropped": -1},
        {"network": np.array([(0, 3)], np.int32)},
        {"network": np.array([(-1, 2)], np.int32)},
        {"scratch": np.empty(4 * 128 - 1)},
    ],
)
def test_no_median_reaches_outside_its_buffers(wrong):
    with pytest.raises(ValueError, match=r"needed|outside|left|other columns"):
        kernels.trimmed_means(*trimming(**wrong))


def scaling(*pieces, factors=2, losses=None):
    """A call that scales units of three elements."""
    losses = np.zeros(2 * len(pieces) if losses is None else losses, np.int64)
    return bytearray(np.ones(4, "f4").tobytes()), np.array(pieces, np.int64), np.arange(2.0, 2.0 + factors), losses


def test_a_correct_scaling_of_units_works():
    call = scaling((1, 0, 4, 1, 3, 0))
    kernels.scale_units(*call)
    assert np.frombuffer(call[0], "f4").tolist() == [2, 2, 3, 3]
    kernels.scale_units(*scaling((1, 16, 0, 0, 1, 0), factors=0))


@pytest.mark.parametrize(
    "piece",
    [
        (1, 0, 5, 0, 5, 0),
        (6, 0, 1, 0, 1, 0),
        (1, 0, 4, 0, 0, 0),
        (1, 0, 4, 3, 3, 0),
        (1, 0, 4, -1, 3, 0),
        (1, 0, 4, 0, 1, 0),
        (1, 0, 4, 1, 2, 0),
        (1, 0, 4, 0, 3, 1),
        (1, 0, 4, 0, 3, 2),
        (1, 0, 4, 0, 3, -1),
    ],
)
def test_no_scaling_of_units_reaches_outside_its_buffers(piece):
    with pytest.raises(ValueError, match=r"needed|outside|storage type|no such unit"):
        kernels.scale_units(*scaling(piece))


@pytest.mark.parametrize("losses", [0, 1, 3])
def test_scaling_units_needs_two_losses_a_piece(losses):
    with pytest.raises(ValueError, match="two losses per piece are needed"):
        kernels.scale_units(*scaling((1, 0, 4, 1, 3, 0), losses=losses))


def test_a_level_that_the_processor_does_not_have_is_not_used():
    assert kernels.levels()[-1] == "any"
    with pytest.raises(ValueError, match="does not run the level x86-64-v9"):
        kernels.use("x86-64-v9")


def comparison(pieces=((1, 0, 4),), b_pieces=((0, 0, 4),), **changed):
    """A comparison that works, and what a test changes about it."""
    good = {
        "a": bytes(16),
        "pieces": np.array(pieces, np.int64),
        "b": bytes(32),
        "b_pieces": np.array(b_pieces, np.int64),
        "tolerances": np.zeros((len(pieces), 3)),
        "sums": np.zeros((1, 4)),
        "exponents": np.zeros((1, 3), np.int32),
        "max_abs": np.zeros(1),
        "max_rel": np.zeros(1),
        "ulps": np.zeros(1, np.uint64),
        "places": np.zeros((1, 4), np.int64),
        "counts": np.zeros((1, 7), np.int64),
    }
    return list((good | changed).values())


def test_a_correct_comparison_works():
    kernels.differences(*comparison())


def test_a_comparison_reads_files(sixteen):
    call = comparison(a=file_block(sixteen), b=np.ones(4).tobytes())
    kernels.differences(*call)
    assert call[5].tolist() == [[6.0, 14.0, 4.0, 6.0]]
    for wrong in ({}, *WRONG_FILE_BLOCKS):
        blocks = {"a": file_block(sixteen), "b": file_block(sixteen, **wrong)}
        call = comparison(**blocks, b_pieces=[(1, 0, 4)])
        if wrong:
            with pytest.raises(ValueError, match=r"needed|outside"):
                kernels.differences(*call)
        else:
            kernels.differences(*call)
            assert call[11].tolist() == [[0] * 7]
            assert [block[-1][0] for block in blocks.values()] == [16, 16]


@pytest.mark.parametrize(
    "wrong",
    [
        {"pieces": [(1, 0, 5)], "b_pieces": [(0, 0, 5)]},
        {"pieces": [(1, 4, 4)]},
        {"b_pieces": [(0, 8, 4)]},
        {"b_pieces": [(0, -8, 4)]},
        {"b_pieces": [(0, 0, 3)]},
        {"b_pieces": [(0, 0, 4), (0, 0, 4)]},
        {"pieces": [(6, 0, 1)], "b_pieces": [(0, 0, 1)]},
        {"tolerances": np.zeros((1, 2))},
        {"tolerances": np.zeros((2, 3))},
        {"sums": np.zeros((2, 4))},
        {"exponents": np.zeros((1, 2), np.int32)},
        {"max_abs": np.zeros(0)},
        {"max_rel": np.zeros(2)},
        {"ulps": np.zeros(0, np.uint64)},
        {"places": np.zeros((1, 3), np.int64)},
        {"counts": np.zeros((1, 6), np.int64)},
    ],
)
def test_no_comparison_reaches_outside_its_buffers(wrong):
    with pytest.raises(ValueError, match=r"needed|outside|storage type|as long as"):
        kernels.differences(*comparison(**wrong))


def comparing(**changed):
    """A call that compares two units of two elements, and what a test changes about it."""
    good = {
        "grads": np.array([3, 4, 0, 0], "f4").tobytes(),
        "grads_dtype": 1,
        "params": np.array([3, 4, 0, 0], "f8").tobytes(),
        "params_dtype": 0,
        "size": 2,
        "ratio": 0.5,
        "eps": 0.0,
        "unscale": 1.0,
        "factors": np.zeros(2),
    }
    return list((good | changed).values())


def test_a_correct_comparison_of_units_works():
    call = comparing()
    assert kernels.unit_factors(*call) == (1, 1, 0, -1)
    assert call[-1].tolist() == [0.5, 1]
    assert kernels.unit_factors(*comparing(grads=b"", params=b"", factors=np.zeros(0))) == (0, 0, 0, -1)
    # The reference divides these first.
    assert kernels.unit_factors(*comparing(params=np.array([1e200, 0, 0, 0]).tobytes())) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"grads": bytes(12)},
        {"params": bytes(40)},
        {"grads_dtype": -1},
        {"params_dtype": 6},
        {"size": 0},
        {"size": -2},
        {"size": 1},
        {"size": 1 << 62},
        {"factors": np.zeros(1)},
        {"factors": np.zeros(3)},
    ],
)
def test_no_comparison_of_units_reaches_outside_its_buffers(wrong):
    with pytest.raises(ValueError, match=r"needed|storage type|no such unit"):
        kernels.unit_factors(*comparing(**wrong))
