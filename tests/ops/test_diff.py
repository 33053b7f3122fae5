"""How far apart two gradient sets are, against numpy's float64 and Python's exact arithmetic."""

import json
import math
import os
import re
from array import array
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
from same_results import facts_of, random_set
from support import (
    NUMPY_TYPES,
    SAMPLES,
    VALUE_TYPES,
    backends,
    encode,
    gaussian,
    gradtool,
    gradtool_json,
    read,
    snapshot,
    write,
    write_index,
)
from terminal import on_terminal

from gradtool import BadInputError, SystemRefusedError, UsageError, accumulate, diff, norm
from gradtool.backends.choose import choose as choose_backend
from gradtool.backends.differences import empty_differences
from gradtool.backends.values import NormSpec, Piece, Tolerance
from gradtool.engines import choose
from gradtool.engines.cluster.wire import packed, unpacked
from gradtool.ops.diff import comparison
from gradtool.ops.diff.comparison import Comparison
from gradtool.reduction import TILE
from gradtool.store.io.blocks import Block, Span

CALL_KEYS = {"backend", "backend_why", "threads", "engine", "workers", "hosts", "retries", "seconds", "timings"}


def f32(*values):
    return encode(values, "F32")


def two(folder, a, b):
    """Two files, of the tensors or of one array `a` each."""
    sides = ({"a": one} if isinstance(one, np.ndarray) else one for one in (a, b))
    return [write(folder / f"{name}.safetensors", one) for name, one in zip("ab", sides, strict=True)]


def figures(result):
    """All that does not depend on how it was computed."""
    values = asdict(result)
    values |= values.pop("call")
    return {key: repr(value) for key, value in values.items() if key not in CALL_KEYS | {"files"}}


def test_every_figure_of_small_vectors(tmp_path):
    a, b = two(tmp_path, {"x": f32(3, 0), "y": f32(1, 2, 5)}, {"y": f32(1, 4, 4), "x": f32(3, 0)})
    result = diff(a, b, per_tensor=True)
    assert result.rel_l2 == math.sqrt(5) / math.sqrt(9 + 33)
    assert result.cosine == (9 + 1 + 8 + 20) / math.sqrt(39 * 42)
    assert (result.max_abs_diff, result.max_abs_diff_tensor, result.max_abs_diff_index) == (2, "y", 1)
    assert (result.max_rel_diff, result.max_rel_diff_tensor, result.max_rel_diff_index) == (0.5, "y", 1)
    assert (result.max_ulp, result.max_ulp_tensor, result.max_ulp_index) == (1 << 23, "y", 1)
    assert (result.norm_a, result.norm_b) == (math.sqrt(39), math.sqrt(42))
    assert (result.differing, result.differing_bits, result.not_close, result.unmatched) == (2, 2, None, 0)
    assert (result.call.tensors, result.call.elements, result.call.bytes, result.call.files) == (2, 5, 40, 2)
    rows = {row.name: row for row in result.per_tensor}
    assert rows["x"].rel_l2 == rows["x"].differing == 0
    assert (rows["x"].cosine, rows["x"].max_abs_diff_index, rows["x"].max_ulp_index) == (1, None, None)
    assert (rows["y"].rel_l2, rows["y"].shape, rows["y"].dtype_a) == (math.sqrt(5) / math.sqrt(33), (3,), "F32")
    assert result.problems == ()


@pytest.mark.parametrize("seed", range(8))
def test_any_types_and_shards_have_the_figures_of_numpy(tmp_path, seed):
    sizes = random_set(tmp_path / "a", seed)
    random_set(tmp_path / "b", seed + 100, like=sizes, prefix="other")
    result = diff(tmp_path / "a", tmp_path / "b", per_tensor=True)
    a, b = (
        {n: one.astype(np.float64).ravel() for file in (tmp_path / side).glob("*.safetensors")
         for n, one in read(file).items()} for side in "ab"
    )  # fmt: skip
    rows = {row.name: row for row in result.per_tensor}
    assert set(rows) == set(a)
    vectors = [(rows[name], a[name], b[name]) for name in a]
    vectors.append((result, np.concatenate([a[name] for name in a]), np.concatenate([b[name] for name in a])))
    for found, x, y in vectors:
        gap = np.abs(x - y)
        near = {"rel": 1e-12, "abs": 0}
        assert found.norm_a == pytest.approx(np.linalg.norm(x), **near)
        assert found.norm_b == pytest.approx(np.linalg.norm(y), **near)
        if x.size and y.any():
            assert found.rel_l2 == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y), **near)
            assert found.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-9, abs=1e-12)
        assert found.max_abs_diff == gap.max(initial=0)
        with np.errstate(all="ignore"):
            quotients = np.where(gap == 0, 0, gap / np.abs(y))
        assert found.max_rel_diff == quotients.max(initial=0)
        assert found.differing == np.count_nonzero(gap)
    for row in rows.values():
        if row.max_abs_diff:
            assert row.max_abs_diff_index == int(np.argmax(np.abs(a[row.name] - b[row.name])))
    name, index = result.max_abs_diff_tensor, result.max_abs_diff_index
    assert abs(a[name][index] - b[name][index]) == result.max_abs_diff
    assert result.norm_a == norm(tmp_path / "a").norm
    assert result.norm_b == norm(tmp_path / "b").norm


