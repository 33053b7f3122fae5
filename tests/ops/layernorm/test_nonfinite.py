import itertools
import math

import numpy as np
import pytest
from layers import FORMS, assert_is, gradients, layer, reference, refused
from support import read, write

from gradtool import BadInputError, NonFiniteError, layernorm_backward, tuning


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
    place = list(map(int, np.unravel_index(4, tensors[name].shape)))
    assert problem.message == f"{int(value != value)} NaN, {int(value == value)} Inf, the first at {place}"  # noqa: PLR0124
    assert problem.index == 4


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
        assert f"overflow {dtype}, the first at [" in problem.message
    layernorm_backward(path, nonfinite="propagate")
    assert not np.isfinite(gradients(path)["X_grad"].astype(np.float64)).all()


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
    message = f"1 NaN, 0 Inf, the first at {[7] if bad == 'scale' else [0, 7]}"
    assert [(one.tensor, one.message, one.index) for one in caught.value.problems] == [(bad, message, 7)]


def test_statistics_beyond_float64_are_refused_and_not_turned_to_zeros(tmp_path):
    tensors = layer((5, 7), types=("F64", "F64", "F64"), statistics=False)
    tensors["X"] *= 1e200
    before = tensors["X"].copy()
    with pytest.raises(BadInputError, match="variance overflows float64"):
        layernorm_backward(write(tmp_path / "x", tensors))
    assert read(tmp_path / "x")["X"].tobytes() == before.tobytes()


def test_a_constant_row_needs_an_eps(tmp_path):
    tensors = layer((5, 7), statistics=False)
    tensors["X"][2] = 3.0
    path = write(tmp_path / "x", tensors)
    with pytest.raises(BadInputError, match="row of variance 0; use norm_eps above 0"):
        layernorm_backward(path, norm_eps=0)
    assert layernorm_backward(path).output.files_written == 1


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
    assert [(one.tensor, one.message) for one in caught.value.problems] == [("X", "0 NaN, 1 Inf, the first at [0, 1]")]
    layernorm_backward(path, kind=kind, nonfinite="propagate")
    x_grad = read(path)["X_grad"]
    assert np.isnan(x_grad[0]).any()
    assert np.isfinite(x_grad[1]).all()
