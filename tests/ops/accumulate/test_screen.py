import math
from functools import partialmethod

import numpy as np
import pytest
from buffers import f32, in_parts, lay_out, refused
from support import read, write_index

from gradtool import NonFiniteError, accumulate, norm
from gradtool.engines.threads import Threads

SUM_OF_2 = {"n": "2", "gradtool.weight_key": "n", "gradtool.weighted": "sum"}


def test_clip_each_limits_each_gradient_and_weighs_it_then(tmp_path):
    path, grads = lay_out(tmp_path, f32(0, 0), f32(30, 40), f32(0.5, 0.25))
    result = accumulate(grads, into=path, clip_each=5, eps=0, weight=[-2, 4], per_gradient=True)
    assert read(path)["a"].tolist() == [-4, -7]
    assert [(row.norm, row.coef) for row in result.per_gradient] == [(50.0, 0.1), (math.sqrt(0.3125), 1.0)]
    assert (result.sum_norm, result.coef, result.clipped) == (None, None, False)


@pytest.mark.parametrize("engine", ["threads", "parts"])
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_each": math.inf}, {"nonfinite": "skip"}, {"reduce": "median"}, {"overwrite": True}, {"weight": [-3]}],
    ids=str,
)
def test_the_norm_of_a_gradient_is_that_of_what_it_adds_whatever_the_options(tmp_path, monkeypatch, options, engine):
    if engine == "parts":
        monkeypatch.setattr(Threads, "run", partialmethod(in_parts, Threads.run))
    old = {"a": f32(0, 0), "b": np.zeros((3, 4), np.float32), "c": np.zeros((2, 1), np.float32)}
    path, grads = lay_out(tmp_path, old, {"a": f32(1, 2), "b": f32(1, 2, 3, 4), "c": np.array([[5.0]])})
    norms = {1.0: 3 + 30 + 10, 2.0: math.sqrt(5 + 90 + 50), 3.0: (9 + 300 + 250) ** (1 / 3), math.inf: 5}
    for order, value in norms.items():
        rows = accumulate(grads, into=path, norm_type=order, per_gradient=True, dry_run=True, **options).per_gradient
        assert [row.norm for row in rows] == [pytest.approx(value, rel=1e-15)]


def test_what_a_broadcast_gradient_adds_is_within_clip_each(tmp_path):
    path, grads = lay_out(tmp_path, np.zeros((4, 25)), np.ones(25))
    result = accumulate(grads, into=path, clip_each=6, eps=0, per_gradient=True)
    assert [(row.norm, row.coef) for row in result.per_gradient] == [(10.0, 0.6)]
    assert result.norm_after == pytest.approx(6, rel=1e-15)
    # The gradient of a sum is what it stands for, divided by its weight.
    path, grads = lay_out(tmp_path, np.zeros((4, 25)), np.ones(25), metadata=[SUM_OF_2])
    result = accumulate(grads, into=path, clip_each=3, eps=0, per_gradient=True, weight_key="n")
    assert [(row.norm, row.coef) for row in result.per_gradient] == [(5.0, 0.6)]


def test_the_norm_of_each_gradient_is_that_of_its_set(tmp_path):
    path, _ = lay_out(tmp_path, {"a": f32(0), "b": f32(0)})
    write_index(tmp_path / "g", {"1.safetensors": {"a": f32(3)}, "2.safetensors": {"b": f32(4)}})
    result = accumulate(tmp_path / "g", into=path, clip_each=2.5, eps=0, per_gradient=True)
    assert (result.per_gradient[0].norm, result.per_gradient[0].coef, result.norm_after) == (5.0, 0.5, 2.5)


def test_a_nan_is_named_with_its_file_and_nothing_is_written(tmp_path):
    path, grads = lay_out(
        tmp_path, {"a": f32(1), "b": f32(math.nan)}, {"a": f32(1), "b": f32(1)}, {"a": f32(math.inf), "b": f32(1)}
    )
    for options in ({}, {"dry_run": True}, {"max_norm": 1}, {"weight": [0, 0]}):
        assert sorted(refused(NonFiniteError, tmp_path, path, grads, **options)) == [
            ("nonfinite", "a", "g2"), ("nonfinite", "b", "buffer"),
        ]  # fmt: skip
    assert refused(NonFiniteError, tmp_path, path, grads, clip_each=1) == [("nonfinite", "a", "g2")]


def test_skip_leaves_out_a_whole_gradient_and_says_which(tmp_path):
    path, grads = lay_out(
        tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(7), "b": f32(math.nan)}, {"a": f32(2), "b": f32(3)}
    )
    result = accumulate(grads, into=path, nonfinite="skip", weight=[10, 2], mean=True, per_gradient=True)
    assert {name: array.tolist() for name, array in read(path).items()} == {"a": [3], "b": [4]}
    assert (result.taken, result.skipped, result.weight_sum) == (1, 1, 2)
    assert [(row.taken, row.nan, row.inf) for row in result.per_gradient] == [(False, 1, 0), (True, 0, 0)]
    assert result.per_gradient[1].norm == norm(grads[1]).norm
    (warning,) = result.call.warnings
    assert (warning.code, warning.file, warning.tensor) == ("skipped", str(grads[0]), "b")
    assert "skipped: 1 NaN, 0 Inf, the first at [0]" in warning.message


def test_skipping_every_gradient_is_an_error_and_so_is_a_nan_in_the_buffer(tmp_path):
    path, grads = lay_out(tmp_path, f32(math.nan), f32(math.inf), f32(1))
    assert refused(NonFiniteError, tmp_path, path, grads[:1], nonfinite="skip") == [("nonfinite", "a", "g1")]
    assert refused(NonFiniteError, tmp_path, path, grads, nonfinite="skip") == [("nonfinite", "a", "buffer")]
    accumulate(grads, into=path, nonfinite="skip", overwrite=True)
    assert read(path)["a"].tolist() == [1]
