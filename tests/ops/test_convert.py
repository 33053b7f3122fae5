"""Clipped tensors in another storage type: `clip --dtype`."""

import json
import math

import numpy as np
import pytest
from support import VALUE_TYPES, bits_of, encode, gaussian, gradtool, read, rounded_once, write, write_index

from gradtool import NonFiniteError, clip, info, norm, tuning
from gradtool.reduction import TILE


def converted(array, factor, dtype):
    """The products of an array and a factor, which is rounded as in any clipping, rounded once to a type."""
    factor = factor if array.dtype == np.float64 else float(np.float32(factor))
    with np.errstate(all="ignore"):
        return rounded_once(array.astype(np.float64) * factor, dtype)


@pytest.mark.parametrize("old", VALUE_TYPES)
@pytest.mark.parametrize("new", VALUE_TYPES)
def test_every_type_becomes_every_other_with_one_rounding(tmp_path, old, new):
    array = gaussian(2 * TILE + 37, old)
    path = write(tmp_path / "x", {"a": array}, {"step": "3"})
    before = path.read_bytes()
    result = clip(path, max_norm=0.5, output=tmp_path / "y", dtype=new)
    found = read(tmp_path / "y")["a"]
    assert np.array_equal(bits_of(found), bits_of(converted(array, result.coef, new)))
    assert result.norm_after == norm(tmp_path / "y").norm
    assert (result.zeros, result.zeros_before) == (np.count_nonzero(found == 0), np.count_nonzero(array == 0))
    assert info(tmp_path / "y").per_metadata[0].value == "3"
    assert path.read_bytes() == before
    dry = clip(path, max_norm=0.5, output=tmp_path / "z", dtype=new, dry_run=True)
    assert (dry.norm_after, dry.zeros, dry.output.files_written) == (result.norm_after, result.zeros, 0)
    assert not (tmp_path / "z").exists()


def test_below_the_limit_it_is_a_conversion_that_rounds_once(tmp_path):
    # In F32 first, the value would be a tie of F16, and become 1.
    array = np.array([1 + 2**-11 + 2**-40, -0.0, 1e-3, math.pi])
    path = write(tmp_path / "x", {"a": array})
    result = clip(path, max_norm=10, output=tmp_path / "y", dtype="F16")
    found = read(tmp_path / "y")["a"]
    assert found.tolist() == rounded_once(array, "F16").tolist()
    assert found[0] == 1 + 2**-10
    assert np.signbit(found[1])
    assert (result.clipped, result.output.files_written) == (False, 1)
    clip(path, max_norm=10, output=tmp_path / "z", dtype="F32")
    assert read(tmp_path / "z")["a"].tobytes() == array.astype(np.float32).tobytes()


def test_what_is_not_selected_stays_and_every_tensor_is_aligned(tmp_path):
    tensors = {
        "a": gaussian(5, "F16"),
        "b": encode([1.5] * 3, "BF16"),
        "c": gaussian(7, "F16"),
        "d": gaussian(3, "F8_E5M2"),
    }
    path = write(tmp_path / "x", tensors)
    clip(path, max_norm=1e9, output=tmp_path / "y", dtype="F32", include=["a", "d"])
    found = read(tmp_path / "y")
    assert {name: str(array.dtype) for name, array in found.items()} == {
        "a": "float32",
        "d": "float32",
        "b": "bfloat16",
        "c": "float16",
    }
    for name, array in tensors.items():
        assert np.array_equal(found[name].astype(float), array.astype(float)), name
    content = (tmp_path / "y").read_bytes()
    entries = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert all(entries[name]["data_offsets"][0] % array.dtype.itemsize == 0 for name, array in found.items())


def test_a_file_that_has_the_type_already_keeps_its_header(tmp_path):
    path = write(tmp_path / "x", {"a": encode([3, 4], "F32")}, padding=13)
    clip(path, max_norm=1, output=tmp_path / "y")
    clip(path, max_norm=1, output=tmp_path / "z", dtype="F32")
    assert (tmp_path / "y").read_bytes() == (tmp_path / "z").read_bytes()


def test_sets_and_several_files_are_converted_and_the_index_has_the_new_size(tmp_path):
    shards = {
        "1.safetensors": {"a": gaussian(TILE + 5, "F16")},
        "2.safetensors": {"b": gaussian(3, "BF16"), "e": gaussian(0, "F16")},
    }
    index = write_index(tmp_path / "set", shards)
    document = json.loads(index.read_text()) | {"metadata": {"total_size": 2 * (TILE + 8), "note": "x"}}
    index.write_text(json.dumps(document))
    other = write(tmp_path / "other.safetensors", {"c": gaussian(9, "F64")})
    result = clip([tmp_path / "set", other], max_norm=0.1, output_dir=tmp_path / "out", dtype="F32")
    for name, array in {**shards["1.safetensors"], **shards["2.safetensors"], "c": read(other)["c"]}.items():
        home = {"a": "1.safetensors", "c": "other.safetensors"}.get(name, "2.safetensors")
        assert np.array_equal(read(tmp_path / "out" / home)[name], converted(array, result.coef, "F32")), name
    written = json.loads((tmp_path / "out" / index.name).read_text())
    assert written["metadata"] == {"total_size": 4 * (TILE + 8), "note": "x"}
    assert written["weight_map"] == document["weight_map"]
    assert norm([tmp_path / "out" / index.name, tmp_path / "out/other.safetensors"]).norm == result.norm_after


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_value": 0.1}, [3e-6, -0.1, 0.1, 0]),
        ({"max_norm": 1e9, "unscale": 1024}, [3e-6 / 1024, -1 / 1024, 3 / 1024, 0]),
        ({"max_norm": 0, "per_tensor": True}, [0, -0.0, 0, 0]),
        ({"group": ["a:1e9"]}, [3e-6, -1, 3, 0]),
        ({"limit": "z=3", "state": "state"}, [3e-6, -1, 3, 0]),
    ],
)
def test_every_way_to_clip_is_converted(tmp_path, monkeypatch, options, expected):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "x", {"a": encode([3e-6, -1, 3, 0], "F32")})
    result = clip(path, output=tmp_path / "y", dtype="F64", **options)
    assert read(tmp_path / "y")["a"].tolist() == pytest.approx(expected, rel=1e-7)
    assert result.call.warnings == ()


