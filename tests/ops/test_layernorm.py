"""The backward pass of layer normalization, as a user calls it; its kernels are tested in backends/."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from support import NUMPY_TYPES, VALUE_TYPES, encode, gradtool, gradtool_json, read, snapshot, write

from gradtool import BadInputError, NonFiniteError, UsageError, layernorm_backward, norm, tuning

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"
FORMS = {
    "layernorm": {"kind": "layernorm", "invertible": False},
    "rmsnorm": {"kind": "rmsnorm", "invertible": False},
    "layernorm, invertible": {"kind": "layernorm", "invertible": True},
    "rmsnorm, invertible": {"kind": "rmsnorm", "invertible": True},
}
OUTPUTS = ("X_grad", "scale_grad", "bias_grad")
# What one rounding to a type may add: half a unit in the last place, as a part of the value, and half of the smallest
# value that is there. The types have 53, 24, 11, 8, 4 and 3 bits.
ROUNDING = {
    "F64": (2.0**-53, 0.0),
    "F32": (2.0**-24, 2.0**-150),
    "F16": (2.0**-11, 2.0**-25),
    "BF16": (2.0**-8, 2.0**-134),
    "F8_E4M3": (2.0**-4, 2.0**-10),
    "F8_E5M2": (2.0**-3, 2.0**-17),
}
# Float64 sums in another order than numpy's, over max|reference|; at most 2e-15 was seen, DESIGN promises 1e-14.
ARITHMETIC = 1e-14
# The known results are given to twelve decimals, of which the last is off by up to 1.4.
DECIMALS = 2e-12
# Central differences with a step of 1e-5: their error is about its square times a third derivative of a few tens.
DIFFERENCES = 2e-8


def layer(shape, axis=-1, types=("F32", "F32", "F32"), *, statistics=True, prefix="", seed=0):
    """All that any form reads, X of the first type, the statistics of the second, all else of the third."""
    rng = np.random.default_rng(seed)
    columns = shape[axis:]
    x = rng.standard_normal(shape) * 2 + 1
    scale = rng.choice([-1, 1], columns) * (rng.random(columns) + 0.5)
    bias = rng.standard_normal(columns)
    rows = x.reshape(math.prod(shape[:axis]), math.prod(columns))
    mean = rows.sum(axis=1) / max(1, rows.shape[1])
    inv_std_dev = 1 / np.sqrt(((rows - mean[:, None]) ** 2).sum(axis=1) / max(1, rows.shape[1]) + 1e-5)
    y = ((rows - mean[:, None]) * inv_std_dev[:, None]).reshape(shape) * scale + bias
    values = {"Y_grad": (types[2], rng.standard_normal(shape)), "X": (types[0], x), "Y": (types[2], y)}
    values |= {"scale": (types[2], scale), "bias": (types[2], bias)}
    if statistics:
        values |= {"mean": (types[1], mean), "inv_std_dev": (types[1], inv_std_dev)}
    return {f"{prefix}{name}": encode(array, dtype) for name, (dtype, array) in values.items()}


def reference(tensors, kind, *, invertible, axis=-1, norm_eps=1e-5):
    """The formulas of DESIGN's section 3, in float64 from the stored values."""
    wide = {name: array.astype(np.float64) for name, array in tensors.items()}
    shape, rms = tensors["Y_grad"].shape, kind == "rmsnorm"
    rows, columns = math.prod(shape[:axis]), math.prod(shape[axis:])
    y_grad, g = wide["Y_grad"].reshape(rows, columns), wide["scale"].ravel()
    if invertible:
        xh = (wide["Y"].reshape(rows, columns) - (0.0 if rms else wide["bias"].ravel())) / g
        r = wide["inv_std_dev"].reshape(rows, 1)
    else:
        x = wide["X"].reshape(rows, columns)
        own_mean = 0.0 if rms else x.mean(axis=1, keepdims=True)
        own_r = 1 / np.sqrt(((x - own_mean) ** 2).mean(axis=1, keepdims=True) + norm_eps)
        mean = 0.0 if rms else wide["mean"].reshape(rows, 1) if "mean" in wide else own_mean
        r = wide["inv_std_dev"].reshape(rows, 1) if "inv_std_dev" in wide else own_r
        xh = (x - mean) * r
    weighted = y_grad * g
    shift = 0.0 if rms else weighted.mean(axis=1, keepdims=True)
    x_grad = r * (weighted - shift - xh * (weighted * xh).mean(axis=1, keepdims=True))
    grads = {"X_grad": x_grad.reshape(shape), "scale_grad": (y_grad * xh).sum(axis=0).reshape(shape[axis:])}
    return grads if rms else grads | {"bias_grad": y_grad.sum(axis=0).reshape(shape[axis:])}


