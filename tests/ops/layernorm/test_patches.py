import numpy as np
import pytest
from layers import ARITHMETIC, FORMS, KNOWN, assert_all, gradients, layer, reference
from support import encode, read, write

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


def summed(terms, stretch):
    """The sum of a row in the order of docs/numerics.md; stretches, chunks and lanes are taken one after another."""
    total = 0.0
    for begin in range(0, terms.size, stretch):
        own = terms[begin : begin + stretch]
        # 1,024 columns are 32 steps of 32 lanes; -0 changes no sum that began with +0.
        steps = np.concatenate([own, np.full(-own.size % 1024, -0.0)]).reshape(-1, 32, 32)
        lanes = np.zeros((len(steps), 32))
        for step in range(32):
            lanes = lanes + steps[:, step]
        while lanes.shape[1] > 1:
            lanes = lanes[:, 0::2] + lanes[:, 1::2]
        part = 0.0
        for chunk in lanes[:, 0].tolist():
            part += chunk
        total += part
    return total


def test_the_sums_of_a_wide_row_are_those_of_its_stretches_in_order(tmp_path):
    columns = 3 * 262_144 + 1025
    tensors = layer((1, columns), types=("F64",) * 3, statistics=False, seed=3)
    path = write(tmp_path / "x", tensors)
    layernorm_backward(path, fsync=False)
    (x,), (y_grad,), scale = tensors["X"], tensors["Y_grad"], tensors["scale"]

    def x_grad(stretch):
        mean = summed(x, stretch) / columns
        r = 1 / np.sqrt(summed((x - mean) ** 2, stretch) / columns + 1e-5)
        xh, weighted = (x - mean) * r, y_grad * scale
        means = summed(weighted, stretch) / columns, summed(weighted * xh, stretch) / columns
        return ((weighted - means[0] - xh * means[1]) * r).tobytes()

    assert gradients(path)["X_grad"].tobytes() == x_grad(262_144)
    # The order decides bits here, or nothing would be tested.
    assert x_grad(262_144) != x_grad(columns)


def test_many_narrow_rows_make_several_groups(tmp_path):
    tensors = layer((300_000, 1), types=("BF16", "F32", "F32"))
    tensors |= {f"wider.{name}": array for name, array in layer((30_001, 19)).items()}
    path = write(tmp_path / "x", tensors)
    layernorm_backward(path, fsync=False)
    found = read(path)
    for prefix, dtype in (("", "BF16"), ("wider.", "F32")):
        expected = reference({name: tensors[prefix + name] for name in layer((1, 1))}, **FORMS["layernorm"])
        assert_all({name: found[prefix + name] for name in expected}, expected, dtype, "F32")