def sharded(folder, tensors, count):
    write_index(folder, {f"{i}.safetensors": dict(list(tensors.items())[i::count]) for i in range(count)})
    return folder


@pytest.mark.parametrize("types", [("F32", "F32"), ("F64", "BF16"), ("F8_E5M2", "F16")])
def test_the_bits_are_the_same_for_any_shards_threads_blocks_and_order(tmp_path, monkeypatch, types):
    sizes = {f"t{i}": size for i, size in enumerate((5, 3 * TILE + 1, 70_000, TILE, 0, 1, 9 * TILE))}
    a, b = (
        {name: gaussian(size, dtype, seed=seed + i) for i, (name, size) in enumerate(sizes.items())}
        for seed, dtype in zip((1, 50), types, strict=True)
    )
    plain = two(tmp_path, a, b)
    expected = figures(diff(*plain))
    there = sharded(tmp_path / "s3", a, 3), sharded(tmp_path / "s2", dict(reversed(b.items())), 2)
    for block_bytes in (1 << 21, TILE * 8):
        monkeypatch.setattr("gradtool.tuning.BLOCK_BYTES", block_bytes)
        for threads in (1, 2, 5):
            for paths in (plain, there, (there[0], plain[1])):
                assert figures(diff(*paths, threads=threads)) == expected


@pytest.mark.parametrize("name", [one for one in backends() if one not in {"compiled", "cuda"}])
def test_every_backend_finds_the_same(tmp_path, monkeypatch, name):
    try:
        backend = backends()[name]()
    except ImportError as error:
        pytest.skip(str(error))
    random_set(tmp_path / "a", 3)
    random_set(tmp_path / "b", 4, like=[5, 70_000, 1, 2049, 30_000, 0, 1, TILE])
    options = {"missing": "skip", "per_tensor": True, "rtol": 0.1, "atol": 1e-6, "bits": True}
    expected = figures(diff(tmp_path / "a", tmp_path / "b", **options))
    monkeypatch.setattr("gradtool.ops.call.choose", lambda chosen, progress: _with(backend, chosen, progress))
    assert figures(diff(tmp_path / "a", tmp_path / "b", **options)) == expected


def _with(backend, chosen, progress):
    engine, choice = choose.choose(chosen, progress)
    engine.backend = backend
    return engine, choice


@pytest.mark.parametrize("part", [0, 1 << 10, 1 << 40])
def test_one_block_is_compared_with_several_files_in_any_order(tmp_path, monkeypatch, part):
    monkeypatch.setattr(comparison, "_PART_BYTES", part)
    rng = np.random.default_rng(12)
    kinds = [VALUE_TYPES[number % 6] for number in range(40)]
    a = {f"t{number:02d}": gaussian(rng.choice([0, 1, 37, 5000, 70_001]), kind) for number, kind in enumerate(kinds)}
    b = {name: encode(one.astype(np.float64) * 1.01, rng.choice(VALUE_TYPES)) for name, one in a.items()}
    names = list(rng.permutation(list(b)))
    shards = {f"{at}.safetensors": {name: b[name] for name in names[at::4]} for at in range(4)}
    paths = write(tmp_path / "a.safetensors", a), write_index(tmp_path / "b", shards)
    found = [diff(*paths, per_tensor=True, threads=threads) for threads in (1, 3)]
    monkeypatch.setattr(type(choose_backend("cpu").backend), "reads_files", lambda *_: False)
    expected = diff(*paths, per_tensor=True)
    assert [figures(one) for one in found] == [figures(expected)] * 2


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("reads", [True, False])
def test_the_file_that_is_cut_short_while_both_are_compared_is_named(tmp_path, monkeypatch, side, reads):
    if not reads:
        monkeypatch.setattr(type(choose_backend("cpu").backend), "reads_files", lambda *_: False)
    paths = two(tmp_path, np.ones(3_000_000, np.float32), np.ones(3_000_000))
    # Both have been read from by the second call.
    calls = [lambda: os.truncate(paths[side], 9_000_000), lambda: None]
    with pytest.raises(SystemRefusedError, match="became shorter while it was read; run the command again") as caught:
        diff(*paths, threads=1, progress=lambda *_: calls.pop()() if calls else None)
    assert [problem.file for problem in caught.value.problems] == [str(paths[side])]


def test_a_file_that_changes_while_it_is_compared_is_named(tmp_path):
    paths = two(tmp_path, np.ones(10, np.float32), np.ones(10))
    with pytest.raises(SystemRefusedError, match="changed") as caught:
        diff(*paths, threads=1, progress=lambda *_: os.utime(paths[1], ns=(0, 0)))
    assert [problem.file for problem in caught.value.problems] == [str(paths[1])]


