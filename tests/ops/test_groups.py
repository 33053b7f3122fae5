"""Groups of tensors: each with the norm and the limit that it would have in a call of its own."""

import math

import numpy as np
import pytest
from same_results import content_of, random_set
from support import (
    canonical_norm,
    encode,
    gaussian,
    gradtool,
    gradtool_json,
    read,
    rounded_once,
    snapshot,
    write,
    write_index,
)

from gradtool import BadInputError, NonFiniteError, UsageError, clip, norm

SIZES = {"embed.weight": 70_000, "block.0.weight": 3000, "block.0.bias": 37, "block.1.weight": 131_073, "head": 1}


@pytest.fixture
def arrays():
    return {name: gaussian(size, "F32", seed=i) for i, (name, size) in enumerate(SIZES.items())}


@pytest.fixture
def path(tmp_path, arrays):
    """A set of two shards, over which one of the groups is spread."""
    names = list(arrays)
    shards = {"1.safetensors": names[:2], "2.safetensors": names[2:]}
    write_index(tmp_path / "set", {file: {name: arrays[name] for name in own} for file, own in shards.items()})
    return tmp_path / "set"


def content(path):
    return {name: array for file in path.glob("*.safetensors") for name, array in read(file).items()}


def scaled(array, coef):
    return rounded_once(array.astype(np.float64) * float(np.float32(coef)), "F32")


def test_each_group_is_clipped_by_its_own_norm_and_the_rest_is_left_alone(path, arrays):
    result = clip(path, group=[r"^block\.:0.5", "embed:0.25"], eps=0)
    blocks = [array for name, array in arrays.items() if name.startswith("block.")]
    coefs = {"block": 0.5 / canonical_norm(blocks), "embed": 0.25 / canonical_norm([arrays["embed.weight"]])}
    for name, array in content(path).items():
        coef = coefs.get(name.split(".")[0])
        assert np.array_equal(array, arrays[name] if coef is None else scaled(arrays[name], coef)), name
    assert [(row.group, row.tensors, row.coef, row.clipped) for row in result.per_group] == [
        (r"^block\.", 3, coefs["block"], True),
        ("embed", 1, coefs["embed"], True),
        (None, 1, None, False),
    ]
    assert [row.norm_before for row in result.per_group] == [
        canonical_norm(blocks), canonical_norm([arrays["embed.weight"]]), abs(float(arrays["head"][0])),
    ]  # fmt: skip
    assert result.coef is None
    assert (result.norm_after, result.clipped) == (norm(path).norm, True)
    groups = norm(path, group=[r"^block\.", "embed"]).per_group
    assert [(row.group, row.tensors, row.norm) for row in groups] == [
        (row.group, row.tensors, row.norm_after) for row in result.per_group
    ]


@pytest.mark.parametrize("write", ["replace", "inplace"])
def test_groups_do_what_a_call_for_each_group_would_do(tmp_path, write):
    for folder in ("once", "thrice"):
        random_set(tmp_path / folder, 4)
    clip(tmp_path / "once", group=["t[0-2]:0.5", "t[34]:1e-3"], max_norm=0.25, unscale=2, write=write, fsync=False)
    for include, max_norm in (("t[0-2]", 0.5), ("t[34]", 1e-3), ("t[5-9]", 0.25)):
        clip(tmp_path / "thrice", include=include, max_norm=max_norm, unscale=2, fsync=False)
    assert content_of(tmp_path / "once") == content_of(tmp_path / "thrice")


def test_one_group_of_all_tensors_is_the_global_norm(tmp_path):
    for folder in ("all", "group"):
        random_set(tmp_path / folder, 5)
    whole = clip(tmp_path / "all", max_norm=0.125, fsync=False)
    (row,) = clip(tmp_path / "group", group=":.*|:0.125", fsync=False).per_group
    assert (row.norm_before, row.norm_after, row.coef) == (whole.norm_before, whole.norm_after, whole.coef)
    assert content_of(tmp_path / "all") == content_of(tmp_path / "group")


def test_a_file_in_which_nothing_changes_is_not_touched(path):
    kept = snapshot(path)[path / "2.safetensors"]
    result = clip(path, group="embed:0.25")
    assert (result.output.files_written, snapshot(path)[path / "2.safetensors"]) == (1, kept)


def test_no_group_above_its_limit_writes_nothing(path):
    before = snapshot(path)
    result = clip(path, group=["embed:inf", "block:1e30"])
    assert (snapshot(path), result.clipped, result.output.wrote) == (before, False, ())
    assert [group.coef for group in result.per_group] == [None, 1.0, None]


