"""Medians and trimmed means of gradients: against numpy on the same values, whatever the sizes, types and files."""

import math

import numpy as np
import pytest
from buffers import f32, lay_out, refused
from support import VALUE_TYPES, encode, gaussian, read, rounded_once, snapshot, write, write_index

from gradtool import BadInputError, NonFiniteError, UsageError, accumulate, tuning


def median(arrays):
    return np.median(np.stack(arrays).astype(np.float64), axis=0)


def trimmed(arrays, dropped):
    """Dropped, added in ascending order, divided."""
    rows = np.sort(np.stack(arrays).astype(np.float64), axis=0)[dropped : len(arrays) - dropped]
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total / len(rows) + 0.0


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_median_is_that_of_numpy_in_place_of_the_buffer(tmp_path, dtype, count):
    grads = [gaussian(70_001, dtype, seed=seed) for seed in range(count)]
    path, paths = lay_out(tmp_path, gaussian(70_001, "F32", seed=99), *grads)
    accumulate(paths, into=path, reduce="median", overwrite=True)
    assert np.array_equal(read(path)["a"], median(grads).astype(np.float32))


def test_a_median_is_added_to_the_buffer_with_one_rounding(tmp_path):
    old, grads = gaussian(5000, "BF16", seed=9), [gaussian(5000, "F32", seed=seed) for seed in range(4)]
    path, paths = lay_out(tmp_path, old, *grads)
    result = accumulate(paths, into=path, reduce="median")
    expected = rounded_once(old.astype(np.float64) + median(grads), "BF16")
    assert read(path)["a"].tobytes() == expected.tobytes()
    assert (result.taken, result.skipped, result.weight_sum) == (4, 0, 4.0)


@pytest.mark.parametrize("dropped", [1, 2, 4])
def test_a_trimmed_mean_drops_both_ends(tmp_path, dropped):
    grads = [gaussian(3000, "F64", seed=seed) for seed in range(9)]
    _, paths = lay_out(tmp_path, f32(0), *grads)
    accumulate(paths, output=tmp_path / "new", reduce=f"trimmed={dropped}", dtype="F64")
    assert read(tmp_path / "new")["a"].tobytes() == trimmed(grads, dropped).tobytes()


def test_trimming_all_but_one_is_the_median_and_outliers_do_not_matter(tmp_path):
    grads = [gaussian(100, "F32", seed=seed) for seed in range(5)]
    _, paths = lay_out(tmp_path, f32(0), *grads)
    accumulate(paths, output=tmp_path / "one", reduce="median")
    accumulate(paths, output=tmp_path / "two", reduce="trimmed=2")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    attacked = [write(tmp_path / "x", {"a": grads[0] * 0 + 1e30}), *paths[1:]]
    accumulate(attacked, output=tmp_path / "three", reduce="median")
    assert np.abs(read(tmp_path / "three")["a"]).max() < 1e4


def test_the_mean_and_the_sum_are_what_they_were(tmp_path):
    _, paths = lay_out(tmp_path, f32(0), *[gaussian(100, "F32", seed=seed) for seed in range(3)])
    files = {}
    for name, options in {
        "mean": {"mean": True}, "reduce": {"reduce": "mean"}, "both": {"mean": True, "reduce": "mean"},
        "sum": {}, "other": {"reduce": "SUM"},
    }.items():  # fmt: skip
        accumulate(paths, output=tmp_path / name, weight=[1, 2, 5], **options)
        files[name] = (tmp_path / name).read_bytes()
    assert files["mean"] == files["reduce"] == files["both"] != files["sum"] == files["other"]


@pytest.mark.parametrize("elements", [37, 4096, 1 << 20])
def test_the_size_of_a_window_and_the_number_of_threads_change_no_bit(tmp_path, monkeypatch, elements):
    shapes = {"a": (300, 500), "tiny": (3,), "none": (0, 4), "b": (70_000,), "scalar": ()}
    rng = np.random.default_rng(0)
    sets = [{name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()} for _ in range(6)]
    for i, one in enumerate(sets):
        half = dict(list(one.items())[:3])
        write_index(
            tmp_path / f"set{i}", {"1.safetensors": half, "2.safetensors": {k: one[k] for k in one.keys() - half}}
        )
    monkeypatch.setattr(tuning, "WINDOW_BYTES", 8 * 6 * elements)
    monkeypatch.setattr("gradtool.ops.accumulate.buffer._MIN_WINDOW", 1)
    paths = [tmp_path / f"set{i}" for i in range(6)]
    for threads in (1, 3):
        accumulate(paths, output=tmp_path / f"new{threads}", reduce="trimmed=2", threads=threads)
    found = read(tmp_path / "new1")
    assert (tmp_path / "new1").read_bytes() == (tmp_path / "new3").read_bytes()
    for name in shapes:
        assert np.array_equal(found[name], trimmed([one[name] for one in sets], 2).astype(np.float32)), name


