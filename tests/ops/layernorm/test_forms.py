"""What the results are called, and layers without weights."""

import numpy as np
import pytest
from layers import FORMS, assert_all, assert_is, gradients, layer, reference, refused
from support import encode, gradtool, gradtool_json, read, snapshot, write

from gradtool import BadInputError, UsageError, accumulate, layernorm_backward, tuning

NAMES = {"x_grad": "dx", "scale_grad": "weight", "bias_grad": "b"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_every_result_can_have_another_name(tmp_path, form, elsewhere):
    tensors = layer((6, 9))
    path = write(tmp_path / "x", {f"n.{name}": array for name, array in tensors.items()})
    layernorm_backward(path, **NAMES, **FORMS[form], **({"output": tmp_path / "out"} if elsewhere else {}))
    found = read(tmp_path / "out" if elsewhere else path)
    assert not any(name in found for name in ("n.X_grad", "n.scale_grad", "n.bias_grad"))
    names = {"X_grad": "n.dx", "scale_grad": "n.weight", "bias_grad": "n.b"}
    expected = reference(tensors, **FORMS[form])
    assert_all({name: found[names[name]] for name in expected}, expected, "F32", "F32")


@pytest.mark.parametrize("old", [np.ones(9, np.float32), np.ones(3), np.arange(4, dtype=np.int32)])
def test_a_tensor_of_a_results_name_is_replaced_and_a_second_run_gives_the_same_bytes(tmp_path, old):
    tensors = layer((6, 9))
    path = write(tmp_path / "x", {"weight": old, **tensors})
    layernorm_backward(path, **NAMES)
    assert_is(read(path)["weight"], reference(tensors, **FORMS["layernorm"])["scale_grad"], "F32")
    before = path.read_bytes()
    layernorm_backward(path, **NAMES)
    layernorm_backward(path, write="inplace", **NAMES)
    assert path.read_bytes() == before


def test_results_can_be_added_to_a_set_of_weights(tmp_path):
    tensors = layer((6, 9), types=("F64",) * 3)
    acts = write(tmp_path / "acts", {"n.Y_grad": tensors["Y_grad"], "n.X": tensors["X"]})
    weights = write(tmp_path / "weights", {"n.weight": tensors["scale"], "n.bias": tensors["bias"]})
    grads, total = tmp_path / "grads", write(tmp_path / "sum", {"n.weight": np.ones(9), "n.bias": np.ones(9)})
    names = {"scale": "weight", "scale_grad": "weight", "bias_grad": "bias"}
    layernorm_backward([acts, weights], output=grads, **names)
    for _ in range(2):
        accumulate(grads, into=total, include=[r"\.(weight|bias)$"])
    del tensors["mean"], tensors["inv_std_dev"]
    expected = reference(tensors, **FORMS["layernorm"])
    assert read(total)["n.weight"] == pytest.approx(1 + 2 * expected["scale_grad"], rel=1e-13, abs=1e-13)
    assert read(total)["n.bias"] == pytest.approx(1 + 2 * expected["bias_grad"], rel=1e-13, abs=1e-13)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_grad": "bias_grad"}, "scale_grad and bias_grad are both 'bias_grad'"),
        ({"x_grad": "g", "scale_grad": "g"}, "x_grad and scale_grad are both 'g'"),
        ({"scale_grad": "scale"}, "scale_grad and scale are both 'scale', so the result would replace the input"),
        ({"scale": "weight", "scale_grad": "weight"}, "scale_grad and scale are both 'weight'"),
        ({"x_grad": "X"}, "x_grad and x are both 'X'"),
        ({"bias_grad": "mean"}, "bias_grad and mean are both 'mean'"),
        ({"y_grad": "scale_grad"}, "scale_grad and y_grad are both 'scale_grad'"),
        ({"invertible": True, "bias_grad": "bias"}, "bias_grad and bias are both 'bias'"),
        ({"x_grad": "scale", "x_grad_in_place": True}, "x_grad and scale are both 'scale'"),
        ({"scale_grad": ""}, "scale_grad must be a non-empty string, not ''"),
        ({"affine": False, "scale_offset": 1}, "scale_offset requires a scale, and affine=False has none"),
    ],
)
def test_names_that_collide_are_usage_errors_and_change_nothing(tmp_path, options, message):
    write(tmp_path / "x", layer((6, 9)))
    (problem,) = refused(tmp_path, UsageError, **options)
    assert problem.message.startswith(message)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "rmsnorm", "scale_grad": "bias_grad"},
        {"bias_grad": "bias"},
        {"affine": False, "x_grad": "scale_grad"},
        {"invertible": True, "x_grad": "X"},
    ],
)
def test_names_of_what_is_neither_read_nor_written_are_free(tmp_path, options):
    path = write(tmp_path / "x", layer((6, 9)))
    assert layernorm_backward(path, **options).output.files_written == 1


def test_elsewhere_a_result_may_have_the_name_of_its_input(tmp_path):
    tensors = layer((6, 9))
    path = write(tmp_path / "x", tensors)
    before = snapshot(tmp_path)
    for names in ({"scale_grad": "scale", "x_grad": "X"}, {"scale_grad": "mean", "x_grad": "scale"}):
        layernorm_backward(path, output=tmp_path / "out", **names)
        found = read(tmp_path / "out")[names["scale_grad"]]
        assert_is(found, reference(tensors, **FORMS["layernorm"])["scale_grad"], "F32")
        assert snapshot(tmp_path)[path] == before[path]


