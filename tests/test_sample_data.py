"""The sample data against what torch computed from it in float64."""

import json
from pathlib import Path

import pytest

import gradtool

SAMPLES = Path(__file__).parent.parent / "sample_data"
EXPECTED = json.loads((SAMPLES / "expected.json").read_text())
FINITE = [key for key, entry in EXPECTED.items() if "norm_2" in entry and entry["norm_2"] is not None]
# torch adds in another order than we do: 2e-15 was seen, for 27,651 elements.
REL = 1e-13


def paths_of(key):
    """The one path of an entry, or those joined by `+`, which are written without their suffix."""
    return [SAMPLES / (f"{part}.safetensors" if "+" in key else part) for part in key.split("+")]


def approx(value):
    return pytest.approx(value, rel=REL, abs=0)


@pytest.mark.parametrize("key", FINITE)
def test_norms_are_torchs(key):
    entry = EXPECTED[key]
    result = gradtool.norm(paths_of(key), per_tensor=True)
    assert result.norm == approx(entry["norm_2"])
    assert (result.tensors, result.elements, result.zeros) == (entry["tensors"], entry["elements"], entry["zeros"])
    for order in ("1", "3", "inf"):
        if f"norm_{order}" in entry:
            assert gradtool.norm(paths_of(key), norm_type=float(order)).norm == approx(entry[f"norm_{order}"])
    if "per_tensor" in entry:
        assert {row.name: row.norm for row in result.per_tensor} == {
            name: approx(value) for name, value in entry["per_tensor"].items()
        }


@pytest.mark.parametrize("key", FINITE)
def test_coefficients_are_torchs(key, tmp_path):
    result = gradtool.clip(paths_of(key), max_norm=1.0, output_dir=tmp_path / "out")
    assert result.coef == approx(EXPECTED[key]["coef"])
    assert result.norm_after == pytest.approx(1.0, rel=2e-3)


def test_the_loss_scale_is_divided_out(tmp_path):
    entry = EXPECTED["loss_scaled_f16.safetensors"]
    path = SAMPLES / "loss_scaled_f16.safetensors"
    result = gradtool.clip(path, max_norm=1.0, unscale=1024, output=tmp_path / "out")
    assert result.norm_before == approx(entry["unscaled_norm_2"])
    assert result.coef == approx(entry["unscaled_coef"])


def test_the_nan_is_found_where_it_is():
    entry = EXPECTED["nan.safetensors"]
    result = gradtool.norm(SAMPLES / "nan.safetensors", per_tensor=True)
    assert {problem.tensor: problem.message for problem in result.problems} == {
        name: f"{one['nan']} NaN, {one['inf']} Inf, the first at index {one['first_index']}"
        for name, one in entry["nonfinite"].items()
    }


def test_the_samples_are_small():
    assert sum(path.stat().st_size for path in SAMPLES.rglob("*") if path.is_file()) < 1_000_000
