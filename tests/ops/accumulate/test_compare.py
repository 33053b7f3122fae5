"""The cosine and the distance of each gradient to the result, against numpy."""

import math

import numpy as np
import pytest
from buffers import f32, lay_out
from support import gaussian, write

from gradtool import accumulate, diff


@pytest.mark.parametrize("reduce", ["sum", "mean", "median", "trimmed=1"])
def test_the_distance_is_that_of_the_gradient_without_its_weight(tmp_path, reduce):
    grads = [np.random.default_rng(seed).standard_normal(70_001) + 0.3 for seed in range(5)]
    path, paths = lay_out(tmp_path, gaussian(70_001, "F32"), *grads)
    stack = np.stack(grads)
    result = {
        "sum": stack.sum(axis=0),
        "mean": stack.mean(axis=0),
        "median": np.median(stack, axis=0),
        "trimmed=1": np.sort(stack, axis=0)[1:-1].mean(axis=0),
    }[reduce]
    rows = accumulate(paths, into=path, reduce=reduce, per_gradient=True, max_norm=1).per_gradient
    for row, grad in zip(rows, grads, strict=True):
        norms = np.linalg.norm(grad) * np.linalg.norm(result)
        assert row.norm == pytest.approx(np.linalg.norm(grad), rel=1e-13)
        assert row.distance == pytest.approx(np.linalg.norm(grad - result), rel=1e-13)
        assert row.cosine == pytest.approx(np.dot(grad, result) / norms, abs=1e-14)


def test_weights_count_in_the_result_only(tmp_path):
    path, paths = lay_out(tmp_path, f32(0, 0), f32(3, 0), f32(0, 4))
    rows = accumulate(paths, into=path, weight=[2, -1], per_gradient=True).per_gradient
    # The sum is (6, -4).
    assert [row.distance for row in rows] == [5.0, 10.0]
    assert [row.cosine for row in rows] == pytest.approx([6 / math.sqrt(52), -4 / math.sqrt(52)], abs=1e-15)


@pytest.mark.parametrize("total", [-3.0, 49.0, 7e-311])
def test_a_sum_is_compared_as_the_mean_that_it_stands_for(tmp_path, total):
    marks = {"n": repr(total), "gradtool.weight_key": "n", "gradtool.weighted": "sum"}
    path = write(tmp_path / "sum", {"w": f32(1e-5, 2e-5, 7e-5)}, marks)
    options = {"weight_key": "n", "mean": True, "dtype": "F64", "per_gradient": True}
    row = accumulate(path, output=tmp_path / "mean", **options).per_gradient[0]
    assert (row.cosine, row.distance) == (1.0, 0.0)


def test_what_a_gradient_lacks_counts_as_zeros_and_a_skipped_one_has_none(tmp_path):
    path, _ = lay_out(tmp_path, {"a": f32(0), "b": f32(0)})
    one = write(tmp_path / "one", {"a": f32(3), "b": f32(4)})
    two = write(tmp_path / "two", {"a": f32(3)})
    bad = write(tmp_path / "bad", {"a": f32(math.nan), "b": f32(0)})
    options = {"missing": "skip", "nonfinite": "skip", "per_gradient": True, "reduce": "median"}
    rows = accumulate([one, bad, two], into=path, **options).per_gradient
    assert [row.distance for row in rows] == [0.0, None, 4.0]
    assert [row.cosine for row in rows] == [1.0, None, pytest.approx(0.6, abs=1e-15)]


def test_zeros_have_the_cosines_of_diff(tmp_path):
    path, paths = lay_out(tmp_path, f32(0), f32(0), f32(1))
    rows = accumulate(paths, into=path, per_gradient=True).per_gradient
    assert [(row.cosine, row.distance) for row in rows] == [(0.0, 1.0), (1.0, 0.0)]
    rows = accumulate(paths[:1], into=path, per_gradient=True).per_gradient
    assert [(row.cosine, row.distance) for row in rows] == [(1.0, 0.0)]


@pytest.mark.parametrize("scale", [1e18, 1e200, 1e-300])
def test_a_gradient_much_smaller_than_the_result_has_its_cosine(tmp_path, scale):
    large, small = np.array([scale, 0.0]), np.array([scale / 1e18, scale / 1e18])
    path, paths = lay_out(tmp_path, large * 0, large, small)
    rows = accumulate(paths, into=path, per_gradient=True).per_gradient
    assert [row.cosine for row in rows] == pytest.approx([1, math.sqrt(0.5)], abs=1e-15)
    # The result is that of float64, (scale, scale / 1e18).
    assert [row.distance for row in rows] == pytest.approx([scale / 1e18, scale], rel=1e-15)


def test_the_cosine_and_the_distance_are_those_of_diff(tmp_path):
    values = gaussian(70_001, "F32"), gaussian(70_001, "F32", seed=2) / 512
    path, paths = lay_out(tmp_path, np.zeros(70_001), *values)
    rows = accumulate(paths, into=path, per_gradient=True, overwrite=True).per_gradient
    for row, grad in zip(rows, paths, strict=True):
        assert row.cosine == diff(grad, path).cosine
        assert row.norm == diff(grad, path).norm_a
        assert row.distance == pytest.approx(diff(grad, path).rel_l2 * diff(grad, path).norm_b, rel=1e-15)


def test_with_nan_and_inf_neither_can_be_told(tmp_path):
    path, paths = lay_out(tmp_path, f32(0, 0), f32(1, math.nan), f32(1, math.inf))
    rows = accumulate(paths, into=path, per_gradient=True, nonfinite="propagate").per_gradient
    assert all(math.isnan(value) for row in rows for value in (row.cosine, row.distance))
    assert [(row.nan, row.inf) for row in rows] == [(1, 0), (0, 1)]


def test_threads_change_no_bit_and_orthogonal_vectors_have_the_cosine_0(tmp_path):
    path, paths = lay_out(tmp_path, gaussian(200_000, "F32"), *[gaussian(200_000, "BF16", seed=i) for i in range(3)])
    one, many = (
        accumulate(paths, into=path, per_gradient=True, dry_run=True, reduce="median", threads=threads).per_gradient
        for threads in (1, 4)
    )
    assert one == many
    path, paths = lay_out(tmp_path, f32(0, 0), f32(1, 0), f32(-1, 1))
    assert accumulate(paths, into=path, per_gradient=True).per_gradient[0].cosine == pytest.approx(0, abs=1e-15)