def gradients(path, prefix=""):
    """The outputs that a file holds."""
    return {name: array for name, array in read(path).items() if name.removeprefix(prefix) in OUTPUTS}


def assert_is(found, expected, dtype):
    """Whether a gradient is what the float64 formula gives, rounded once."""
    relative, smallest = ROUNDING[dtype]
    assert found.dtype == NUMPY_TYPES[dtype]
    assert found.shape == expected.shape
    slack = ARITHMETIC * np.abs(expected).max(initial=0)
    assert (np.abs(found.astype(np.float64) - expected) <= relative * np.abs(expected) + smallest + slack).all()


def assert_all(found, expected, x_dtype, scale_dtype):
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert_is(found[name], values, x_dtype if name == "X_grad" else scale_dtype)


KNOWN = {
    "Y_grad": np.array([[0.5, -1, 2, 0.25], [1, 1, -2, 0.5]]),
    "X": np.array([[1.0, 2, 3, 4], [-1, 0, 5, 2]]),
    "scale": np.array([1, 0.5, -2, 3]),
}
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


def test_many_narrow_rows_make_several_groups(tmp_path):
    tensors = layer((300_000, 1), types=("BF16", "F32", "F32"))
    tensors |= {f"wider.{name}": array for name, array in layer((30_001, 19)).items()}
    path = write(tmp_path / "x", tensors)
    layernorm_backward(path, fsync=False)
    found = read(path)
    for prefix, dtype in (("", "BF16"), ("wider.", "F32")):
        expected = reference({name: tensors[prefix + name] for name in layer((1, 1))}, **FORMS["layernorm"])
        assert_all({name: found[prefix + name] for name in expected}, expected, dtype, "F32")


@pytest.mark.parametrize(("dtype", "offset"), [("F32", 40_000), ("F64", 2e9)])
@pytest.mark.parametrize("patch", [1 << 18, 3])
def test_the_variance_is_that_of_the_differences_from_the_mean(tmp_path, monkeypatch, dtype, offset, patch):
    monkeypatch.setattr(tuning, "PATCH_ELEMENTS", patch)
    tensors = {name: encode(values, dtype) for name, values in KNOWN.items()}
    near, far = write(tmp_path / "near", tensors), write(tmp_path / "far", tensors | {"X": tensors["X"] + offset})
    for path in (near, far):
        layernorm_backward(path)
    for name, expected in gradients(near).items():
        assert gradients(far)[name] == pytest.approx(expected, abs=ARITHMETIC)


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_rows_longer_than_a_patch_give_what_short_ones_do(tmp_path, monkeypatch, form, statistics):
    tensors = layer((5, 1000), types=("F64",) * 3, statistics=statistics or FORMS[form]["invertible"])
    found = []
    for patch in (1 << 18, 1000, 999, 64, 1):
        monkeypatch.setattr(tuning, "PATCH_ELEMENTS", patch)
        path = write(tmp_path / "x", tensors)
        layernorm_backward(path, **FORMS[form])
        found.append(gradients(path))
    for name, expected in found[0].items():
        for other in found[1:]:
            assert np.abs(other[name] - expected).max() <= ARITHMETIC * np.abs(expected).max()


def test_a_row_just_longer_than_a_patch_gives_the_formula(tmp_path):
    tensors = layer((2, (1 << 18) + 1), statistics=False)
    path = write(tmp_path / "x", tensors)
    layernorm_backward(path, fsync=False)
    assert_all(gradients(path), reference(tensors, **FORMS["layernorm"]), "F32", "F32")


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
    assert (dry.files_written, dry.bytes_written, dry.dry_run) == (0, 0, True)


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


