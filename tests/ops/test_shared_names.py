"""Tensors of the same name in several paths of a call: refused, parts of one vector, or measured path by path."""

import math

import numpy as np
import pytest
from support import ONES, encode, gradtool, gradtool_json, snapshot, write, write_index

from gradtool import BadInputError, accumulate, clip, layernorm_backward, norm, zero


def f32(*values):
    return encode(values, "F32")


@pytest.fixture
def ranks(tmp_path):
    """Two files with a tensor of the same name, and norms of 3 and 4."""
    return [
        write(tmp_path / "0.safetensors", {"w": f32(3), "only0": f32(0)}),
        write(tmp_path / "1.safetensors", {"w": f32(4), "only1": f32(0)}),
    ]


CALLS = {"norm": norm, "clip": lambda paths, **options: clip(paths, max_norm=1, eps=0, **options)}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_name_in_two_paths_is_refused(tmp_path, ranks, call):
    before = snapshot(tmp_path)
    with pytest.raises(BadInputError) as caught:
        call(ranks)
    (problem,) = caught.value.problems
    assert (problem.code, problem.file, problem.tensor) == ("shared-name", str(ranks[1]), "w")
    assert problem.message == f"is in {ranks[0]} too"
    assert problem.hint == (
        "use gradtool.accumulate() for the norm of the sum, gradtool.norm(by_file=True) for the norm of each path, or "
        "concat=True if the paths are parts of one vector, as from ranks that each hold a part"
    )
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("arguments", [["norm"], ["clip", "--max-norm", "1"]])
def test_the_command_refuses_it_too_unless_it_is_told_to_concatenate(tmp_path, ranks, arguments):
    answer = gradtool_json(*arguments, *ranks)
    assert (answer["exit_code"], [one["code"] for one in answer["errors"]]) == (3, ["shared-name"])
    listed = tmp_path / "list"
    listed.write_text("\n".join(map(str, ranks)))
    for paths in (ranks, ["--files-from", listed]):
        assert gradtool(*arguments, *paths).returncode == 3
    found = gradtool_json(*arguments, "--files-from", listed, "--concat")["data"]
    assert found.get("norm", found.get("norm_before")) == 5.0


def test_with_concat_the_paths_are_one_vector(ranks):
    result = norm(ranks, concat=True, per_tensor=True)
    assert (result.norm, result.call.tensors, [row.name for row in result.per_tensor]) == (
        5,
        4,
        ["w", "only0", "w", "only1"],
    )
    assert result.per_file == ()
    assert clip(ranks, max_norm=1, eps=0, concat=True).coef == 0.2
    assert norm(ranks, concat=True).norm == pytest.approx(1)


@pytest.mark.parametrize(("options", "expected"), [({"exclude": "w"}, 0.0), ({"include": "only"}, 0.0)])
def test_only_selected_tensors_can_collide(ranks, options, expected):
    for call in CALLS.values():
        found = call(ranks, **options)
        assert (found.norm_before if call is CALLS["clip"] else found.norm) == expected
        with pytest.raises(BadInputError, match="'w': is in"):
            call(ranks, include="^w|only0$")


def test_a_folder_an_index_and_a_file_are_paths(tmp_path):
    write(tmp_path / "folder" / "a.safetensors", {"a": f32(1)})
    index = write_index(tmp_path / "set", {"1.safetensors": {"b": f32(2)}, "2.safetensors": {"c": f32(2)}})
    file = write(tmp_path / "c", {"c": f32(4)})
    assert norm([tmp_path / "folder", index]).norm == 3.0
    assert norm([tmp_path / "folder", index, file], concat=True).norm == 5.0
    with pytest.raises(BadInputError, match=f"^{file}: tensor 'c': is in {tmp_path}/set/2.safetensors too; use"):
        norm([tmp_path / "folder", index, file])


def test_one_name_twice_in_a_folder_stays_an_error_that_says_how_to_concatenate(tmp_path, ranks):
    for call in CALLS.values():
        with pytest.raises(
            BadInputError, match="name the files one by one .and for norm and clip, use concat=True"
        ) as caught:
            call(tmp_path, concat=True)
        assert caught.value.problems[0].code == "duplicate-name"
    with pytest.raises(BadInputError, match="is in 0.safetensors too"):
        norm(tmp_path, by_file=True)
    assert norm(ranks, concat=True).norm == 5.0


def test_what_does_not_make_one_vector_of_its_paths_takes_any_names(tmp_path, ranks):
    assert zero(ranks, output_dir=tmp_path / "zeros").call.tensors == 4
    assert accumulate(ranks, output=tmp_path / "sum", include="w").norm_after == 7.0
    layer = {"n.Y_grad": f32(1, 2), "n.X": f32(3, 5), "n.scale": ONES}
    layers = [write(tmp_path / name, layer) for name in ("x", "y")]
    assert layernorm_backward(layers, output_dir=tmp_path / "layers").layers == 2