def test_the_loss_scale_divides_tensors_without_a_group(tmp_path):
    path = write(tmp_path / "x", {"a": encode([30, 40], "F32"), "b": encode([8], "F32")})
    result = clip(path, group="a:1", unscale=4, eps=0, output=tmp_path / "y")
    assert read(tmp_path / "y")["a"].tolist() == pytest.approx([0.6, 0.8])
    assert read(tmp_path / "y")["b"].tolist() == [2.0]
    assert [(row.norm_before, row.clipped) for row in result.per_group] == [(12.5, True), (2.0, False)]


def test_a_group_without_a_limit_may_have_any_norm(tmp_path):
    huge = np.full(4, 1.7e308)
    path = write(tmp_path / "x", {"a": np.array([3.0, 4.0]), "huge": huge})
    clip(path, group="a:1", eps=0)
    assert (read(path)["a"].tolist(), read(path)["huge"].tolist()) == (pytest.approx([0.6, 0.8]), huge.tolist())
    with pytest.raises(BadInputError, match="overflows float64"):
        clip(path, group=["a:1", "huge:1"])


def test_values_that_are_not_finite_follow_the_policy(tmp_path):
    path = write(tmp_path / "x", {"a": encode([3, math.nan], "F32"), "b": encode([4], "F32")})
    before = snapshot(tmp_path)
    with pytest.raises(NonFiniteError):
        clip(path, group="b:1")
    assert snapshot(tmp_path) == before
    rows = clip(path, group=["a:1", "b:9"], nonfinite="propagate", dry_run=True).per_group
    assert [math.isnan(row.coef) for row in rows] == [True, False]
    clip(path, group="b:1", nonfinite="zero", eps=0)
    assert {name: array.tolist() for name, array in read(path).items()} == {"a": [3.0, 0.0], "b": [1.0]}


def test_tensors_of_one_name_in_several_paths_are_in_one_group(tmp_path):
    paths = [write(tmp_path / name, {"a": encode([value], "F32")}) for name, value in (("x", 3), ("y", 4))]
    (row,) = clip(paths, concat=True, group="a:2.5", eps=0).per_group
    assert (row.tensors, row.norm_before, row.norm_after) == (2, 5.0, 2.5)


def test_a_tensor_in_two_groups_is_refused_with_both(path):
    before = snapshot(path)
    with pytest.raises(BadInputError) as caught:
        clip(path, group=["block:1", "bias:2"])
    (problem,) = caught.value.problems
    assert (problem.code, problem.tensor, problem.file) == ("two-groups", "block.0.bias", str(path / "2.safetensors"))
    assert 'group="block" and group="bias"' in problem.message
    assert snapshot(path) == before


def test_excluded_tensors_are_in_no_group(path):
    result = clip(path, group=["block:1", "head:2"], exclude="weight", dry_run=True)
    assert [(row.group, row.tensors) for row in result.per_group] == [("block", 1), ("head", 1)]


@pytest.mark.parametrize("text", ["a", ":1", "a:", "a:x", "a:-1", "a:nan"])
def test_a_group_that_says_no_limit_is_a_usage_error(path, text):
    with pytest.raises(UsageError, match="group"):
        clip(path, group=text)


def test_a_regular_expression_may_have_colons(tmp_path):
    path = write(tmp_path / "x", {"layer:0": encode([2], "F32"), "layer:1": encode([2], "F32")})
    rows = clip(path, group="r:0:1", eps=0).per_group
    assert [(row.group, row.norm_after) for row in rows] == [("r:0", 1.0), (None, 2.0)]


def test_a_group_without_tensors_is_refused(path):
    with pytest.raises(BadInputError, match="matches no tensor name"):
        norm(path, group=["embed", "nope"])


def test_norms_of_groups_leave_all_other_facts_as_they_are(path):
    plain, grouped = (gradtool_json("norm", path, *more)["data"] for more in ((), ("--group", "embed")))
    rows = grouped.pop("per_group")
    differ = {"seconds", "timings", "per_group"}
    assert {key: value for key, value in plain.items() if key not in differ} == {
        key: value for key, value in grouped.items() if key not in differ
    }
    assert [row["group"] for row in rows] == ["embed", None]


def test_the_row_of_the_tensors_in_no_group_has_dashes(path):
    done = gradtool("clip", path, "--group", "embed:1", "--dry-run")
    rows = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("group\t")]
    assert [(row[1], row[2], row[-1]) for row in rows] == [("embed", "1", "yes"), ("-", "4", "no")]
    assert rows[1][5] == "-"