@pytest.mark.parametrize("there", ["mean", "inv_std_dev"])
@pytest.mark.parametrize("patch", [1 << 18, 4])
def test_a_statistic_that_is_there_is_taken_though_the_other_is_computed(tmp_path, monkeypatch, there, patch):
    monkeypatch.setattr(tuning, "PATCH_ELEMENTS", patch)
    tensors = layer((6, 9), statistics=False) | {there: np.linspace(0.5, 2, 6)}
    path = write(tmp_path / "x", tensors)
    layernorm_backward(path)
    assert_all(gradients(path), reference(tensors, **FORMS["layernorm"]), "F32", "F32")


@pytest.mark.parametrize("shape", [(4, 3, 1), (4, 3), (12,), (1, 4, 1, 3), (4, 3, 1, 1)])
def test_statistics_may_have_dimensions_of_1_and_may_be_flat(tmp_path, shape):
    tensors = layer((4, 3, 5))
    expected = reference(tensors, **FORMS["layernorm"])
    tensors |= {name: tensors[name].reshape(shape) for name in ("mean", "inv_std_dev")}
    path = write(tmp_path / "x", tensors)
    layernorm_backward(path)
    assert_all(gradients(path), expected, "F32", "F32")


def two_layers(folder):
    return write(folder / "x", layer((6, 9), prefix="a.0.") | layer((4, 5), prefix="a.1.", seed=2))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["a.0", "a.1"]),
        ({"prefix": ["a.1"]}, ["a.1"]),
        ({"prefix": "a.1."}, ["a.1"]),
        ({"prefix": ["a.1", "a.0"]}, ["a.0", "a.1"]),
        ({"include": [r"^a\.0\."]}, ["a.0"]),
        ({"exclude": [r"^a\.0\.Y_grad"]}, ["a.1"]),
    ],
)
def test_layers_are_chosen_by_prefix_and_by_the_name_of_their_y_grad(tmp_path, options, names):
    path = two_layers(tmp_path)
    result = layernorm_backward(path, **options)
    assert [row.name for row in result.per_layer] == names
    assert list(gradients(path, "a.0.")) == [f"a.0.{name}" for name in OUTPUTS if "a.0" in names]
    assert list(gradients(path, "a.1.")) == [f"a.1.{name}" for name in OUTPUTS if "a.1" in names]


@pytest.mark.parametrize("prefix", ["", "a.", "a/b/", "a:", "Y_grad.", "ä·"])
def test_a_prefix_ends_with_any_separator_and_may_be_empty(tmp_path, prefix):
    path = write(tmp_path / "x", layer((3, 4), prefix=prefix))
    (row,) = layernorm_backward(path).per_layer
    assert row.name == prefix[:-1]
    assert list(gradients(path, prefix)) == [prefix + name for name in OUTPUTS]


def test_several_files_are_done_in_one_run_each_with_its_own_layers(tmp_path):
    tensors = {name: layer((6, 9), prefix="n.", seed=seed) for seed, name in enumerate(("x", "y"))}
    paths = [write(tmp_path / name, one) for name, one in tensors.items()]
    result = layernorm_backward(paths)
    assert [(row.name, row.file) for row in result.per_layer] == [("n", str(path)) for path in paths]
    assert (result.files, result.files_written, result.layers, result.tensors) == (2, 2, 2, 10)
    for path, one in zip(paths, tensors.values(), strict=True):
        expected = reference({name[2:]: array for name, array in one.items()}, **FORMS["layernorm"])
        assert_all({name[2:]: array for name, array in gradients(path, "n.").items()}, expected, "F32", "F32")