def test_x_grad_in_place_takes_the_place_of_y_grad_under_its_name(tmp_path):
    tensors = layer((6, 9))
    expected = reference(tensors, **FORMS["layernorm"])
    path = write(tmp_path / "x", tensors)
    layernorm_backward(path, x_grad_in_place=True, x_grad="dx")
    assert next(iter(read(path))) == "dx"
    assert "Y_grad" not in read(path)
    assert_is(read(path)["dx"], expected["X_grad"], "F32")
    # Y_grad's own name too.
    path = write(tmp_path / "y", tensors)
    layernorm_backward(path, x_grad_in_place=True, x_grad="Y_grad")
    assert_is(read(path)["Y_grad"], expected["X_grad"], "F32")


def test_a_y_grad_is_only_replaced_by_its_like(tmp_path):
    write(tmp_path / "x", layer((6, 9), types=("F64", "F32", "F32")))
    (problem,) = refused(tmp_path, BadInputError, x_grad="Y_grad")
    assert (problem.tensor, problem.message) == (
        "Y_grad", "is an input, and a result of F64 [6, 9] would take its name",
    )  # fmt: skip


def test_results_of_two_layers_cannot_have_one_name(tmp_path):
    tensors = layer((6, 9), prefix="a.") | layer((6, 9), prefix="a.b.")
    # Of the layer `a`, `b.c` is what `c` is of the layer `a.b`.
    write(tmp_path / "x", tensors)
    (problem,) = refused(tmp_path, BadInputError, scale_grad="b.c", bias_grad="c")
    assert (problem.code, problem.tensor, problem.message) == (
        "duplicate-name", "a.b.c", "would be a result of both 'a' and 'a.b'",
    )  # fmt: skip


def test_a_result_cannot_take_the_name_of_an_input_of_another_layer(tmp_path):
    tensors = layer((6, 9), prefix="a.") | layer((6, 9), prefix="a.b.")
    path = write(tmp_path / "x", tensors)
    (problem,) = refused(tmp_path, BadInputError, scale_grad="b.scale")
    assert (problem.tensor, problem.message) == (
        "a.b.scale", "is an input of 'a.b', and a result of 'a' would take its name",
    )  # fmt: skip
    assert layernorm_backward(path, scale_grad="b.scale", output=tmp_path / "out").output.files_written == 1


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("patch", [1 << 18, 16])
@pytest.mark.parametrize("types", [("F32", "F32", "F32"), ("F64", "F64", "F64"), ("BF16", "F32", "F8_E5M2")])
@pytest.mark.parametrize("form", FORMS)
def test_layers_without_weights_give_the_bits_of_a_scale_of_ones(tmp_path, monkeypatch, form, types, patch, statistics):
    monkeypatch.setattr(tuning, "PATCH_ELEMENTS", patch)
    tensors = layer((7, 37), types=types, statistics=statistics or FORMS[form]["invertible"])
    tensors |= {"scale": encode(np.ones(37), types[2]), "bias": encode(np.zeros(37), types[2])}
    # Of the output of a layer whose scale is 1 and whose bias is 0.
    tensors["Y"] = encode(np.random.default_rng(5).standard_normal((7, 37)), types[2])
    bare = {name: array for name, array in tensors.items() if name not in ("scale", "bias")}
    ones, none = write(tmp_path / "ones", tensors), write(tmp_path / "none", bare)
    (with_ones,) = layernorm_backward(ones, fsync=False, **FORMS[form]).per_layer
    (row,) = layernorm_backward(none, fsync=False, affine=False, **FORMS[form]).per_layer
    assert set(read(none)) == {*bare, "X_grad"}
    assert read(none)["X_grad"].tobytes() == read(ones)["X_grad"].tobytes()
    dtype = types[2] if FORMS[form]["invertible"] else types[0]
    assert_is(read(none)["X_grad"], reference(tensors, **FORMS[form])["X_grad"], dtype)
    assert (row.x_grad_norm, row.scale_grad_norm, row.bias_grad_norm) == (with_ones.x_grad_norm, None, None)
    assert row.seconds > 0


def test_without_weights_a_scale_that_is_there_is_not_read(tmp_path):
    tensors = layer((6, 9)) | {"scale": np.full(4, np.nan), "scale_grad": np.ones(2)}
    path = write(tmp_path / "x", tensors)
    result = layernorm_backward(path, affine=False)
    assert (result.call.tensors, result.layers) == (4, 1)
    expected = reference(layer((6, 9)) | {"scale": np.ones(9)}, **FORMS["layernorm"])
    assert_is(gradients(path)["X_grad"], expected["X_grad"], "F32")
    # What an earlier run found stays.
    assert read(path)["scale_grad"].tolist() == [1, 1]


@pytest.mark.parametrize("shape", [(0, 7), (5, 0), (0, 0)])
def test_without_weights_no_rows_or_no_columns_are_fine(tmp_path, shape):
    path = write(tmp_path / "x", layer(shape))
    (row,) = layernorm_backward(path, affine=False).per_layer
    assert read(path)["X_grad"].shape == shape
    assert (row.x_grad_norm, row.scale_grad_norm) == (0, None)


def test_a_scale_that_is_misspelled_is_not_taken_as_1(tmp_path):
    tensors = layer((6, 9))
    tensors["scael"] = tensors.pop("scale")
    path = write(tmp_path / "x", tensors)
    done = gradtool("layernorm-backward", path)
    assert done.returncode == 3
    assert done.stderr == (
        f"gradtool: error: {path}: tensor 'scale': is missing, but needed with 'Y_grad'\n"
        "  hint: use --scale NAME if it has another name, or --no-affine for layers without weights\n"
    )
    data = gradtool_json("layernorm-backward", path, "--no-affine")["data"]
    assert (data["per_layer"][0]["scale_grad_norm"], data["per_layer"][0]["bias_grad_norm"]) == (None, None)
    line = gradtool("layernorm-backward", path, "--no-affine").stdout.splitlines()[-1].split("\t")
    assert (line[0], line[5:7]) == ("layer", ["-", "-"])