def test_a_file_and_itself(tmp_path):
    path = write(tmp_path / "x", {"a": gaussian(70_000, "BF16"), "nan": f32(math.nan, math.inf, 1)})
    result = diff(path, path, bits=True, rtol=0, atol=0, max_ulp=0, max_rel_l2=0, min_cosine=1)
    assert (result.rel_l2, result.cosine, result.differing, result.problems) == (0, 1, 0, ())
    assert (result.nonfinite_a, result.nonfinite_b, result.nonfinite_both) == (0, 0, 2)
    assert (result.max_abs_diff, result.max_abs_diff_tensor, result.max_abs_diff_index) == (0, None, None)


ZEROS = {"both": (f32(0, -0.0), f32(0, 0), 0, 1), "a": (f32(0, 0), f32(3, 4), 1, 0)}
ZEROS |= {"b": (f32(3, 4), f32(0, 0), math.inf, 0), "empty": (f32(), f32(), 0, 1)}
ZEROS |= {"scalars": (np.array(3, np.float32), np.array(4, np.float32), 0.25, 1)}


@pytest.mark.parametrize("name", ZEROS)
def test_vectors_of_zeros_and_of_nothing(tmp_path, name):
    a, b, rel_l2, cosine = ZEROS[name]
    result = diff(*two(tmp_path, a, b))
    assert (result.rel_l2, result.cosine) == (rel_l2, cosine)


def test_norms_beyond_float64_have_figures_all_the_same(tmp_path):
    values = np.full(1000, 1.5e308)
    result = diff(*two(tmp_path, values, values * np.where(np.arange(1000) < 500, 1, -1)))
    assert (result.norm_a, result.norm_b, result.max_abs_diff) == (math.inf, math.inf, math.inf)
    assert result.rel_l2 == pytest.approx(math.sqrt(2), rel=1e-15)
    assert result.cosine == 0
    tiny = diff(*two(tmp_path, values * 0 + 3e-320, values * 0 + 2e-320))
    assert tiny.rel_l2 == pytest.approx(0.5, rel=1e-3)
    assert tiny.cosine == 1


def test_tiny_differences_of_large_vectors_have_figures(tmp_path):
    for a, b, rel_l2 in [
        ([1.0, 0.0], [1.0, 5e-324], 5e-324),
        ([1e10, 1e-300], [1e10, 2e-300], 1e-310),
        ([1.7e308], [-1.7e308], 2.0),
        ([1.7e308, 1e-300], [-1.7e308, 0.0], 2.0),
    ]:
        result = diff(*two(tmp_path, np.array(a), np.array(b)))
        assert (result.rel_l2, abs(result.cosine)) == (rel_l2, 1.0)
    assert gradtool("diff", *two(tmp_path, np.array([1.0, 0.0]), np.array([1.0, 5e-324]))).returncode == 0


def comparison_of(sums, exponents):
    """That of one tensor, whose tiles have these sums and exponents."""
    found, tiles = empty_differences([Piece("F32", 0, TILE)] * len(sums)), len(sums)
    found = found._replace(sums=array("d", sums.ravel()), exponents=array("i", exponents.ravel()))
    whole = Comparison([None])
    whole.add(Block(None, 0, 0, [Span(0, "F64", 0, tiles * TILE, 0)]), found)
    return whole


def figures_of(sums, exponents):
    """The figures of tiles, in two parts, one of which comes from another process."""
    half = len(sums) // 2
    whole, part = comparison_of(sums[:half], exponents[:half]), comparison_of(sums[half:], exponents[half:])
    whole.merge_part([(0, 0)], unpacked(packed(part.compact()), Comparison([None])))
    assert whole.metrics() == whole.metrics(0) == comparison_of(sums, exponents).metrics()
    return whole.metrics()


def test_what_is_stored_does_not_grow_with_the_tensors():
    rng, tiles = np.random.default_rng(2), 2500
    sums, exponents = rng.random((tiles, 4)), rng.choice([0, 0, 300, -300], (tiles, 3)).astype(np.int32)
    whole = comparison_of(sums, exponents)
    for _ in range(15):
        whole.merge_part([(0, 0)], comparison_of(sums, exponents))
        assert max(len(one.sums) for one in whole.tile_sums) <= 1 << 13
    # Sixteen times each sum, so that norms are four times as large to the last bit.
    assert whole.metrics()[:2] == comparison_of(sums, exponents).metrics()[:2]