@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_can_have_another_name(tmp_path, form):
    other = {
        "Y_grad": "dy", "X": "input", "Y": "output", "scale": "weight", "bias": "shift", "mean": "mu",
        "inv_std_dev": "rstd",
    }  # fmt: skip
    tensors = layer((6, 9))
    path = write(tmp_path / "x", {f"n.{other[name]}": array for name, array in tensors.items()})
    layernorm_backward(path, **FORMS[form], **{name.lower(): new for name, new in other.items()})
    found = {name[2:]: array for name, array in gradients(path, "n.").items()}
    assert_all(found, reference(tensors, **FORMS[form]), "F32", "F32")


def test_the_result_says_what_was_read_and_written(tmp_path):
    path = write(tmp_path / "x", layer((6, 9), types=("BF16", "F32", "F32"), prefix="n."))
    result = layernorm_backward(path, kind="rmsnorm", output=tmp_path / "out")
    assert (result.kind, result.invertible, result.layers, result.files, result.dry_run) == (
        "rmsnorm", False, 1, 1, False,
    )  # fmt: skip
    # Y_grad, X, scale and inv_std_dev.
    assert (result.tensors, result.elements, result.bytes) == (4, 54 + 54 + 9 + 6, 54 * 4 + 54 * 2 + 9 * 4 + 6 * 4)
    assert (result.files_written, result.bytes_written) == (1, (tmp_path / "out").stat().st_size)
    (row,) = result.per_layer
    assert (row.name, row.file, row.shape, row.rows, row.columns) == ("n", str(path), (6, 9), 6, 9)
    assert row.bias_grad_norm is None


def test_the_command_says_and_does_the_same(tmp_path):
    path, other = two_layers(tmp_path), two_layers(tmp_path / "other")
    expected = layernorm_backward(other, kind="rmsnorm", prefix=["a.1"], scale_offset=1)
    data = gradtool_json("layernorm-backward", path, "--kind", "rmsnorm", "--prefix", "a.1", "--scale-offset", 1)[
        "data"
    ]
    assert path.read_bytes() == other.read_bytes()
    (row,), (expected_row,) = data["per_layer"], expected.per_layer
    assert (row["name"], row["shape"], row["x_grad_norm"]) == ("a.1", [4, 5], expected_row.x_grad_norm)
    assert (data["kind"], data["layers"], data["bytes_written"]) == ("rmsnorm", 1, expected.bytes_written)


def refused(folder, error, **options):
    """The problems of a call that must be refused and must not change a byte."""
    before = snapshot(folder)
    with pytest.raises(error) as caught:
        layernorm_backward(folder / "x", **options)
    assert snapshot(folder) == before
    assert caught.value.exit_code == {BadInputError: 3, NonFiniteError: 1, UsageError: 2}[error]
    return caught.value.problems


