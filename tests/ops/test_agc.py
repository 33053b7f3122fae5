"""Adaptive clipping against the formula of the paper in float64, unit by unit."""

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support import VALUE_TYPES, encode, gaussian, gradtool, read, rounded_once, snapshot, write, write_index

from gradtool import BadInputError, NonFiniteError, SystemRefusedError, UsageError, clip, norm, tuning
from gradtool.ops.clip.units import FactorFile
from gradtool.reduction import TILE
from gradtool.store.io.channel import Channel


def agc(grad, param, ratio, eps=1e-3):
    """The clipped gradient and the norms' coefficients, over all axes but the first."""
    wide, own = grad.astype(np.float64), param.astype(np.float64)
    axes = tuple(range(1, grad.ndim)) if sum(size > 1 for size in grad.shape) > 1 else None
    norms = np.sqrt(np.sum(wide * wide, axis=axes, keepdims=True))
    limits = ratio * np.maximum(np.sqrt(np.sum(own * own, axis=axes, keepdims=True)), eps)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(norms > limits, limits / norms, 1.0)


def pair(folder, grads, params):
    return write(folder / "grads", grads), write(folder / "params", params)


def close(found, grad, coefs, dtype):
    """Whether a result is the product rounded once, up to the last bit of the coefficient."""
    work = np.float64 if dtype == "F64" else np.float32
    for near in (coefs, np.nextafter(coefs.astype(work), work(0)), np.nextafter(coefs.astype(work), work(2))):
        expected = rounded_once(grad.astype(np.float64) * near.astype(work).astype(np.float64), dtype)
        if np.array_equal(found, expected):
            return True
    return np.allclose(found.astype(float), grad.astype(float) * coefs, rtol=2e-15 if dtype == "F64" else 1e-6, atol=0)


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("theirs", ["F32", "BF16"])
def test_each_row_is_limited_by_that_of_its_parameters(tmp_path, dtype, theirs):
    shapes = {
        "linear": (33, 200),
        "conv": (8, 3, 5, 5),
        "bias": (77,),
        "gain": (64, 1, 1, 1),
        "scalar": (),
        "no": (0, 3),
    }
    rng = np.random.default_rng(5)
    grads = {name: encode(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    params = {name: encode(0.1 * rng.standard_normal(shape), theirs) for name, shape in shapes.items()}
    path, other = pair(tmp_path, grads, params)
    result = clip(path, agc=0.01, params=other)
    found = read(path)
    for name in shapes:
        coefs = agc(grads[name], params[name], 0.01)
        assert close(found[name], grads[name], coefs, dtype), name
    assert (result.units, result.clipped, result.agc, result.coef) == (33 + 8 + 3, True, 0.01, None)


def test_a_hand_computed_example(tmp_path):
    grads = {"w": encode([[3, 4], [0.03, 0.04], [6, 8]], "F64"), "b": encode([30, 40], "F64")}
    params = {"w": encode([[30, 40], [30, 40], [0, 0]], "F32"), "b": encode([60, 80], "F32")}
    path, other = pair(tmp_path, grads, params)
    result = clip(path, agc=0.05, params=other, agc_eps=2)
    found = read(path)
    # Limits: 0.05 · 50 = 2.5, twice; 0.05 · 2 = 0.1; 0.05 · 100 = 5.
    assert found["w"].tolist() == [[1.5, 2], [0.03, 0.04], pytest.approx([0.06, 0.08], rel=1e-15)]
    assert found["b"].tolist() == [3, 4]
    assert (result.units, result.units_clipped) == (4, 3)
    # As JSON needs it, and not numpy's.
    assert (type(result.units_clipped), type(result.clipped)) == (int, bool)
    assert result.norm_before == pytest.approx(math.sqrt(25 + 0.0025 + 100 + 2500), rel=1e-15)
    assert result.norm_after == pytest.approx(math.sqrt(6.25 + 0.0025 + 0.01 + 25), rel=1e-15)


def test_nothing_above_its_limit_is_written(tmp_path):
    path, other = pair(tmp_path, {"a": gaussian(100, "F32") * 0 + 0.01}, {"a": gaussian(100, "F32") * 0 + 1})
    before = path.stat()
    result = clip(path, agc=0.01, params=other)
    assert (result.clipped, result.units_clipped, result.output.files_written) == (False, 0, 0)
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_sharding_threads_and_ways_to_write_change_no_bit(tmp_path, monkeypatch):
    rng = np.random.default_rng(2)
    shapes = {"a": (700, 300), "b": (9, 70_000), "c": (70_001,), "d": (3, 4, 5)}
    grads = {name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}
    params = {name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}
    path, other = pair(tmp_path, grads, params)
    half = {name: grads[name] for name in ("c", "a")}
    write_index(tmp_path / "set", {"1.safetensors": half, "2.safetensors": {name: grads[name] for name in ("d", "b")}})
    copy = write(tmp_path / "copy", grads)
    clip(path, agc=0.01, params=other, threads=1)
    clip(tmp_path / "set", agc=0.01, params=other, threads=3)
    monkeypatch.setattr(tuning, "BLOCK_BYTES", 1 << 18)
    clip(copy, agc=0.01, params=other, write="inplace")
    assert copy.read_bytes() == path.read_bytes()
    sharded = read(tmp_path / "set" / "1.safetensors") | read(tmp_path / "set" / "2.safetensors")
    for name, array in read(path).items():
        assert array.tobytes() == sharded[name].tobytes()


@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16"])
@pytest.mark.parametrize("how", [{}, {"write": "inplace"}, {"write": "inplace", "unscale": 3}])
def test_units_that_lie_in_two_blocks(tmp_path, monkeypatch, dtype, how):
    # Blocks of a few tiles, of which one is written before the next is read.
    monkeypatch.setattr(tuning, "BLOCK_BYTES", TILE * 8)
    shapes = {"a": (30_001, 9), "b": (3, 65_535), "c": (2, TILE + 1), "d": (4, TILE), "e": (200_000,), "f": (700, 300)}
    rng = np.random.default_rng(3)
    grads = {name: encode(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    params = {name: encode(rng.standard_normal(shape), "F32") for name, shape in shapes.items()}
    path, other = pair(tmp_path, grads, params)
    clip(path, agc=0.1, params=other, threads=2, **how)
    unscale = how.get("unscale", 1)
    for name, found in read(path).items():
        coefs = agc(grads[name].astype(np.float64) / unscale, params[name], 0.1) / unscale
        assert np.mean(coefs < 1 / unscale) > 0.9
        assert close(found, grads[name], coefs, dtype), name


def test_the_first_unit_beyond_its_type_is_named(tmp_path):
    grads = {"a": encode(np.full((9, 9000), 1e30), "F32"), "b": encode([1e30], "F32")}
    params = {"a": encode(np.full((9, 9000), 1e-30), "F32"), "b": encode([1e-30], "F32")}
    path, other = pair(tmp_path, grads, params)
    messages = set()
    for threads in (1, 2):
        with pytest.raises(BadInputError) as caught:
            clip(path, agc=0.1, params=other, agc_eps=0, threads=threads)
        messages.add(str(caught.value))
        assert [one.tensor for one in caught.value.problems] == ["a"]
    assert len(messages) == 1


def test_a_unit_longer_than_a_patch(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "PATCH_ELEMENTS", 1000)
    grads = {"a": gaussian(7001, "F64").reshape(1, 7001), "b": gaussian(9000, "F64", seed=1).reshape(3, 3000)}
    params = {name: array * 0.25 for name, array in grads.items()}
    path, other = pair(tmp_path, grads, params)
    clip(path, agc=1, params=other)
    for name, array in read(path).items():
        assert np.allclose(array, grads[name] * 0.25, rtol=1e-15, atol=0)


@pytest.mark.parametrize("scale", [1e200, 1e-200, 5e-324])
def test_squares_may_leave_float64(tmp_path, scale):
    path, other = pair(tmp_path, {"a": encode([[3, 4]], "F64") * 1e3}, {"a": encode([[30, 40]], "F64")})
    write(path, {"a": np.array([[3 * scale, 4 * scale], [0, 0]])})
    write(other, {"a": np.array([[0.3 * scale, 0.4 * scale], [1, 1]])})
    result = clip(path, agc=0.1 if scale > 1e-300 else 1e6, params=other, agc_eps=0)
    if scale > 1e-300:
        assert np.allclose(read(path)["a"], [[0.03 * scale, 0.04 * scale], [0, 0]], rtol=1e-15, atol=0)
        assert result.units_clipped == 1


def test_a_loss_scale_is_divided_by_first(tmp_path):
    path, other = pair(tmp_path, {"a": encode([[300, 400], [3, 4]], "F32")}, {"a": encode([[3, 4], [3, 4]], "F32")})
    result = clip(path, agc=0.5, params=other, unscale=10)
    assert read(path)["a"].tolist() == [[1.5, 2.0], [np.float32(3) * np.float32(0.1), np.float32(4) * np.float32(0.1)]]
    assert (result.units_clipped, result.unscale) == (1, 10.0)


def problems_of(error, *arguments, **options):
    with pytest.raises(error) as caught:
        clip(*arguments, **options)
    return [(one.code, one.tensor, Path(one.file).name if one.file else None) for one in caught.value.problems]


def test_parameters_that_are_missing_or_of_another_shape_are_bad_input(tmp_path):
    grads = {"a": gaussian(4, "F32"), "b": gaussian(4, "F32"), "c": gaussian(4, "F32")}
    path, other = pair(tmp_path, grads, {"a": gaussian(4, "F32"), "b": gaussian(4, "F32").reshape(2, 2)})
    before = snapshot(tmp_path)
    assert problems_of(BadInputError, path, agc=0.1, params=other) == [
        ("shape", "b", "params"),
        ("missing-tensor", "c", "grads"),
    ]
    assert problems_of(BadInputError, path, agc=0.1, params=tmp_path / "none")[0][0] == "missing-file"
    write(tmp_path / "ints", {name: array.astype("i4") for name, array in grads.items()})
    assert problems_of(BadInputError, path, agc=0.1, params=tmp_path / "ints") == [("dtype", "a", "ints")]
    (tmp_path / "ints").unlink()
    assert snapshot(tmp_path) == before
    assert clip(path, agc=0.1, params=other, include="^a$").units == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_and_named(tmp_path, bad):
    good, ill = {"a": encode([1, 2], "F32")}, {"a": encode([1, bad], "F32")}
    path, other = pair(tmp_path, good, ill)
    assert problems_of(NonFiniteError, path, agc=0.1, params=other) == [("nonfinite", "a", "params")]
    path, other = pair(tmp_path, ill, good)
    assert problems_of(NonFiniteError, path, agc=0.1, params=other) == [("nonfinite", "a", "grads")]
    assert np.array_equal(read(path)["a"], ill["a"], equal_nan=True)


def test_propagate_does_what_the_formula_does(tmp_path):
    grads = {"a": encode([[1, math.nan], [3, 4], [math.inf, 1]], "F32")}
    path, other = pair(tmp_path, grads, {"a": encode([[1, 1], [3, 4], [1, 1]], "F32")})
    clip(path, agc=0.1, params=other, nonfinite="propagate")
    nan = math.nan
    assert np.array_equal(read(path)["a"], encode([[nan, nan], [0.3, 0.4], [nan, 0]], "F32"), equal_nan=True)


@pytest.mark.parametrize(
    "options",
    [
        {"params": None},
        {"agc": None},
        {"agc": 0},
        {"agc": -1},
        {"agc": math.nan},
        {"agc": math.inf},
        {"agc_eps": -1},
        {"max_norm": 1},
        {"max_value": 1},
        {"per_tensor": True},
        {"total_norm": 1},
        {"norm_type": 1},
        {"nonfinite": "zero"},
        {"params": ""},
        {"engine": "dask:tcp://127.0.0.1:1"},
    ],
)
def test_what_makes_no_sense_is_a_usage_error(tmp_path, options):
    path, other = pair(tmp_path, {"a": gaussian(4, "F32")}, {"a": gaussian(4, "F32")})
    before = snapshot(tmp_path)
    assert problems_of(UsageError, path, **({"agc": 0.1, "params": other} | options))[0][0] == "usage"
    assert snapshot(tmp_path) == before


def test_a_coefficient_beyond_its_type_is_bad_input(tmp_path):
    path, other = pair(tmp_path, {"a": encode([1e30], "F32")}, {"a": encode([1e-30], "F32")})
    assert problems_of(BadInputError, path, agc=0.1, params=other, agc_eps=0) == [("input", "a", "grads")]


@pytest.mark.parametrize("options", [["--output", "w/a"], ["--output-dir", "w"], ["--write", "inplace"]])
def test_parameters_are_not_replaced_by_gradients(tmp_path, options):
    tensors = {"t": encode([3, 4], "F32")}
    path, params = write(tmp_path / "a", tensors), write(tmp_path / "w" / "a", tensors)
    if "inplace" in options:
        params = path
    before = snapshot(tmp_path)
    done = gradtool("clip", path, "--agc", "0.01", "--params", params, *options, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(": is a file of --params, which would be replaced\n  hint: write to another file\n")
    assert snapshot(tmp_path) == before


def test_an_index_of_parameters_is_never_replaced(tmp_path):
    shard = {"t": encode([3, 4], "F32")}
    grads = write_index(tmp_path / "grads", {"g.safetensors": shard})
    params = write_index(tmp_path / "params", {"p.safetensors": shard})
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match="is a file of params"):
        clip(grads, agc=0.01, params=params, output_dir=tmp_path / "params")
    assert snapshot(tmp_path) == before


def test_dry_run_and_output_leave_the_input(tmp_path):
    path, other = pair(tmp_path, {"a": encode([3, 4], "F32")}, {"a": encode([3, 4], "F32")})
    before = snapshot(tmp_path)
    assert clip(path, agc=0.5, params=other, dry_run=True).norm_after == 2.5
    assert snapshot(tmp_path) == before
    clip(path, agc=0.5, params=other, output=tmp_path / "new")
    assert read(tmp_path / "new")["a"].tolist() == [1.5, 2.0]
    assert norm(path).norm == 5.0


def test_a_factor_is_computed_once_though_parameters_change_between_the_passes(tmp_path):
    grads = gaussian(200_000, "F32").reshape(2000, 100)
    path, other = pair(tmp_path, {"a": grads}, {"a": grads * 2})
    titles = []

    def change(title, *_):
        if title == "clipping" and title not in titles:
            write(other, {"a": grads * 3})
        titles.append(title)

    clip(path, agc=0.1, params=other, progress=change)
    assert "clipping" in titles
    coefs = agc(grads, grads * 2, 0.1)
    assert close(read(path)["a"], grads, coefs, "F32")


def test_a_temporary_file_that_lost_its_end_is_an_error():
    with closing(FactorFile([])) as file:
        file.write(0, 0, memoryview(bytearray(24)).cast("d"))
        with pytest.raises(SystemRefusedError, match="became shorter while it was read"):
            file.read(0, 1, memoryview(bytearray(24)).cast("d"))


def test_a_block_of_many_tensors_asks_for_as_much_memory_as_one_of_few(tmp_path, monkeypatch):
    requests, memory = [], Channel.memory
    monkeypatch.setattr(Channel, "memory", lambda channel, nbytes: requests.append(nbytes) or memory(channel, nbytes))
    counts = []
    for tensors in (2, 300):
        path, params = pair(tmp_path, *[{f"t{n}": np.ones(2, np.float32) for n in range(tensors)}] * 2)
        clip(path, agc=0.01, params=params, threads=1)
        counts.append(len(requests))
        requests.clear()
    assert counts[0] == counts[1]