@pytest.mark.parametrize("seed", range(20))
def test_figures_are_those_of_exact_arithmetic(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 2000))
    sums = np.abs(rng.standard_normal((count, 4))) * 10.0 ** rng.integers(-200, 200, (count, 4))
    exponents = rng.choice([0, 0, 300, -300], (count, 3)).astype(np.int32)
    figures = figures_of(sums, exponents)
    scales = np.column_stack([2 * exponents, exponents[:, 1] + exponents[:, 2]]).tolist()
    gaps, a, b, products = (
        sum(Fraction(float(value)) * Fraction(2) ** scale[which] for value, scale in zip(column, scales, strict=True))
        for which, column in enumerate(sums.T)
    )
    assert figures.rel_l2**2 == pytest.approx(float(gaps / b), rel=1e-14)
    for norm_, square in ((figures.norm_a, a), (figures.norm_b, b)):
        shift = 2 * (math.frexp(norm_)[1] - 1)
        assert (norm_ / 2.0 ** (shift // 2)) ** 2 == pytest.approx(float(square / Fraction(2) ** shift), rel=1e-14)
    assert figures.cosine == pytest.approx(min(1.0, float(products**2 / (a * b)) ** 0.5), rel=1e-14)


def test_negative_products_are_added_exactly():
    sums = np.array([[0, 1, 1, 2.0**60], [0, 1, 1, -(2.0**60)], [0, 1, 1, -1.5]] * 200)
    assert figures_of(sums, np.zeros((600, 3), np.int32)).cosine == -300 / 600


def test_many_small_tensors_are_compared_in_blocks(tmp_path):
    a = {f"t{i:05}": f32(i, 1) for i in range(9000)}
    b = {name: array + (f32(0, 1) if name == "t08999" else f32(0, 0)) for name, array in a.items()}
    result = diff(*two(tmp_path, a, dict(reversed(b.items()))), top=1)
    assert (result.differing, result.max_abs_diff_tensor, result.max_abs_diff_index) == (1, "t08999", 1)
    assert [row.name for row in result.per_tensor] == ["t08999"]


def test_of_equal_maxima_the_first_name_is_named_whatever_the_order(tmp_path):
    names = ["c", "a", "b"]
    for order in (names, names[::-1]):
        a, b = two(tmp_path, {n: f32(1, 2, 2) for n in order}, {n: f32(1, 1, 1) for n in names})
        result = diff(a, b)
        assert (result.max_abs_diff_tensor, result.max_abs_diff_index) == ("a", 1)


# ---- NaN and Inf


def test_nan_on_one_side_only_warns_and_fails_every_gate(tmp_path):
    a, b = two(tmp_path, {"a": f32(1, math.nan, math.inf, 2), "b": f32(1)}, {"a": f32(1, 5, math.inf, 2), "b": f32(1)})
    result = diff(a, b)
    assert (result.nonfinite_a, result.nonfinite_b, result.nonfinite_both, result.differing) == (1, 0, 1, 1)
    assert (result.rel_l2, result.norm_b, result.problems) == (0, math.sqrt(6), ())
    assert [(one.code, one.tensor) for one in result.call.warnings] == [("nonfinite", "a")]
    for gate in ({"rtol": 1.0}, {"max_ulp": 10**9}, {"max_rel_l2": 9.0}, {"min_cosine": -1.0}, {"bits": True}):
        result = diff(a, b, **gate)
        assert ("nonfinite", "a") in [(one.code, one.tensor) for one in result.problems], gate
        assert result.call.warnings == ()
    assert diff(b, a, rtol=1).nonfinite_b == 1


def test_what_the_figures_leave_out_is_told_beside_them(tmp_path):
    a, b = two(tmp_path, f32(1, math.nan, math.inf, 2), f32(1, 5, math.inf, 2))
    told = {"nonfinite_a": 1, "nonfinite_b": 0, "nonfinite_both": 1}
    lines = dict(line.split("\t", 1) for line in gradtool("diff", a, b).stdout.splitlines())
    assert {key: int(lines[key]) for key in told} == told
    data = gradtool_json("diff", a, b, "--per-tensor")["data"]
    assert all(row[key] == count for row in (data, data["per_tensor"][0]) for key, count in told.items())
    shown = on_terminal("diff", a, b, "--per-tensor", columns=80, errors=False)[1]
    facts = [line.rsplit(None, 1) for line in re.sub("\x1b[^m]*m", "", shown).replace("\r", "").splitlines() if line]
    assert all([key.replace("_", " "), str(count)] in facts for key, count in told.items())
    assert "nonfinite a" in shown[shown.index("name") :]


def test_top_has_those_with_nan_first(tmp_path):
    a, b = two(
        tmp_path,
        {"far": f32(9), "near": f32(1.1), "nan": f32(math.nan)},
        {"far": f32(1), "near": f32(1), "nan": f32(1)},
    )
    assert [row.name for row in diff(a, b, top=2).per_tensor] == ["nan", "far"]


# ---- gates


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16"])
def test_close_is_what_numpy_calls_close(tmp_path, seed, dtype):
    rng = np.random.default_rng(seed)
    a = gaussian(3000, dtype, seed)
    b = encode(a.astype(np.float64) * (1 + 1e-2 * rng.standard_normal(3000)), dtype)
    special = encode(rng.choice([math.nan, math.inf, -math.inf, 0], 40), dtype)
    a[:40], b[:40] = special, special if seed % 2 else special[::-1]
    rtol, atol = [(1e-2, 0.0), (0.0, 1e-4), (1e-3, 1e-6)][seed % 3]
    x, y = a.astype(np.float64), b.astype(np.float64)
    expected = np.count_nonzero(~np.isclose(x, y, rtol, atol, equal_nan=True))
    result = diff(*two(tmp_path, a, b), rtol=rtol, atol=atol)
    assert result.not_close == expected
    assert any(one.code == "different" for one in result.problems) == (expected > 0)


def test_one_of_rtol_and_atol_makes_the_other_0(tmp_path):
    paths = two(tmp_path, f32(1.5, 0.1), f32(1, 0))
    assert diff(*paths, rtol=0.5).not_close == 1
    assert diff(*paths, atol=0.1).not_close == 2
    assert diff(*paths, atol=0.5).problems == ()


def test_each_gate_passes_at_its_limit_and_fails_beyond(tmp_path):
    a, b = two(tmp_path, f32(3, 4, 1), f32(3, 4, 2))
    found = diff(a, b)
    below = math.nextafter(found.rel_l2, 0)
    gates = {"max_ulp": (1 << 23, (1 << 23) - 1), "max_rel_l2": (found.rel_l2, below)}
    gates["min_cosine"] = (found.cosine, math.nextafter(found.cosine, 2))
    for name, (passes, fails) in gates.items():
        assert diff(a, b, **{name: passes}).problems == ()
        (problem,) = diff(a, b, **{name: fails}).problems
        assert problem.code == "different"
    (problem,) = diff(a, b, bits=True).problems
    assert (problem.tensor, problem.message) == ("a", "1 of 3 values have different bits")


def test_bits_are_bytes(tmp_path):
    assert len(diff(*two(tmp_path, f32(0.0), f32(-0.0)), bits=True).problems) == 1
    assert diff(*two(tmp_path, f32(0.0), f32(-0.0)), rtol=0, max_ulp=0, max_rel_l2=0, min_cosine=1).problems == ()
    (problem,) = diff(*two(tmp_path, f32(1, 2), encode([1, 2], "BF16")), bits=True).problems
    assert problem.message == "has type F32, but BF16 in B, so the bytes differ"


def test_the_worst_tensors_come_first_and_the_exit_code_is_1(tmp_path):
    a, b = two(
        tmp_path,
        {"few": f32(1, 2, 3), "many": f32(5, 6, 7), "same": f32(1, 1, 1)},
        {"few": f32(1, 2, 4), "many": f32(1, 1, 1), "same": f32(1, 1, 1)},
    )
    before = snapshot(tmp_path)
    done = gradtool("diff", a, b, "--atol", "0.5", "--max-rel-l2", "0.1")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].endswith("; worst: 'many' (5.07), 'few' (0.218), 'same' (0)")
    assert "tensor 'many': 3 of 3 values differ by more than 0.5 + 0.0·|b|; max_abs_diff 6.0 at [2]" in lines[1]
    assert "tensor 'few': 1 of 3 values" in lines[2]
    assert len(lines) == 3
    assert gradtool("diff", a, b).returncode == 0
    assert snapshot(tmp_path) == before


# ---- names and shapes


def refused(a, b, **options):
    with pytest.raises(BadInputError) as caught:
        diff(a, b, **options)
    return [(one.code, one.tensor) for one in caught.value.problems], str(caught.value)


def test_names_and_shapes_that_do_not_match_are_all_named(tmp_path):
    a, b = two(
        tmp_path,
        {"both": f32(1), "ours": f32(1), "shape": np.ones((2, 3), np.float32)},
        {"both": f32(1), "theirs": f32(1), "more": f32(1), "shape": np.ones((3, 2), np.float32)},
    )
    problems, message = refused(a, b)
    assert problems == [
        ("extra-tensor", "ours"), ("missing-tensor", "theirs"), ("missing-tensor", "more"), ("shape", "shape"),
    ]  # fmt: skip
    assert 'use missing="skip" to compare only those whose names and shapes match' in message
    result = diff(a, b, missing="skip", bits=True)
    assert (result.call.tensors, result.unmatched, result.problems) == (1, 4, ())
    assert [(row.name, row.why, row.shape_a, row.shape_b) for row in result.per_unmatched] == [
        ("ours", "only a", (1,), None),
        ("theirs", "only b", None, (1,)),
        ("more", "only b", None, (1,)),
        ("shape", "shape", (2, 3), (3, 2)),
    ]
    assert gradtool("diff", a, b).returncode == 3


def test_skip_needs_something_that_is_left(tmp_path):
    a, b = two(tmp_path, {"a": f32(1)}, {"b": f32(1), "c": f32(1)})
    assert refused(a, b, missing="skip")[0] == [
        ("extra-tensor", "a"), ("missing-tensor", "b"), ("missing-tensor", "c"),
    ]  # fmt: skip


def test_integers_are_refused_by_name(tmp_path):
    a, b = two(tmp_path, {"a": f32(1), "ids": np.ones(2, np.int32)}, {"a": f32(1), "ids": np.ones(2, np.int32)})
    problems, message = refused(a, b)
    assert problems == [("dtype", "ids")]
    assert "exclude" in message
    assert diff(a, b, exclude="ids").call.tensors == 1


def test_map_renames_tensors_of_a_before_they_are_selected(tmp_path):
    a, b = two(
        tmp_path,
        {"module.x.scale_grad": f32(1), "module.y.scale_grad": f32(2)},
        {"x.weight": f32(1), "y.weight": f32(3)},
    )
    result = diff(a, b, map=[r"^module\.=", "scale_grad$=weight"], include=r"^y\.weight", per_tensor=True)
    assert [(row.name, row.max_abs_diff) for row in result.per_tensor] == [("y.weight", 1)]
    done = gradtool("diff", a, b, "--map", r"^module\.(.*)\.scale_grad=\1.weight", "--bits")
    assert (done.returncode, done.stderr.count("'y.weight'")) == (1, 1)


def test_a_prefix_is_named_with_the_option_that_removes_or_adds_it(tmp_path):
    long, short = two(tmp_path, {"module.a": f32(1), "module.b": f32(2)}, {"a": f32(1), "b": f32(2)})
    for paths, what in (((long, short), "to remove it"), ((short, long), "to add it")):
        done = gradtool("diff", *paths)
        assert done.returncode == 3
        line, hint = done.stderr.splitlines()
        assert "the prefix 'module.', which those of" in line
        assert hint.endswith(what)
        option = hint.split("--map '")[1].split("'")[0]
        assert diff(*paths, map=option, bits=True).problems == ()
        buffer = write(tmp_path / "buffer", read(paths[1]))
        done = gradtool("accumulate", paths[0], "--into", buffer)
        assert hint in done.stderr
        accumulate(paths[0], into=buffer, map=option)
        assert {name: array.tolist() for name, array in read(buffer).items()} == {
            name: (array * 2).tolist() for name, array in read(paths[1]).items()
        }


def test_a_buffer_is_created_with_the_new_names(tmp_path):
    grad = write(tmp_path / "g", {"module.a": f32(1, 2)})
    accumulate([grad], output=tmp_path / "new", map=r"^module\.=")
    assert read(tmp_path / "new")["a"].tolist() == [1, 2]


def test_wrong_maps_are_told(tmp_path):
    a, b = two(tmp_path, {"x.a": f32(1), "y.a": f32(2)}, {"a": f32(1), "b": f32(1)})
    for option, message in (
        ("abc", "must be REGEX=REPLACEMENT"),
        ("(=x", "is not a regular expression"),
        (r"x=\9", "is not a replacement"),
    ):
        with pytest.raises(UsageError, match=message):
            diff(a, b, map=option)
        assert gradtool("diff", a, b, "--map", option).returncode == 2
    assert refused(a, b, map="zzz=")[0] == [("no-match", None)]
    assert refused(a, b, map=r"^.\.=")[0] == [("duplicate-name", "y.a")]


# ---- output

KEYS = [
    "identical", "differing", "elements", "rel_l2", "cosine", "within_permille",
    "first_differing_tensor", "first_differing_index",
    "max_abs_diff", "max_abs_diff_tensor", "max_abs_diff_index", "max_abs_diff_a", "max_abs_diff_b",
    "max_rel_diff", "max_rel_diff_tensor", "max_rel_diff_index", "max_rel_diff_a", "max_rel_diff_b",
    "max_ulp", "max_ulp_tensor", "max_ulp_index", "max_ulp_a", "max_ulp_b",
    "nonfinite_a", "nonfinite_b", "nonfinite_both", "not_close", "unmatched", "differing_bits", "norm_a", "norm_b",
    "warnings", "files", "tensors", "bytes", "backend", "backend_why", "threads", "engine", "workers",
    "hosts", "retries", "seconds", "timings", "per_tolerance", "per_tensor", "per_unmatched", "per_rule",
]  # fmt: skip
ROW_KEYS = [
    "name", "file", "dtype_a", "dtype_b", "shape", "rel_l2", "cosine", "max_abs_diff", "max_abs_diff_index",
    "max_rel_diff", "max_rel_diff_index", "max_ulp", "max_ulp_index", "differing", "differing_bits", "not_close",
    "nonfinite_a", "nonfinite_b", "nonfinite_both", "norm_a", "norm_b",
]  # fmt: skip


def test_the_keys_of_json_are_pinned(tmp_path):
    a, b = two(tmp_path, {"a": np.array([1e308]), "x": f32(1)}, {"a": np.array([-1e308]), "y": f32(1)})
    answer = gradtool_json("diff", a, b, "--missing", "skip", "--per-tensor", "--max-rel-l2", "1")
    assert list(answer["data"]) == KEYS
    assert list(answer["data"]["per_tensor"][0]) == ROW_KEYS
    assert list(answer["data"]["per_unmatched"][0]) == ["name", "file", "why", "shape_a", "shape_b"]
    assert (answer["status"], answer["exit_code"], answer["errors"][0]["code"]) == ("found", 1, "different")
    assert (answer["data"]["max_abs_diff"], answer["data"]["rel_l2"]) == ("Infinity", 2.0)
    assert json.dumps(answer, allow_nan=False)


def test_a_distance_of_64_bits_is_printed_whole(tmp_path):
    paths = two(tmp_path, np.array([1.7e308]), np.array([-1.7e308]))
    assert gradtool_json("diff", *paths)["data"]["max_ulp"] == 2 * int(np.float64(1.7e308).view(np.int64)) > 2**63


def test_a_comparison_can_run_elsewhere_in_parts(tmp_path):
    """The parts of the pass cover it, and what they find fits together."""
    from gradtool.backends.cpu import NumpyBackend
    from gradtool.engines.threads import Threads
    from gradtool.ops.diff import pair
    from gradtool.ops.diff.comparison import Compare
    from gradtool.store.io.destination import DISCARD
    from gradtool.store.transaction.inputs import Inputs

    sizes = random_set(tmp_path / "a", 5)
    random_set(tmp_path / "b", 6, like=sizes)
    opened = Inputs([str(tmp_path / "a"), str(tmp_path / "b")]).open()
    a, b, _ = pair(opened, skip=False)
    one = Compare(a, NormSpec(), b, [Tolerance()] * len(a))
    expected = Threads(NumpyBackend()).run(one)
    whole = one.tally()
    for part in one.parts(DISCARD):
        whole.merge_part(part.places, Threads(NumpyBackend()).run(part.pass_).compact())
    assert whole.metrics() == expected.metrics()
    for name in whole.columns:
        assert getattr(whole, name).tolist() == getattr(expected, name).tolist()
    # Not even a lie has figures that fail.
    lies = [(0, -1.0, "negative"), (2, -1.0, "negative"), (3, math.inf, "not finite"), (1, math.nan, "not finite")]
    for which, value, message in lies:
        lie = part.pass_.tally()
        lie.tile_sums[which].extend([0], [value], [0])
        with pytest.raises(ValueError, match=message):
            whole.merge_part(part.places, lie)
    lie = part.pass_.tally()
    lie.tile_sums[1].extend([len(part.places)], [1.0], [0])
    with pytest.raises(ValueError, match="sums of other tensors"):
        whole.merge_part(part.places, lie)
    with pytest.raises(ValueError, match="other tensors"):
        whole.merge_part([(0, 0)] * (len(a) + 1), expected)


def test_the_samples_differ_as_their_values_do():
    result = diff(SAMPLES / "micro_0.safetensors", SAMPLES / "micro_1.safetensors")
    a, b = (read(SAMPLES / f"micro_{i}.safetensors") for i in (0, 1))
    x, y = (np.concatenate([one[name].astype(np.float64).ravel() for name in a]) for one in (a, b))
    assert result.rel_l2 == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y), rel=1e-13)
    assert {array.dtype for array in a.values()} <= set(NUMPY_TYPES.values())
    assert set(VALUE_TYPES) <= set(NUMPY_TYPES)
    assert facts_of(result)