@pytest.mark.parametrize(
    ("name", "shape", "form"),
    [
        ("Y_grad", (6, 8), "layernorm"),
        ("Y_grad", (54,), "layernorm"),
        ("scale", (8,), "layernorm"),
        ("scale", (6, 9), "rmsnorm"),
        ("scale", (), "layernorm, invertible"),
        ("bias", (10,), "layernorm, invertible"),
        ("mean", (9,), "layernorm"),
        ("mean", (6, 9), "layernorm"),
        ("inv_std_dev", (5,), "rmsnorm"),
        ("inv_std_dev", (0,), "layernorm, invertible"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_and_named(tmp_path, name, shape, form):
    path = write(tmp_path / "x", layer((6, 9), prefix="n.") | {f"n.{name}": np.ones(shape, np.float32)})
    (problem,) = refused(tmp_path, BadInputError, **FORMS[form])
    assert (problem.code, problem.file, problem.tensor) == ("shape", str(path), f"n.{name}")
    needed = {"Y_grad": [6, 9], "scale": [9], "bias": [9], "mean": [6], "inv_std_dev": [6]}[name]
    assert problem.message == f"has shape {list(shape)}, where {needed} is needed"


@pytest.mark.parametrize(("shape", "axis"), [((6, 9), 2), ((6, 9), -3), ((), -1), ((), 0)])
def test_an_axis_that_is_not_there_is_refused(tmp_path, shape, axis):
    ones = np.ones(shape, np.float32)
    path = write(tmp_path / "x", {"X": ones, "Y_grad": ones, "scale": ones})
    (problem,) = refused(tmp_path, BadInputError, axis=axis)
    assert (problem.code, problem.file, problem.tensor) == ("axis", str(path), "X")


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("layernorm", "X"),
        ("layernorm", "scale"),
        ("rmsnorm", "X"),
        ("layernorm, invertible", "Y"),
        ("layernorm, invertible", "bias"),
        ("layernorm, invertible", "inv_std_dev"),
        ("rmsnorm, invertible", "inv_std_dev"),
    ],
)
def test_a_tensor_that_is_missing_is_named(tmp_path, form, name):
    tensors = layer((6, 9), prefix="n.")
    del tensors[f"n.{name}"]
    path = write(tmp_path / "x", tensors)
    (problem,) = refused(tmp_path, BadInputError, **FORMS[form])
    assert (problem.code, problem.file, problem.tensor) == ("missing-tensor", str(path), f"n.{name}")
    assert f"--{name.lower().replace('_', '-')} names it" in problem.message


@pytest.mark.parametrize("form", FORMS)
def test_what_a_form_does_not_read_need_not_be_there_nor_fit(tmp_path, form):
    read_by = {
        "layernorm": {"X", "mean", "inv_std_dev"},
        "rmsnorm": {"X", "inv_std_dev"},
        "layernorm, invertible": {"Y", "bias", "inv_std_dev"},
        "rmsnorm, invertible": {"Y", "inv_std_dev"},
    }[form]
    tensors = layer((6, 9))
    expected = reference(tensors, **FORMS[form])
    for name in {"X", "Y", "bias", "mean", "inv_std_dev"} - read_by:
        tensors[name] = np.ones((2, 2, 2), np.int32)
    path = write(tmp_path / "x", tensors)
    layernorm_backward(path, **FORMS[form])
    assert_all(gradients(path), expected, "F32", "F32")


def test_no_y_grad_and_a_prefix_that_is_not_there_are_refused(tmp_path):
    write(tmp_path / "x", {"X": np.ones((2, 3)), "scale": np.ones(3), "my_Y_grad": np.ones((2, 3))})
    assert [one.code for one in refused(tmp_path, BadInputError)] == ["no-match"]
    two_layers(tmp_path)
    (problem,) = refused(tmp_path, BadInputError, prefix=["a.0", "b"])
    assert problem.message == "--prefix 'b' has no tensor Y_grad"


@pytest.mark.parametrize("name", ["Y_grad", "X", "scale", "mean", "inv_std_dev"])
def test_whole_numbers_carry_no_gradient(tmp_path, name):
    tensors = layer((6, 9))
    path = write(tmp_path / "x", tensors | {name: tensors[name].astype(np.int32)})
    (problem,) = refused(tmp_path, BadInputError)
    assert (problem.code, problem.file, problem.tensor) == ("dtype", str(path), name)


@pytest.mark.parametrize(("stored", "offset"), [(0.0, 0.0), (-0.0, 0.0), (-1.0, 1.0)])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("patch", [1 << 18, 2])
def test_a_scale_of_zero_cannot_be_inverted(tmp_path, monkeypatch, kind, stored, offset, patch):
    monkeypatch.setattr(tuning, "PATCH_ELEMENTS", patch)
    tensors = layer((6, 9))
    tensors["scale"][3] = stored
    path = write(tmp_path / "x", tensors)
    (problem,) = refused(tmp_path, BadInputError, kind=kind, invertible=True, scale_offset=offset, threads=1)
    assert (problem.code, problem.file, problem.tensor) == ("zero-scale", str(path), "scale")
    assert "column 3" in problem.message
    layernorm_backward(path, kind=kind, scale_offset=offset)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("form", "name"),
    [
        *[("layernorm", name) for name in ("Y_grad", "X", "scale", "mean", "inv_std_dev")],
        *[("rmsnorm, invertible", name) for name in ("Y_grad", "Y", "scale", "inv_std_dev")],
        ("layernorm, invertible", "bias"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_nan_or_inf_writes_nothing_and_is_named(tmp_path, value, form, name, dry_run):
    tensors = layer((6, 9))
    tensors[name].flat[4] = value
    path = write(tmp_path / "x", tensors)
    (problem,) = refused(tmp_path, NonFiniteError, dry_run=dry_run, **FORMS[form])
    assert (problem.code, problem.file, problem.tensor) == ("nonfinite", str(path), name)
    assert problem.message == f"{int(value != value)} NaN, {int(value == value)} Inf, the first at index 4"  # noqa: PLR0124


def test_propagate_goes_on_with_what_a_nan_leaves(tmp_path):
    tensors = layer((6, 9))
    tensors["X"][2, 5] = math.nan
    path = write(tmp_path / "x", tensors)
    (row,) = layernorm_backward(path, nonfinite="propagate").per_layer
    found, expected = gradients(path), reference(tensors, **FORMS["layernorm"])
    assert np.isnan(found["X_grad"]).tolist() == [[i == 2] * 9 for i in range(6)]
    assert np.isnan(found["scale_grad"]).tolist() == [j == 5 for j in range(9)]
    finite = [i for i in range(6) if i != 2]
    assert_is(found["X_grad"][finite], expected["X_grad"][finite], "F32")
    assert_is(found["bias_grad"], expected["bias_grad"], "F32")
    assert math.isnan(row.x_grad_norm)
    assert math.isfinite(row.bias_grad_norm)


@pytest.mark.parametrize("dtype", ["F16", "F8_E4M3", "F8_E5M2"])
def test_a_gradient_beyond_its_type_is_an_error_that_names_it(tmp_path, dtype):
    tensors = layer((6, 9), types=(dtype, "F32", "F32"))
    tensors["Y_grad"][3, 4] = 1e6
    path = write(tmp_path / "x", tensors)
    for dry_run in (False, True):
        (problem,) = refused(tmp_path, NonFiniteError, dry_run=dry_run)
        assert (problem.code, problem.file, problem.tensor) == ("overflow", str(path), "X_grad")
        assert f"beyond {dtype}, the first at index" in problem.message
    layernorm_backward(path, nonfinite="propagate")
    assert not np.isfinite(gradients(path)["X_grad"].astype(np.float64)).all()


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "batchnorm"},
        {"kind": None},
        {"axis": 1.0},
        {"norm_eps": -1e-9},
        {"norm_eps": math.nan},
        {"norm_eps": math.inf},
        {"scale_offset": math.inf},
        {"scale_offset": "much"},
        {"nonfinite": "zero"},
        {"prefix": 5},
        {"output": "a", "output_dir": "b"},
        {"output": "a", "x_grad_in_place": True},
        {"threads": 0},
    ],
)
def test_arguments_that_make_no_sense_are_usage_errors_and_change_nothing(tmp_path, arguments):
    two_layers(tmp_path)
    refused(tmp_path, UsageError, **arguments)


