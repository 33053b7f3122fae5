"""The layer-norm kernels of every backend: against exact arithmetic, and against the reference to the last bit."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import NUMPY_TYPES, VALUE_TYPES, encode, rounded_once

from gradtool.backends.cpu import NumpyBackend
from gradtool.backends.values import Patch


def patch_of(rows, columns, x_dtype="F32", y_dtype="F32", *, inverted=False, rms=False, height=None, seed=0):
    rng = np.random.default_rng(seed)
    x = encode(rng.standard_normal(rows * columns), x_dtype)
    y_grad = encode(rng.standard_normal(rows * columns), y_dtype)
    return Patch(
        rows,
        columns,
        height or max(1, rows),
        memoryview(x.tobytes()),
        x_dtype,
        memoryview(y_grad.tobytes()),
        y_dtype,
        mean=rng.standard_normal(rows) / 10,
        inv_std_dev=rng.random(rows) + 0.5,
        scale=rng.random(columns) + 0.5,
        bias=rng.standard_normal(columns) if inverted else None,
        rms=rms,
    )


def matrix(block, dtype, patch):
    return np.frombuffer(block, NUMPY_TYPES[dtype]).astype(np.float64).reshape(patch.rows, patch.columns)


@pytest.mark.parametrize("columns", [1, 2, 5, 31, 32, 33, 64, 1023, 1024, 1025, 3000])
def test_row_sums_go_over_32_lanes_of_each_chunk(backend, columns):
    x = np.random.default_rng(1).standard_normal((3, columns))
    sums = backend.row_sums(memoryview(x.tobytes()), "F64", 3, columns, None)
    centers = np.array([0.5, -1.0, 0.0])
    squares = backend.row_sums(memoryview(x.tobytes()), "F64", 3, columns, centers)
    for row, center, plain, square in zip(x.tolist(), centers.tolist(), sums, squares, strict=True):
        assert plain == by_lanes(row)
        assert square == by_lanes([(value - center) * (value - center) for value in row])


@pytest.mark.parametrize("columns", [*range(1, 34), 63, 64, 65, 127, 128, 129])
def test_sums_of_many_short_rows(backend, columns):
    rows = 300
    x = np.random.default_rng(2).standard_normal((rows, columns))
    x[::3] = -0.0
    sums = backend.row_sums(memoryview(x.tobytes()), "F64", rows, columns, None)
    squares = backend.row_sums(memoryview(x.tobytes()), "F64", rows, columns, np.ones(rows))
    about_0 = backend.row_sums(memoryview(x.tobytes()), "F64", rows, columns, np.zeros(rows))
    assert sums.tobytes() == np.array([by_lanes(row) for row in x.tolist()]).tobytes()
    assert about_0.tolist() == [by_lanes([value * value for value in row]) for row in x.tolist()]
    assert squares.tolist() == [by_lanes([(value - 1) * (value - 1) for value in row]) for row in x.tolist()]


def by_lanes(terms):
    total = 0.0
    for start in range(0, len(terms), 1024):
        lanes = [0.0] * 32
        for i, term in enumerate(terms[start : start + 1024]):
            lanes[i % 32] += term
        while len(lanes) > 1:
            lanes = [lanes[j] + lanes[j + 1] for j in range(0, len(lanes), 2)]
        total += lanes[0]
    return total


@pytest.mark.parametrize("inverted", [False, True])
def test_the_gradients_are_those_of_exact_arithmetic(backend, inverted):
    patch = patch_of(3, 37, "F64", "F64", inverted=inverted)
    x, y_grad = matrix(patch.x, "F64", patch), matrix(patch.y_grad, "F64", patch)
    means = np.array([0.1, -0.2, 0.3]), np.array([0.5, 0.25, -1.0])
    out = memoryview(bytearray(3 * 37 * 8))
    weighted, projected = backend.layer_norm_sums(patch)
    scale_grad, bias_grad = added(backend, patch, backend.layer_norm_grads(patch, means, out, "F64"))
    exact = np.vectorize(Fraction)
    g, r = exact(patch.scale), exact(patch.inv_std_dev)[:, None]
    xh = (exact(x) - exact(patch.bias)) / g if inverted else (exact(x) - exact(patch.mean)[:, None]) * r
    dy = exact(y_grad)
    for result, expected in (
        (weighted, (dy * g).sum(axis=1)),
        (projected, (dy * g * xh).sum(axis=1)),
        (scale_grad, (dy * xh).sum(axis=0)),
        (bias_grad, dy.sum(axis=0)),
        (matrix(out, "F64", patch), r * (dy * g - exact(means[0])[:, None] - xh * exact(means[1])[:, None])),
    ):
        truth = expected.astype(np.float64)
        assert np.abs(result - truth).max() <= 1e-14 * np.abs(truth).max()


def added(backend, patch, grads):
    """The gradients of scale and bias, over all groups."""
    totals = np.zeros((2, patch.columns))
    backend.add_groups(totals, grads)
    return totals


@pytest.mark.parametrize("rms", [False, True])
def test_means_that_are_not_given_are_those_over_the_columns(backend, rms):
    patch = patch_of(5, 70, rms=rms, inverted=rms)
    given, computed = (memoryview(bytearray(350 * 8)) for _ in range(2))
    weighted, projected = backend.layer_norm_sums(patch)
    means = (np.zeros(5) if rms else weighted / 70), projected / 70
    grads = [backend.layer_norm_grads(patch, m, out, "F64") for m, out in ((means, given), (None, computed))]
    assert bytes(given) == bytes(computed)
    first, second = (added(backend, patch, sums) for sums in grads)
    assert first.tobytes() == second.tobytes()


def test_each_group_of_rows_is_summed_by_itself_and_groups_are_added_in_order(backend):
    y_grad = np.array([1.0, 1e17, -1e17, 1.0, 2.0])
    patch = patch_of(5, 1, "F64", "F64", height=2)._replace(y_grad=memoryview(y_grad.tobytes()))
    totals = np.array([[0.0], [0.25]])
    backend.add_groups(totals, backend.layer_norm_grads(patch, None, memoryview(bytearray(40)), "F64"))
    assert totals[1, 0] == ((0.25 + (1.0 + 1e17)) + (-1e17 + 1.0)) + 2.0


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_the_result_is_rounded_once_to_its_type(backend, dtype):
    # The last is beyond the smaller types.
    for factor in (1.0, 1e-3, 1e6):
        patch = patch_of(5, 70, "BF16", "F16")
        patch.inv_std_dev[:] *= factor
        means = np.zeros(5), np.zeros(5)
        wide, out = memoryview(bytearray(350 * 8)), memoryview(bytearray(350 * NUMPY_TYPES[dtype].itemsize))
        backend.layer_norm_grads(patch, means, wide, "F64")
        backend.layer_norm_grads(patch, means, out, dtype)
        assert bytes(out) == rounded_once(np.frombuffer(wide, np.float64), dtype).tobytes()


@pytest.mark.parametrize("dtype", [dtype for dtype in VALUE_TYPES if NUMPY_TYPES[dtype].itemsize < 4])
def test_the_result_is_not_rounded_to_float32_first(backend, dtype):
    """Just above and below the middle of two values, by less than float32 can tell."""
    values = np.arange(0x38, 0x40, dtype=f"u{NUMPY_TYPES[dtype].itemsize}").view(NUMPY_TYPES[dtype]).astype(np.float64)
    middles = np.outer((values[:-1] + values[1:]) / 2, [1 - 2.0**-50, 1, 1 + 2.0**-50, -1 - 2.0**-50]).ravel()
    patch = patch_of(1, middles.size, "F64", "F64", rms=True)._replace(y_grad=memoryview(middles.tobytes()))
    patch.inv_std_dev[:], patch.scale[:] = 1, 1
    out = memoryview(bytearray(middles.size * NUMPY_TYPES[dtype].itemsize))
    backend.layer_norm_grads(patch, (np.zeros(1), np.zeros(1)), out, dtype)
    assert bytes(out) == rounded_once(middles, dtype).tobytes()


@given(
    rows=st.sampled_from([0, 1, 2, 7, 64]),
    columns=st.sampled_from([0, 1, 31, 37, 1025, 2049]),
    types=st.tuples(*[st.sampled_from(VALUE_TYPES)] * 3),
    inverted=st.booleans(),
    rms=st.booleans(),
    height=st.sampled_from([1, 3, 64]),
    seed=st.integers(0, 99),
)
def test_every_backend_gives_the_bits_of_the_reference(backend, rows, columns, types, inverted, rms, height, seed):
    patch = patch_of(rows, columns, *types[:2], inverted=inverted, rms=rms, height=height, seed=seed)
    if seed % 7 == 0 and rows and columns:
        patch.mean[0] = [math.nan, math.inf][seed % 2]
        patch.scale[0] = 0.0
    answers = set()
    for tested in (NumpyBackend(), backend):
        out = memoryview(bytearray(rows * columns * NUMPY_TYPES[types[2]].itemsize))
        sums = tested.layer_norm_sums(patch)
        given = added(tested, patch, tested.layer_norm_grads(patch, sums, out, types[2]))
        first = bytes(out)
        grads = added(tested, patch, tested.layer_norm_grads(patch, None, out, types[2])) if columns else given
        plain = tested.row_sums(patch.x, patch.x_dtype, rows, columns, None)
        squares = tested.row_sums(patch.x, patch.x_dtype, rows, columns, patch.mean)
        parts = [canonical(part) for part in (*sums, given, grads, plain, squares)]
        answers.add(b"".join([first, bytes(out), *parts]))
    assert len(answers) == 1


@pytest.mark.parametrize(("rows", "columns"), [(600, 1), (513, 33), (400, 100), (40, 5000), (2, 40_000)])
@pytest.mark.parametrize("rms", [False, True])
def test_rows_that_are_summed_and_differentiated_block_by_block(backend, rows, columns, rms):
    patch = patch_of(rows, columns, "BF16", "F32", rms=rms, height=7)
    answers = set()
    for tested in (NumpyBackend(), backend):
        out = memoryview(bytearray(rows * columns * 2))
        grads = added(tested, patch, tested.layer_norm_grads(patch, None, out, "BF16"))
        answers.add(canonical(grads) + bytes(out))
    assert len(answers) == 1


def canonical(values):
    """The bits, with all NaN alike."""
    return np.where(np.isnan(values), np.nan, values).tobytes()
