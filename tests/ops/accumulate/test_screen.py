import math

from buffers import f32, lay_out, refused
from support import read, write_index

from gradtool import NonFiniteError, accumulate, norm


def test_clip_each_limits_each_gradient_and_weighs_it_then(tmp_path):
    path, grads = lay_out(tmp_path, f32(0, 0), f32(30, 40), f32(0.5, 0.25))
    result = accumulate(grads, into=path, clip_each=5, eps=0, weight=[-2, 4], per_gradient=True)
    assert read(path)["a"].tolist() == [-4, -7]
    assert [(row.norm, row.coef) for row in result.per_gradient] == [(50.0, 0.1), (math.sqrt(0.3125), 1.0)]
    assert (result.sum_norm, result.coef, result.clipped) == (None, None, False)


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
    (warning,) = result.warnings
    assert (warning.code, warning.file, warning.tensor) == ("skipped", str(grads[0]), "b")
    assert "skipped: 1 NaN, 0 Inf, the first at index 0" in warning.message


def test_skipping_every_gradient_is_an_error_and_so_is_a_nan_in_the_buffer(tmp_path):
    path, grads = lay_out(tmp_path, f32(math.nan), f32(math.inf), f32(1))
    assert refused(NonFiniteError, tmp_path, path, grads[:1], nonfinite="skip") == [("nonfinite", "a", "g1")]
    assert refused(NonFiniteError, tmp_path, path, grads, nonfinite="skip") == [("nonfinite", "a", "buffer")]
    accumulate(grads, into=path, nonfinite="skip", overwrite=True)
    assert read(path)["a"].tolist() == [1]