def test_bad_input_and_nan_on_the_command_line_have_their_exit_codes(tmp_path):
    path = two_layers(tmp_path)
    done = gradtool("layernorm-backward", path, "--axis", 5)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"gradtool: error: {path}: tensor 'a.0.X': has shape [6, 9], which has no axis 5\n"
    write(tmp_path / "x", layer((6, 9)) | {"scale": np.full(9, math.nan)})
    done = gradtool("layernorm-backward", path)
    assert done.returncode == 1
    assert f"{path}: tensor 'scale': 9 NaN, 0 Inf, the first at index 0" in done.stderr


def saved(folder, tensors, order):
    """The tensors in a file, in an order of its own."""
    return write(folder / "x", {name: tensors[name] for name in order})


@pytest.mark.parametrize("order", list(itertools.permutations(["X", "Y_grad", "scale"])))
@pytest.mark.parametrize("bad", ["X", "Y_grad", "scale"])
def test_a_nan_is_named_wherever_it_lies_in_the_file(tmp_path, order, bad):
    tensors = layer((30, 50), statistics=False)
    tensors[bad].reshape(-1)[7] = math.nan
    path = saved(tmp_path, tensors, order)
    with pytest.raises(NonFiniteError) as caught:
        layernorm_backward(path)
    assert [(one.tensor, one.message) for one in caught.value.problems] == [(bad, "1 NaN, 0 Inf, the first at index 7")]