def shown(*arguments, columns=80):
    code, text = on_terminal("diff", *arguments, columns=columns, errors=False)
    return code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()


def test_the_verdict_comes_first_and_never_rounds_up(tmp_path):
    a = np.ones(100_000, np.float32)
    b = a.copy()
    b[7] = 1.0005
    paths = two(tmp_path, a, b)
    code, lines = shown(*paths)
    assert (code, lines[:3]) == (
        0,
        [
            "1 of 100,000 elements differs, rel_l2 1.58102e-06",
            "within the usual tolerance of F32: 99.999 %",
            "within 0.1 % of b: 100 %",
        ],
    )
    assert "first difference  a [7]" in lines
    assert "max rel diff      0.000499714, a 1, b 1.0005, a [7]" in lines
    _, lines = shown(*paths, "--rtol", "0.0001", "--atol", "1e-8")
    assert lines[1] == "within rtol 0.0001 and atol 1e-08 in F32: 99.999 %"
    _, lines = shown(paths[0], paths[0])
    assert lines[0] == "identical: all 100,000 elements have the same bits"
    assert not [line for line in lines if line.startswith(("within", "max", "first", "rel"))]
    _, lines = shown(*two(tmp_path, f32(0.0, 1.0), f32(-0.0, 1.0)))
    assert lines[0] == "equal: all 2 elements have the same values; the bits of 1 differ"
    _, lines = shown(*two(tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(2)}), "--missing", "skip")
    assert lines[0] == "1 of 1 element differs, rel_l2 0.5; 1 tensor not compared"


