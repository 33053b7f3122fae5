"""The gradients of layers against the formula, as a user calls it; its kernels are tested in backends/."""

import itertools
import math

import numpy as np
import pytest
from layers import FORMS, KNOWN, OUTPUTS, assert_all, gradients, layer, reference
from support import SAMPLES, VALUE_TYPES, read, write

from gradtool import layernorm_backward, norm, tuning

# The known results are given to twelve decimals, of which the last is off by up to 1.4.
DECIMALS = 2e-12
# Central differences with a step of 1e-5: their error is about its square times a third derivative of a few tens.
DIFFERENCES = 2e-8
KNOWN_RESULTS = {
    "layernorm": {
        "X_grad": [
            [0.804984203557, 0.156525116188, -2.727993004462, 1.766483684718],
            [0.270173135365, -0.187044410637, 0.145480048272, -0.228608773001],
        ],
        "scale_grad": [-1.761906122033, -0.207441240573, -2.160623940424, 0.444517696197],
        "bias_grad": [1.5, 0, 0, 0.75],
    },
    "rmsnorm": {
        "X_grad": [
            [0.298204150554, 0.048686108752, -1.113702253647, 0.736381441920],
            [0.632923065246, 0.182574064119, 0.121717827912, 0.012172318341],
        ],
        "scale_grad": [-0.182574064119, -0.730296256476, -1.460592512953, 0.730296256476],
    },
}


@pytest.mark.parametrize("invertible", [False, True])
@pytest.mark.parametrize("kind", KNOWN_RESULTS)
def test_a_known_result(tmp_path, kind, invertible):
    tensors, rms = dict(KNOWN), kind == "rmsnorm"
    if invertible:
        x = tensors.pop("X")
        mean = 0 * x if rms else x.mean(axis=1, keepdims=True)
        tensors["inv_std_dev"] = 1 / np.sqrt(((x - mean) ** 2).mean(axis=1) + 1e-5)
        tensors["bias"] = np.array([0.1, 0.2, 0.3, 0.4])
        xh = (x - mean) * tensors["inv_std_dev"][:, None]
        tensors["Y"] = xh * tensors["scale"] + (0 if rms else tensors["bias"])
    path = write(tmp_path / "x", tensors)
    layernorm_backward(path, kind=kind, invertible=invertible)
    found = gradients(path)
    assert list(found) == list(KNOWN_RESULTS[kind])
    for name, values in KNOWN_RESULTS[kind].items():
        assert found[name] == pytest.approx(np.array(values), abs=DECIMALS)


@pytest.mark.parametrize("form", ["layernorm", "layernorm, invertible"])
def test_the_sample_is_what_torch_makes_of_it(tmp_path, form):
    result = layernorm_backward(SAMPLES / "layernorm.safetensors", output=tmp_path / "out", **FORMS[form])
    (row,) = result.per_layer
    assert (row.name, row.shape, row.rows, row.columns) == ("blocks.0.norm", (4, 16, 40), 64, 40)
    found, expected = read(tmp_path / "out"), read(SAMPLES / "layernorm_expected.safetensors")
    for name in OUTPUTS:
        truth = expected[f"blocks.0.norm.{name}_f64"]
        # Torch's statistics and output, which we read, are stored in float32; those in its formula are float64.
        slack = 5e-7 * np.abs(truth).max()
        assert np.abs(found[f"blocks.0.norm.{name}"] - truth).max() <= slack


def forward(x, scale, bias, kind):
    mean = 0.0 if kind == "rmsnorm" else x.mean(axis=1, keepdims=True)
    r = 1 / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    return (x - mean) * r * scale + bias, r


