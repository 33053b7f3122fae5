"""`accumulate --into-weight`: the buffer's old content is multiplied in the same pass, before the one rounding."""

import json
import math
import shutil

import numpy as np
import pytest
from buffers import f32, lay_out, refused
from support import (
    VALUE_TYPES,
    encode,
    gaussian,
    gradtool,
    gradtool_json,
    read,
    rounded_once,
    snapshot,
    write,
    write_index,
)

from gradtool import BadInputError, NonFiniteError, UsageError, accumulate

# Momentum, a moving average, and linear interpolation.
USES = {
    "momentum": (0.9, 1.0),
    "average": (0.999, 0.001),
    "lerp": (0.75, 0.25),
    "descent": (1.0, -0.1),
    "sign": (-2.0, 1),
}


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("use", USES)
def test_the_float64_formula_is_rounded_once(tmp_path, use, dtype):
    weight, rate = USES[use]
    old, grads = gaussian(70_001, dtype, seed=1), [gaussian(70_001, "BF16", seed=seed) for seed in (2, 3)]
    path, paths = lay_out(tmp_path, old, *grads)
    result = accumulate(paths, into=path, into_weight=weight, weight=[rate, 0.3], nonfinite="propagate")
    wide = weight * old.astype(np.float64) + rate * grads[0].astype(np.float64)
    expected = rounded_once(wide + 0.3 * grads[1].astype(np.float64), dtype)
    assert read(path)["a"].tobytes() == expected.tobytes()
    assert result.into_weight == weight


def test_steps_of_momentum_by_hand(tmp_path):
    path, grads = lay_out(tmp_path, f32(0, 0), f32(1, -2), f32(0.5, 4))
    for grad in (*grads, grads[0]):
        accumulate(grad, into=path, into_weight=0.5)
    # 1, 0.5 + 0.5, 0.5 + 1; and -2, -1 + 4, 1.5 - 2.
    assert read(path)["a"].tolist() == [1.5, -0.5]


def test_the_product_is_not_rounded_to_the_type_before_the_sum(tmp_path):
    # 0.75 · (1 + 2^-7) is 193.5 / 256, a tie of BF16 that would become 194; less an eighth, the sum would be 194 again.
    path, grads = lay_out(tmp_path, encode([1 + 2**-7], "BF16"), f32(-0.125 / 256))
    accumulate(grads, into=path, into_weight=0.75)
    assert read(path)["a"].astype(float).tolist() == [193 / 256]


def test_one_is_as_without_it(tmp_path):
    tensors = {dtype: gaussian(3000, dtype, seed=5) for dtype in VALUE_TYPES} | {"odd": f32(-0.0, 0.0)}
    path, (grad,) = lay_out(tmp_path, tensors, {name: gaussian(array.size, "F32") for name, array in tensors.items()})
    for name, weight in (("without", None), ("with", 1)):
        options = {"max_norm": 40, "unscale": 3, "into_weight": weight}
        accumulate(grad, into=path, output=tmp_path / name, **options)
    assert (tmp_path / "with").read_bytes() == (tmp_path / "without").read_bytes()


@pytest.mark.parametrize("zero", [0, -0.0])
def test_zero_drops_the_old_content_even_nan_as_overwrite_does(tmp_path, zero):
    path, grads = lay_out(tmp_path, f32(math.nan, math.inf, 5), f32(1, 2, -0.0))
    results = [
        accumulate(grads, into=path, output=tmp_path / name, **options)
        for name, options in (("zero", {"into_weight": zero}), ("overwrite", {"overwrite": True}))
    ]
    assert (tmp_path / "zero").read_bytes() == (tmp_path / "overwrite").read_bytes()
    assert [(result.norm_before, result.into_weight) for result in results] == [(None, 0.0)] * 2
    refused(NonFiniteError, tmp_path, path, grads, into_weight=1e-300)


def test_means_medians_and_loss_scales_are_about_the_gradients_alone(tmp_path):
    path, grads = lay_out(tmp_path, f32(8), f32(1), f32(3), f32(11))
    for options, expected in (
        ({"mean": True}, 4 + 5),
        ({"mean": True, "weight": [2, 1, 1]}, 4 + 4),
        ({"reduce": "median"}, 4 + 3),
        ({"reduce": "trimmed=1"}, 4 + 3),
        ({"unscale": 2}, 4 + 7.5),
        ({"mean": True, "unscale": 4}, 4 + 1.25),
        ({"clip_each": 2, "eps": 0}, 4 + 5),
        ({"max_norm": 3.8, "eps": 0}, np.float32(19 * (3.8 / 19))),
    ):
        result = accumulate(grads, into=path, into_weight=0.5, output=tmp_path / "new", **options)
        assert read(tmp_path / "new")["a"].tolist() == [expected], options
        assert (result.norm_before, result.sum_norm) == (8.0, 19.0 if "max_norm" in options else None)
    assert read(path)["a"].tolist() == [8]


@pytest.mark.parametrize(("missing", "only"), [("skip", 6), ("zero", 3)])
def test_a_tensor_that_no_gradient_has_is_multiplied_if_it_counts_as_zeros(tmp_path, missing, only):
    path, grads = lay_out(tmp_path, {"a": f32(4), "only": f32(6), "not": f32(9)}, {"a": f32(1)}, {"a": f32(1)})
    accumulate(grads, into=path, into_weight=0.5, missing=missing, exclude=["not"])
    assert {name: values.tolist() for name, values in read(path).items()} == {"a": [4], "only": [only], "not": [9]}