def test_plain_lines_have_the_verdict_first_and_a_line_for_each_tolerance(tmp_path):
    paths = two(tmp_path, {"a": f32(1, 2), "b": encode([1.0], "BF16")}, {"a": f32(1, 3), "b": f32(1.0078125)})
    lines = [line.split("\t") for line in gradtool("diff", *paths).stdout.splitlines()]
    assert [line[:2] for line in lines[:3]] == [["identical", "no"], ["differing", "2"], ["elements", "3"]]
    assert lines[3][0] == "rel_l2"
    assert [line for line in lines if line[0] == "tolerance"] == [
        ["tolerance", "F32", "yes", "1.3e-06", "1e-05", "2", "1"],
        ["tolerance", "BF16", "yes", "0.016", "1e-05", "1", "1"],
    ]


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [
        ("F64", 1e-7, 1e-7),
        ("F32", 1.3e-6, 1e-5),
        ("F16", 1e-3, 1e-5),
        ("BF16", 1.6e-2, 1e-5),
        ("F8_E4M3", 0.125, 1e-5),
        ("F8_E5M2", 0.25, 1e-5),
    ],
)
def test_close_has_the_usual_tolerance_of_the_coarser_type(tmp_path, dtype, rtol, atol):
    b, limit = np.array([0.0, 0.0, 1.0, 1.0, math.nan]), rtol + atol
    a = b + np.array([0.9 * atol, 1.5 * atol, 0.99 * limit, 1.01 * limit, 0])
    b = encode(b, dtype)
    wide = a if dtype == "F64" else a.astype(np.float32)
    for sides in ((wide, b), (b, wide)):
        result = diff(*two(tmp_path, *sides), close=True)
        x, y = (side.astype(np.float64) for side in sides)
        outside = [abs(p - q) > atol + rtol * abs(q) for p, q in zip(x, y, strict=True)]
        (row,) = result.per_tolerance
        assert asdict(row) == {
            "dtype": dtype, "usual": True, "rtol": rtol, "atol": atol, "elements": 5, "close": 5 - sum(outside),
        }  # fmt: skip
        assert outside[:2] == [False, True]
        assert result.not_close == sum(outside)
        assert [problem.code for problem in result.problems] == ["different"]
    assert f"{atol!r} + {rtol!r}·|b|" in result.problems[0].line