def test_gradients_are_broadcast_and_may_be_of_any_type(tmp_path):
    grads = [encode([[1, 5, -2]], "BF16"), encode([[3], [0]], "F64"), encode(2, "F8_E5M2")]
    path, paths = lay_out(tmp_path, np.zeros((2, 3), np.float32), *grads)
    accumulate(paths, into=path, reduce="median")
    assert read(path)["a"].tolist() == [[2, 3, 2], [1, 2, 0]]


def test_each_gradient_and_the_median_may_be_clipped(tmp_path):
    path, paths = lay_out(tmp_path, f32(0, 0), f32(300, 400), f32(3, 4), f32(6, 8))
    result = accumulate(paths, into=path, reduce="median", clip_each=5, eps=0, max_norm=2.5)
    assert read(path)["a"].tolist() == [1.5, 2.0]
    assert (result.sum_norm, result.coef, result.clipped) == (5.0, 0.5, True)


def test_a_tensor_that_some_lack_has_the_median_of_the_others(tmp_path):
    old = {"a": f32(100), "b": f32(100)}
    path, paths = lay_out(tmp_path, old, {"a": f32(1), "b": f32(9)}, {"a": f32(2)}, {"a": f32(30)})
    accumulate(paths, into=path, reduce="median", missing="skip", overwrite=True)
    assert {name: array.tolist() for name, array in read(path).items()} == {"a": [2], "b": [9]}
    problems = refused(BadInputError, tmp_path, path, paths, reduce="trimmed=1", missing="skip")
    assert problems == [("too-few", "b", "buffer")]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_refused_even_where_it_would_be_dropped(tmp_path, bad):
    path, paths = lay_out(tmp_path, f32(0, 0), f32(1, bad), f32(2, 2), f32(3, 3))
    for options in (
        {"reduce": "median"},
        {"reduce": "trimmed=1", "overwrite": True},
        {"reduce": "median", "max_norm": 1},
    ):
        assert refused(NonFiniteError, tmp_path, path, paths, **({"reduce": "median"} | options)) == [
            ("nonfinite", "a", "g1")
        ]


def test_propagate_keeps_nan_and_orders_infinities(tmp_path):
    path, paths = lay_out(tmp_path, f32(0, 0, 0), f32(math.nan, math.inf, 1), f32(2, 2, -math.inf), f32(3, 3, 7))
    accumulate(paths, into=path, reduce="median", nonfinite="propagate")
    assert np.array_equal(read(path)["a"], f32(math.nan, 3, 1), equal_nan=True)


def test_skip_leaves_out_gradients_before_the_median(tmp_path):
    path, paths = lay_out(tmp_path, f32(0), f32(math.nan), f32(2), f32(4), f32(9))
    result = accumulate(paths, into=path, reduce="median", nonfinite="skip", overwrite=True)
    assert (read(path)["a"].tolist(), result.taken, result.skipped) == ([4], 3, 1)
    few = paths[:3]
    assert refused(BadInputError, tmp_path, path, few, reduce="trimmed=1", nonfinite="skip") == [
        ("too-few", "a", "buffer")
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"reduce": "median", "weight": [1, 1, 1]},
        {"reduce": "trimmed=1", "weight_key": "n"},
        {"reduce": "median", "mean": True},
        {"reduce": "sum", "mean": True},
        {"reduce": "trimmed=2"},
        {"reduce": "trimmed=1000000000000"},
        *({"reduce": text} for text in ("", "max", "trimmed", "trimmed=", "trimmed=0", "trimmed=-1", "trimmed=1.5", 3)),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(tmp_path, options):
    path, paths = lay_out(tmp_path, f32(0), f32(1), f32(2), f32(3))
    assert refused(UsageError, tmp_path, path, paths, **options)[0][0] == "usage"


def test_no_update_and_dry_run_write_nothing(tmp_path):
    path, paths = lay_out(tmp_path, f32(0), f32(1), f32(2), f32(3))
    before = snapshot(tmp_path)
    assert accumulate(paths, into=path, reduce="median", dry_run=True).norm_after == 2.0
    assert not accumulate(paths, into=path, reduce="median", update=False).updated
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("write_mode", ["replace", "inplace"])
def test_both_ways_to_write_give_the_same_bytes(tmp_path, write_mode):
    grads = [gaussian(70_000, "F32", seed=seed) for seed in range(3)]
    path, paths = lay_out(tmp_path, gaussian(70_000, "F32", seed=7), *grads)
    accumulate(paths, into=path, reduce="median", write=write_mode)
    assert np.array_equal(read(path)["a"], (gaussian(70_000, "F32", seed=7) + median(grads)).astype(np.float32))


def test_a_total_weight_is_dropped_with_a_warning(tmp_path):
    _, paths = lay_out(tmp_path, f32(0), f32(1), f32(2), metadata=[{"n": "1"}, {"n": "2"}])
    accumulate(paths, output=tmp_path / "new", weight_key="n")
    result = accumulate(paths, into=tmp_path / "new", reduce="median", overwrite=True)
    (warning,) = result.call.warnings
    assert warning.code == "weight-dropped"
    assert warning.hint is None