def test_dropped_values_and_propagated_ones_are_converted(tmp_path):
    path = write(tmp_path / "x", {"a": encode([1, math.nan, -math.inf, 0], "F16")})
    result = clip(path, max_norm=9, output=tmp_path / "y", dtype="F32", nonfinite="zero")
    assert read(tmp_path / "y")["a"].tolist() == [1, 0, 0, 0]
    assert (result.zeros, result.zeros_before, result.call.warnings) == (3, 1, ())
    clip(path, max_value=2, output=tmp_path / "z", dtype="F64", nonfinite="propagate")
    assert np.array_equal(read(tmp_path / "z")["a"], [1, math.nan, -2, 0], equal_nan=True)


@pytest.mark.parametrize("new", ["F32", "F64", "BF16"])
@pytest.mark.parametrize("old", ["F64", "F16"])
def test_units_are_scaled_by_the_same_factors_and_converted(tmp_path, monkeypatch, old, new):
    monkeypatch.setattr(tuning, "BLOCK_BYTES", 8 * TILE)
    rng = np.random.default_rng(2)
    grads = {
        "w": encode(rng.standard_normal((5, TILE // 2 + 11)), old),
        "v": encode(rng.standard_normal((300, 7)), old),
    }
    path = write(tmp_path / "x", grads)
    params = write(tmp_path / "p", {name: encode(rng.standard_normal(a.shape), "F32") for name, a in grads.items()})
    result = clip(path, agc=0.3, params=params, output=tmp_path / "y", dtype=new, unscale=2.0)
    found = read(tmp_path / "y")
    assert result.units_clipped > 200
    for name, array in grads.items():
        own = read(params)[name].astype(float)
        wide = array.astype(float)
        factors = np.minimum(1, 0.3 * np.linalg.norm(own, axis=1) / (np.linalg.norm(wide, axis=1) / 2)) / 2
        factors = factors if old == "F64" else factors.astype(np.float32).astype(float)
        places = {"F64": 1e-15, "F32": 2**-24, "BF16": 2**-8}
        # A factor may be another one in its last bit.
        assert np.allclose(
            found[name].astype(float), wide * factors[:, None], rtol=places[new] + 3e-7 * (old == "F16"), atol=0
        )
    if old == "F16":
        products = found["v"].astype(float) / np.where(grads["v"] == 0, 1, grads["v"]).astype(float)
        # The factors are float32, so products of F16 are exact in float64.
        assert new != "F64" or np.array_equal(products.astype(np.float32).astype(float), products)


def test_a_value_that_overflows_the_new_type_is_an_error_that_names_the_tensor(tmp_path):
    path = write(tmp_path / "x", {"a": encode([1], "F32"), "b": encode([2, 70_000], "F32")})
    with pytest.raises(NonFiniteError, match="overflow") as error:
        clip(path, max_norm=1e6, output=tmp_path / "y", dtype="F16")
    (problem,) = error.value.problems
    assert (problem.tensor, problem.file) == ("b", str(path))
    assert problem.message == "1 result overflows F16, the first at [1]"
    assert not (tmp_path / "y").exists()


def test_a_type_without_a_new_file_is_a_usage_error(tmp_path):
    path = write(tmp_path / "x", {"a": encode([1], "F32")})
    for more in ([], ["--agc", "1", "--params", path]):
        done = gradtool("clip", path, "--dtype", "F16", *(more or ["--max-norm", "1"]))
        assert (done.returncode, done.stderr) == (2, "gradtool: error: --dtype requires --output or --output-dir\n")


def test_what_the_new_type_loses_is_a_warning_and_f32_loses_nothing(tmp_path):
    values = np.ones(1000)
    values[:5] = 1e-9, 1e-9, 1e-5, 2.0**-15, 0
    path = write(tmp_path / "x", {"a": encode(values, "F32")})
    (warning,) = clip(path, max_norm=1e9, output=tmp_path / "y", dtype="F16").call.warnings
    assert warning.code == "underflow"
    # 2^-15 is subnormal, too, and exact.
    assert warning.message == (
        "of 999 values other than 0, 2 became 0 and 1 more than before are subnormal: too small for F16"
    )
    assert warning.hint == 'use dtype="F32" with output or output_dir to keep them'
    assert clip(path, max_norm=1e9, output=tmp_path / "y", dtype="F32").call.warnings == ()
