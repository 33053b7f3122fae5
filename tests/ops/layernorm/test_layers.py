import numpy as np
import pytest
from layers import FORMS, OUTPUTS, assert_all, gradients, layer, reference, refused, two_layers
from support import write

from gradtool import BadInputError, layernorm_backward


@pytest.mark.parametrize("shape", [(4, 3, 1), (4, 3), (12,), (1, 4, 1, 3), (4, 3, 1, 1)])
def test_statistics_may_have_dimensions_of_1_and_may_be_flat(tmp_path, shape):
    tensors = layer((4, 3, 5))
    expected = reference(tensors, **FORMS["layernorm"])
    tensors |= {name: tensors[name].reshape(shape) for name in ("mean", "inv_std_dev")}
    path = write(tmp_path / "x", tensors)
    layernorm_backward(path)
    assert_all(gradients(path), expected, "F32", "F32")


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
    assert problem.message == f"has shape {list(shape)}, expected {needed}"


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
    assert problem.message.startswith("is missing, but needed with 'n.Y_grad'")
    assert problem.hint.startswith(f'use {name.lower()}="NAME" if it has another name')


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
    assert problem.message == 'prefix="b" matches no tensor Y_grad'


@pytest.mark.parametrize("name", ["Y_grad", "X", "scale", "mean", "inv_std_dev"])
def test_whole_numbers_carry_no_gradient(tmp_path, name):
    tensors = layer((6, 9))
    path = write(tmp_path / "x", tensors | {name: tensors[name].astype(np.int32)})
    (problem,) = refused(tmp_path, BadInputError)
    assert (problem.code, problem.file, problem.tensor) == ("dtype", str(path), name)


@pytest.mark.parametrize("prefix", ["blocks[0]", "blocks[0].", "a-", "norm_", "norm"])
def test_a_prefix_may_end_in_anything(tmp_path, prefix):
    stems = {"blocks[0]": "blocks[0].", "a-": "a-.", "norm": "norm_"}
    path = write(tmp_path / "x", layer((3, 4), prefix=stems.get(prefix, prefix)) | layer((3, 4), prefix="b."))
    assert len(layernorm_backward(path, prefix=[prefix]).per_layer) == 1
    with pytest.raises(BadInputError, match='prefix="b:" matches no tensor Y_grad'):
        layernorm_backward(path, prefix=["b:", "b."])


def test_a_word_that_ends_like_a_gradient_is_no_layer(tmp_path):
    tensors = {name: array for name, array in layer((3, 4)).items() if name != "Y_grad"}
    path = write(tmp_path / "x", tensors | {"grad": layer((3, 4))["Y_grad"]})
    layernorm_backward(path, y_grad="grad")
    assert len(layernorm_backward(path, y_grad="grad").per_layer) == 1