def test_close_is_the_gate_of_the_command(tmp_path):
    close, far = f32(1.0, 1.000005), f32(1.0, 1.00005)
    assert gradtool("diff", *two(tmp_path, f32(1, 1), close), "--close").returncode == 0
    done = gradtool("diff", *two(tmp_path, f32(1, 1), far), "--close", "--quiet")
    assert (done.returncode, "1 of 2 values differ by more than 1e-05 + 1.3e-06·|b|" in done.stderr) == (1, True)
    for option in ("rtol", "atol"):
        with pytest.raises(UsageError, match=f"close cannot be combined with {option}"):
            diff("a", "b", close=True, **{option: 0.0})


def test_explicit_tolerances_are_those_that_are_counted(tmp_path):
    result = diff(*two(tmp_path, f32(1, 2, 4), f32(1, 2.5, 8)), rtol=0.25)
    assert asdict(result.per_tolerance[0]) == {
        "dtype": "F32", "usual": False, "rtol": 0.25, "atol": 0.0, "elements": 3, "close": 2,
    }  # fmt: skip
    assert (result.not_close, diff(*two(tmp_path, f32(1), f32(2))).not_close) == (1, None)


def test_the_share_within_a_permille_and_the_first_difference(tmp_path):
    a = {"z": f32(1000, 1000, 1000, 0, math.nan), "b": np.ones(3)}
    b = {"z": f32(1000, 1000.9, 1001.1, 1e-9, math.nan), "b": np.array([1.0, 1.0, 2.0])}
    result = diff(*two(tmp_path, a, b))
    assert result.within_permille == 5
    # In the order of the file.
    assert (result.first_differing_tensor, result.first_differing_index) == ("z", 1)
    assert (result.differing, result.identical) == (4, False)
    assert diff(*two(tmp_path, a, a)).first_differing_tensor is None