def test_by_file_gives_each_path_its_own_norm_and_the_facts_of_them_all(tmp_path, ranks):
    folder = tmp_path / "folder"
    write(folder / "a.safetensors", {"w": f32(-6, 0)})
    write(folder / "b.safetensors", {"v": f32(8)})
    result = norm([*ranks, folder], by_file=True)
    rows = [(row.file, row.tensors, row.elements, row.norm, row.max_abs, row.zeros) for row in result.per_file]
    assert rows == [
        (str(ranks[0]), 2, 2, 3.0, 3.0, 1),
        (str(ranks[1]), 2, 2, 4.0, 4.0, 1),
        (str(folder), 2, 3, 10, 8, 1),
    ]
    assert (result.norm, result.call.files, result.call.tensors) == (norm([*ranks, folder], concat=True).norm, 4, 6)


def test_the_rows_have_the_bits_that_each_path_has_alone(tmp_path):
    rng = np.random.default_rng(5)
    sizes = [(1, 70_000), (0, 3), (65_536, 65_537, 5), (200_000,), ()]
    arrays = [[rng.standard_normal(size) * 10.0**i for size in one] for i, one in enumerate(sizes)]
    # Beyond what squares can be, so their tiles are scaled.
    arrays += [[np.full(3, 1e200)], [np.full(3, 1e-200), np.full(2, 2e-170)]]
    paths = [write(tmp_path / f"{i}", {f"t{k}": one for k, one in enumerate(each)}) for i, each in enumerate(arrays)]
    for order in (1, 2, math.inf, 3):
        rows = norm(paths, by_file=True, norm_type=order, threads=2).per_file
        alone = [norm(path, norm_type=order) for path in paths]
        assert [row.norm.hex() for row in rows] == [one.norm.hex() for one in alone]
        assert [row.max_abs for row in rows] == [one.max_abs for one in alone]


def test_the_rows_show_what_is_not_finite_and_max_abs_leaves_nan_out(tmp_path):
    good = write(tmp_path / "good", {"a": f32(3, 4)})
    bad = write(tmp_path / "bad", {"a": f32(1, math.nan), "b": f32(2, -math.inf, 0)})
    result = norm([good, bad], by_file=True)
    first, row = result.per_file
    assert (first.norm, first.nan, first.inf) == (5.0, 0, 0)
    assert (math.isnan(row.norm), row.max_abs, row.nan, row.inf, row.zeros) == (True, math.inf, 1, 1, 1)
    assert [(one.code, one.file, one.tensor) for one in result.problems] == [
        ("nonfinite", str(bad), "a"), ("nonfinite", str(bad), "b"),
    ]  # fmt: skip


def test_a_path_in_which_nothing_is_selected_has_an_empty_row(ranks):
    rows = norm(ranks, by_file=True, include="only0").per_file
    assert [(row.tensors, row.elements, row.norm, row.max_abs) for row in rows] == [(1, 1, 0.0, 0.0), (0, 0, 0.0, 0.0)]


def test_with_by_file_the_limit_is_for_each_path(ranks):
    nan = write(ranks[0].parent / "nan", {"w": f32(math.nan)})
    assert norm(ranks, by_file=True, fail_above=4).problems == ()
    assert [one.code for one in norm(ranks, concat=True, fail_above=4).problems] == ["above-limit"]
    above = [one for one in norm([*ranks, nan], by_file=True, fail_above=3.5).problems if one.code == "above-limit"]
    assert [(one.file, one.message) for one in above] == [
        (str(ranks[1]), "the norm 4.0 is above the limit 3.5"),
        (str(nan), "the norm is NaN, which is not within the limit 3.5"),
    ]


def test_top_orders_the_tensors_of_all_paths(ranks):
    result = norm(ranks, by_file=True, top=2)
    assert [(row.name, row.file, row.norm) for row in result.per_tensor] == [
        ("w", str(ranks[1]), 4.0), ("w", str(ranks[0]), 3.0),
    ]  # fmt: skip
    assert [row.norm for row in result.per_file] == [3.0, 4.0]


def test_a_path_is_shown_as_it_was_given_and_last_in_its_line(tmp_path, ranks):
    write(tmp_path / "set" / "x.safetensors", {"w": f32(1, -2, 2)})
    done = gradtool("norm", "./0.safetensors", "set/", ranks[1], "--by-file", "--per-tensor", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-3:] == [
        "file\t2\t2\t3.0\t3.0\t0\t0\t1\t./0.safetensors",
        "file\t1\t3\t3.0\t2.0\t0\t0\t0\tset/",
        f"file\t2\t2\t4.0\t4.0\t0\t0\t1\t{ranks[1]}",
    ]
    assert lines[-4] == f"tensor\tF32\t1\t0.0\t0.0\t0\t0\t1\tonly1\t{ranks[1]}"