@pytest.mark.parametrize("form", FORMS)
def test_the_gradients_are_the_slopes_of_the_forward_pass(tmp_path, form):
    kind = FORMS[form]["kind"]
    rng = np.random.default_rng(4)
    x, y_grad = rng.standard_normal((3, 5)), rng.standard_normal((3, 5))
    inputs = {"X_grad": x, "scale_grad": rng.random(5) + 0.5, "bias_grad": rng.standard_normal(5)}
    if kind == "rmsnorm":
        inputs["bias_grad"] = np.zeros(5)
    y, r = forward(*inputs.values(), kind)
    tensors = {"Y_grad": y_grad, "X": x, "Y": y, "inv_std_dev": r}
    path = write(tmp_path / "x", tensors | {"scale": inputs["scale_grad"], "bias": inputs["bias_grad"]})
    layernorm_backward(path, **FORMS[form])
    for name, found in gradients(path).items():
        slopes = np.zeros(inputs[name].size)
        for at, step in itertools.product(range(slopes.size), (1e-5, -1e-5)):
            moved = {key: value.copy() for key, value in inputs.items()}
            moved[name].flat[at] += step
            slopes[at] += (forward(*moved.values(), kind)[0] * y_grad).sum() / step / 2
        assert found.ravel() == pytest.approx(slopes, abs=DIFFERENCES)


@pytest.mark.parametrize("form", FORMS)
def test_every_mix_of_types_gives_the_formula_rounded_once_and_all_layers_are_done(tmp_path, form):
    mixes = {".".join(types) + ".": types for types in itertools.product(VALUE_TYPES, repeat=3)}
    layers = {prefix: layer((5, 7), types=types, seed=1) for prefix, types in mixes.items()}
    path = write(
        tmp_path / "x", {prefix + name: array for prefix, one in layers.items() for name, array in one.items()}
    )
    result = layernorm_backward(path, output=tmp_path / "out", fsync=False, **FORMS[form])
    assert [f"{row.name}." for row in result.per_layer] == list(mixes)
    found = read(tmp_path / "out")
    for prefix, types in mixes.items():
        expected = reference(layers[prefix], **FORMS[form])
        mine = {name: found.pop(prefix + name) for name in expected}
        assert_all(mine, expected, types[2 if FORMS[form]["invertible"] else 0], types[2])
    assert not found


SHAPES = [
    ((4, 20, 128), -1),
    ((4, 20, 16, 8), -2),
    ((8, 80, 768), 1),
    ((8, 80, 768), -1),
    ((13, 1), -1),
    ((37,), 0),
    ((1, 1), -1),
    ((7, 199), -1),
    ((2, 3, 5), -3),
    ((3, 31, 11), -2),
]


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_shape_axis_and_form_gives_the_formula(tmp_path, form, statistics):
    for shape, axis in SHAPES:
        tensors = layer(shape, axis, statistics=statistics or FORMS[form]["invertible"])
        path = write(tmp_path / "x", tensors)
        layernorm_backward(path, axis=axis, fsync=False, **FORMS[form])
        assert_all(gradients(path), reference(tensors, axis=axis, **FORMS[form]), "F32", "F32")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0, 7), (5, 0), (0, 0), (3, 0, 4)])
def test_no_rows_or_no_columns_are_fine(tmp_path, form, shape):
    path = write(tmp_path / "x", layer(shape))
    (row,) = layernorm_backward(path, **FORMS[form]).per_layer
    found = gradients(path)
    assert {name: array.shape for name, array in found.items()} == {
        name: shape if name == "X_grad" else shape[-1:] for name in found
    }
    assert not any(array.any() for array in found.values())
    assert (row.x_grad_norm, row.scale_grad_norm, row.bias_grad_norm or 0.0) == (0, 0, 0)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_for_any_number_of_threads(tmp_path, monkeypatch, form):
    monkeypatch.setattr(tuning, "PATCH_ELEMENTS", 1 << 14)
    narrow, wide = layer((1501, 701), types=("F64",) * 3), layer((23, 33_001), types=("F32",) * 3, prefix="wide.")
    path = write(tmp_path / "x", narrow | wide)
    answers = set()
    for threads in (1, 2, 5, 16):
        result = layernorm_backward(path, threads=threads, output=tmp_path / "out", fsync=False, **FORMS[form])
        norms = [(row.x_grad_norm, row.scale_grad_norm, row.bias_grad_norm) for row in result.per_layer]
        answers.add(((tmp_path / "out").read_bytes(), str(norms)))
    assert len(answers) == 1


def norms_of_file(path):
    return {row.name: row.norm for row in norm(path, per_tensor=True).per_tensor}