def test_maxima_come_with_the_values_of_both_sets(tmp_path):
    for a_type in VALUE_TYPES:
        for b_type in ("F64", a_type):
            a, b = encode([1, -3, 0.0625, 7], a_type), encode([1, 2, -0.015625, 6], b_type)
            result = diff(*two(tmp_path, a, b))
            assert (result.max_abs_diff_a, result.max_abs_diff_b) == (-3, 2), a_type
            assert (result.max_rel_diff_a, result.max_rel_diff_b) == (0.0625, -0.015625), a_type
            place = result.max_ulp_index
            assert (result.max_ulp_a, result.max_ulp_b) == (float(a[place]), float(b[place]))
    result = diff(*two(tmp_path, f32(1), f32(1)))
    assert (result.max_ulp_a, result.max_rel_diff_b, result.max_abs_diff_a) == (None, None, None)


def test_sets_with_a_tensor_left_out_are_not_identical(tmp_path):
    result = diff(*two(tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(1)}), missing="skip")
    assert (result.differing, result.differing_bits, result.identical) == (0, 0, False)
    assert diff(*two(tmp_path, f32(1), f32(1))).identical


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_the_value_of_a_code_is_that_of_numpy(dtype):
    from gradtool.backends.storage import STORAGE

    storage, kind = STORAGE[dtype], NUMPY_TYPES[dtype]
    codes = np.arange(2 ** min(16, 8 * kind.itemsize), dtype=np.uint64) << np.uint64(max(0, 8 * kind.itemsize - 16))
    with np.errstate(invalid="ignore"):
        values = codes.astype(storage.bits).view(kind).astype(np.float64)
    for code, value in zip(codes.tolist(), values.tolist(), strict=True):
        if math.isfinite(value):
            found = storage.value_of(code)
            assert (found, math.copysign(1, found)) == (value, math.copysign(1, value))
