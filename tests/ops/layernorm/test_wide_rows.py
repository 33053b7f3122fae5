import numpy as np
import pytest
from layers import ARITHMETIC, FORMS, KNOWN, assert_all, gradients, layer, reference
from support import encode, write

from gradtool import layernorm_backward, tuning


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
    tensors = layer((2, 1000), types=("F64",) * 3, statistics=statistics or FORMS[form]["invertible"])
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


@pytest.mark.parametrize("there", ["mean", "inv_std_dev"])
@pytest.mark.parametrize("patch", [1 << 18, 4])
def test_a_statistic_that_is_there_is_taken_though_the_other_is_computed(tmp_path, monkeypatch, there, patch):
    monkeypatch.setattr(tuning, "PATCH_ELEMENTS", patch)
    tensors = layer((6, 9), statistics=False) | {there: np.linspace(0.5, 2, 6)}
    path = write(tmp_path / "x", tensors)
    layernorm_backward(path)
    assert_all(gradients(path), reference(tensors, **FORMS["layernorm"]), "F32", "F32")