def norms_of_result(result):
    return {
        f"{row.name}.{name}": value
        for row in result.per_layer
        for name, value in zip(OUTPUTS, (row.x_grad_norm, row.scale_grad_norm, row.bias_grad_norm), strict=True)
        if value is not None
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1.0, 1e200, 1e-200])
def test_the_norms_are_those_of_what_was_written(tmp_path, form, size):
    layers = [layer((9, 70), types=("F64",) * 3, prefix="a."), layer((300, 701), types=("F64",) * 3, prefix="b.")]
    tensors = layers[0] | layers[1]
    for prefix in ("a.", "b."):
        tensors[f"{prefix}Y_grad"] = tensors[f"{prefix}Y_grad"] * size
    path = write(tmp_path / "x", tensors)
    result = layernorm_backward(path, output=tmp_path / "out", **FORMS[form])
    assert norms_of_result(result) == norms_of_file(tmp_path / "out")
    assert min(norms_of_result(result).values()) > size / 1000
    dry = layernorm_backward(path, dry_run=True, **FORMS[form])
    assert norms_of_result(dry) == norms_of_result(result)
    assert (dry.output.files_written, dry.output.bytes_written, dry.output.dry_run) == (0, 0, True)


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_the_norms_of_every_type_are_those_of_what_was_written(tmp_path, dtype):
    path = write(tmp_path / "x", layer((300, 701), types=(dtype, "F32", "F32"), prefix="a."))
    assert norms_of_result(layernorm_backward(path, output=tmp_path / "out")) == norms_of_file(tmp_path / "out")


@pytest.mark.parametrize("form", FORMS)
def test_the_offset_is_added_to_the_scale(tmp_path, form):
    plain = layer((6, 9), types=("F64",) * 3)
    for name, tensors in (("plain", plain), ("less", plain | {"scale": plain["scale"] - 1})):
        layernorm_backward(write(tmp_path / name, tensors), scale_offset=float(name == "less"), **FORMS[form])
    for name, expected in gradients(tmp_path / "plain").items():
        # A weight of gamma - 1 is itself rounded.
        assert gradients(tmp_path / "less")[name] == pytest.approx(expected, rel=1e-13, abs=1e-13)


def test_the_eps_counts_where_the_statistics_are_computed_and_nowhere_else(tmp_path):
    for statistics, differs in ((False, True), (True, False)):
        tensors = layer((6, 9), statistics=statistics)
        path = write(tmp_path / "x", tensors)
        layernorm_backward(path, norm_eps=0.5)
        assert_all(gradients(path), reference(tensors, norm_eps=0.5, **FORMS["layernorm"]), "F32", "F32")
        layernorm_backward(write(tmp_path / "y", tensors))
        assert (gradients(path)["X_grad"].tolist() != gradients(tmp_path / "y")["X_grad"].tolist()) is differs


@pytest.mark.parametrize("power", [200, -200])
@pytest.mark.parametrize("options", [{}, {"x_grad_in_place": True}])
def test_extreme_gradients_have_their_norms_in_place(tmp_path, power, options):
    tensors = layer((5, 7), types=("F64", "F64", "F64"))
    tensors["Y_grad"] *= 10.0**power
    path = write(tmp_path / "x", tensors)
    (row,) = layernorm_backward(path, **options).per_layer
    assert row.x_grad_norm == norm(path, include=["^X_grad$"]).norm
    assert math.isfinite(row.x_grad_norm)
    assert row.x_grad_norm > 0


def test_a_layer_without_rows_takes_no_time(tmp_path):
    (row,) = layernorm_backward(write(tmp_path / "x", layer((0, 40)))).per_layer
    assert (row.seconds, row.gb_per_s) == (0.0, 0.0)


def test_thousands_of_layers_in_one_file(tmp_path):
    tensors = {}
    for i in range(3000):
        tensors |= {f"{i}.{name}": array for name, array in layer((2, 3), seed=1).items()}
    rows = layernorm_backward(write(tmp_path / "x", tensors), fsync=False).per_layer
    (single,) = layernorm_backward(write(tmp_path / "single", layer((2, 3), seed=1))).per_layer
    assert sorted(int(row.name) for row in rows) == list(range(3000))
    assert {(row.x_grad_norm, row.scale_grad_norm, row.bias_grad_norm) for row in rows} == {
        (single.x_grad_norm, single.scale_grad_norm, single.bias_grad_norm)
    }