@pytest.mark.parametrize("power", [200, -200])
@pytest.mark.parametrize("options", [{}, {"x_grad_in_place": True}])
def test_extreme_gradients_have_their_norms_in_place_too(tmp_path, power, options):
    tensors = layer((5, 7), types=("F64", "F64", "F64"))
    tensors["Y_grad"] *= 10.0**power
    path = write(tmp_path / "x", tensors)
    (row,) = layernorm_backward(path, **options).per_layer
    assert row.x_grad_norm == norm(path, include=["^X_grad$"]).norm
    assert math.isfinite(row.x_grad_norm)
    assert row.x_grad_norm > 0


@pytest.mark.parametrize("prefix", ["blocks[0]", "blocks[0].", "a-", "norm_", "norm"])
def test_a_prefix_may_end_in_anything(tmp_path, prefix):
    stems = {"blocks[0]": "blocks[0].", "a-": "a-.", "norm": "norm_"}
    path = write(tmp_path / "x", layer((3, 4), prefix=stems.get(prefix, prefix)) | layer((3, 4), prefix="b."))
    assert len(layernorm_backward(path, prefix=[prefix]).per_layer) == 1
    with pytest.raises(BadInputError, match="'b:' has no tensor Y_grad"):
        layernorm_backward(path, prefix=["b:", "b."])


def test_a_word_that_ends_like_a_gradient_is_no_layer(tmp_path):
    tensors = {name: array for name, array in layer((3, 4)).items() if name != "Y_grad"}
    path = write(tmp_path / "x", tensors | {"grad": layer((3, 4))["Y_grad"]})
    layernorm_backward(path, y_grad="grad")
    assert len(layernorm_backward(path, y_grad="grad").per_layer) == 1


def test_a_layer_without_rows_takes_no_time(tmp_path):
    (row,) = layernorm_backward(write(tmp_path / "x", layer((0, 40)))).per_layer
    assert (row.seconds, row.gb_per_s) == (0.0, 0.0)


def test_statistics_beyond_float64_are_refused_and_not_turned_to_zeros(tmp_path):
    tensors = layer((5, 7), types=("F64", "F64", "F64"), statistics=False)
    tensors["X"] *= 1e200
    before = tensors["X"].copy()
    with pytest.raises(BadInputError, match="too large for its variance"):
        layernorm_backward(write(tmp_path / "x", tensors))
    assert read(tmp_path / "x")["X"].tobytes() == before.tobytes()


def test_a_constant_row_needs_an_eps(tmp_path):
    tensors = layer((5, 7), statistics=False)
    tensors["X"][2] = 3.0
    path = write(tmp_path / "x", tensors)
    with pytest.raises(BadInputError, match="variance is 0; --norm-eps"):
        layernorm_backward(path, norm_eps=0)
    assert layernorm_backward(path).files_written == 1


def test_an_input_is_not_lost_to_a_result_of_its_name(tmp_path):
    tensors = layer((6, 4))
    tensors["scale_grad"] = tensors.pop("Y_grad")
    with pytest.raises(BadInputError, match="would be lost"):
        layernorm_backward(write(tmp_path / "x", tensors), y_grad="scale_grad")


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


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_an_inf_in_x_is_told_of_as_such_and_can_be_let_through(tmp_path, monkeypatch, kind, wide):
    if wide:
        monkeypatch.setattr(tuning, "PATCH_ELEMENTS", 4)
    tensors = layer((2, 6), statistics=False)
    tensors["X"][0, 1] = math.inf
    path = write(tmp_path / "x", tensors)
    with pytest.raises(NonFiniteError) as caught:
        layernorm_backward(path, kind=kind)
    assert [(one.tensor, one.message) for one in caught.value.problems] == [("X", "0 NaN, 1 Inf, the first at index 1")]
    layernorm_backward(path, kind=kind, nonfinite="propagate")
    x_grad = read(path)["X_grad"]
    assert np.isnan(x_grad[0]).any()
    assert np.isfinite(x_grad[1]).all()