def test_a_skipped_gradient_leaves_the_rest_of_the_formula(tmp_path):
    path, grads = lay_out(tmp_path, f32(4), f32(math.nan), f32(1))
    assert accumulate(grads, into=path, into_weight=0.5, nonfinite="skip").skipped == 1
    assert read(path)["a"].tolist() == [3]
    assert accumulate(grads, into=path, into_weight=0.5, update=False).updated is False
    assert accumulate(grads, into=path, into_weight=0.5, screen=["finite"]).skipped == 1
    assert read(path)["a"].tolist() == [2.5]


def test_a_product_beyond_the_type_is_an_error(tmp_path):
    path, grads = lay_out(tmp_path, encode([60_000], "F16"), f32(1))
    assert refused(NonFiniteError, tmp_path, path, grads, into_weight=2) == [("overflow", "a", "buffer")]
    path, grads = lay_out(tmp_path, np.array([1e300]), np.array([1.0]))
    assert refused(NonFiniteError, tmp_path, path, grads, into_weight=-1e300) == [("overflow", "a", "buffer")]


def test_sharded_sets_and_all_ways_to_write_give_the_same_values(tmp_path):
    tensors = {name: gaussian(size, "BF16", seed=size) for name, size in (("a", 70_000), ("b", 9), ("c", 300))}
    write(tmp_path / "one" / "x.safetensors", tensors)
    names = dict(zip(("1.safetensors", "2.safetensors"), (("a", "c"), ("b",)), strict=True))
    write_index(tmp_path / "shards", {file: {name: tensors[name] for name in each} for file, each in names.items()})
    shutil.copytree(tmp_path / "shards", tmp_path / "changed")
    grad = write(tmp_path / "grad", {name: gaussian(array.size, "F32") for name, array in tensors.items()})
    options = {"into_weight": 0.999, "weight": 0.001}
    before = snapshot(tmp_path)
    dry = accumulate(grad, into=tmp_path / "shards", dry_run=True, **options)
    assert snapshot(tmp_path) == before
    accumulate(grad, into=tmp_path / "shards", output_dir=tmp_path / "new", **options)
    for folder, how in (("one", {}), ("shards", {}), ("changed", {"write": "inplace"})):
        result = accumulate(grad, into=tmp_path / folder, **options, **how)
        assert (result.norm_before, result.norm_after) == (dry.norm_before, dry.norm_after)
    whole = read(tmp_path / "one" / "x.safetensors")
    for folder in ("shards", "changed", "new"):
        for file, each in names.items():
            found = read(tmp_path / folder / file)
            assert {name: array.tobytes() for name, array in found.items()} == {
                name: whole[name].tobytes() for name in each
            }


SUM = {"gradtool.weight_key": "n", "gradtool.weighted": "sum"}


def metadata_of(path):
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})


def test_the_total_of_a_sum_is_multiplied_with_its_content(tmp_path):
    grads = [write(tmp_path / f"g{n}", {"a": f32(value)}, {"n": str(n)}) for n, value in ((3, 2), (1, 6))]
    path = tmp_path / "sum"
    accumulate(grads[0], output=path, weight_key="n")
    result = accumulate(grads[1], into=path, weight_key="n", into_weight=0.5)
    # 0.5 · 3 · 2 + 1 · 6, of the weight 0.5 · 3 + 1.
    assert (read(path)["a"].tolist(), metadata_of(path), result.call.warnings) == ([9], {"n": "2.5"} | SUM, ())
    accumulate(path, output=tmp_path / "mean", weight_key="n", mean=True)
    assert read(tmp_path / "mean")["a"].tolist() == f32(9 / 2.5).tolist()
    huge = write(tmp_path / "huge", {"a": f32(0)}, {"n": "1e308"})
    assert accumulate(huge, into=path, into_weight=0, weight_key="n").call.warnings == ()
    assert metadata_of(path) == {"n": "1e+308"} | SUM
    assert refused(BadInputError, tmp_path, path, grads[0], into_weight=10, weight_key="n") == [("weight", None, None)]


@pytest.mark.parametrize("options", [{"mean": True, "weight_key": "n"}, {"weight": [4]}, {"reduce": "median"}])
def test_a_total_that_is_no_longer_true_is_dropped_with_a_warning(tmp_path, options):
    grad = write(tmp_path / "g", {"a": f32(2)}, {"n": "3"})
    accumulate(grad, output=tmp_path / "sum", weight_key="n")
    (warning,) = accumulate(grad, into=tmp_path / "sum", into_weight=0.5, **options).call.warnings
    assert (warning.code, metadata_of(tmp_path / "sum")) == ("weight-dropped", {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"into": None}, "into_weight requires into, whose old content it multiplies"),
        ({"overwrite": True}, "overwrite and into_weight exclude each other"),
        ({"into_weight": math.inf}, "into_weight must be finite, not inf"),
        ({"into_weight": math.nan}, "into_weight must be finite, not nan"),
        ({"into_weight": "0.9"}, "into_weight must be a number, not '0.9'"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(tmp_path, options, message):
    path, grads = lay_out(tmp_path, f32(1), f32(2))
    options = {"into": path, "into_weight": 0.5, "output": tmp_path / "new"} | options
    with pytest.raises(UsageError) as caught:
        accumulate(grads, **options)
    assert (str(caught.value), (tmp_path / "new").exists()) == (message, False)


def test_the_command_takes_it(tmp_path):
    path, grads = lay_out(tmp_path, f32(0, 10), f32(30, 40))
    done = gradtool_json("accumulate", *grads, "--into", path, "--into-weight", "0.9", "--weight", "0.1")
    assert (done["data"]["into_weight"], read(path)["a"].tolist()) == (0.9, [3, 13])
    done = gradtool("accumulate", *grads, "--output", tmp_path / "x", "--into-weight", "1")
    assert done.stderr == "gradtool: error: --into-weight requires --into, whose old content it multiplies\n"
    assert done.returncode == 2
