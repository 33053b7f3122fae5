"""The total weight in a buffer's metadata: stored by --weight-key, and removed by what else changes the content."""

import json
import math

import numpy as np
import pytest
from buffers import f32, refused
from hypothesis import given
from hypothesis import strategies as st
from support import encode, read, snapshot, write, write_index
from tiers import PARTS, examples

from gradtool import BadInputError, UsageError, accumulate, clip, zero

SUM = {"gradtool.weight_key": "n", "gradtool.weighted": "sum"}
MEAN = {"gradtool.weight_key": "n", "gradtool.weighted": "mean"}


def metadata_of(path):
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})


def values_of(path):
    return read(path)["a"].tolist()


@pytest.fixture
def grads(tmp_path):
    """Gradients of 3 and 1, whose sum is 11 and whose mean is 2.75; and one more, of 4."""
    values = {"g3": (3, 3), "g1": (2, 1), "g4": (5, 4)}
    return [write(tmp_path / name, {"a": f32(value)}, {"n": str(n)}) for name, (value, n) in values.items()]


def made(path, grads, **options):
    """A buffer that was created from gradients."""
    accumulate(grads, output=path, weight_key="n", **options)
    return path


def added(path, grads, **options):
    """What adding says: its warnings, the metadata and the values."""
    result = accumulate(grads, into=path, **options)
    return [one.message for one in result.call.warnings], metadata_of(path), values_of(path)


MODES = pytest.mark.parametrize("write_mode", ["replace", "inplace"])


@MODES
def test_adding_to_a_sum_adds_to_its_total(tmp_path, grads, write_mode):
    path = made(tmp_path / "sum", grads[:2])
    assert (metadata_of(path), values_of(path)) == ({"n": "4"} | SUM, [11])
    assert added(path, grads[2], weight_key="n", write=write_mode) == ([], {"n": "8"} | SUM, [31])


@MODES
@pytest.mark.parametrize("mean", [False, True])
def test_overwriting_stores_the_total_of_what_is_there_now(tmp_path, grads, write_mode, mean):
    path = made(tmp_path / "buffer", grads[:2], mean=not mean)
    found = added(path, grads[::2], overwrite=True, weight_key="n", mean=mean, write=write_mode)
    assert found == ([], {"n": "7"} | (MEAN if mean else SUM), f32(29 / 7 if mean else 29).tolist())


def test_overwriting_a_file_without_a_total_stores_one_after_its_own_metadata(tmp_path):
    path = write(tmp_path / "plain", {"a": f32(9), "b": np.zeros((0, 2))}, {"step": "7", "format": "pt"})
    both = write(tmp_path / "both", {"a": f32(3), "b": np.zeros((0, 2))}, {"n": "3"})
    assert added(path, both, overwrite=True, weight_key="n") == (
        [], {"step": "7", "format": "pt", "n": "3"} | SUM, [9],
    )  # fmt: skip
    assert list(metadata_of(path))[:3] == ["step", "format", "n"]


@MODES
@pytest.mark.parametrize("mean", [False, True])
def test_a_zeroed_buffer_has_no_total_until_it_is_overwritten(tmp_path, grads, write_mode, mean):
    path = made(tmp_path / "buffer", grads[:2], mean=mean)
    (warning,) = zero(path, write=write_mode).call.warnings
    assert (warning.code, warning.file, metadata_of(path)) == ("weight-dropped", str(path), {})
    (warning,), metadata, values = added(path, grads, weight_key="n", mean=mean, write=write_mode)
    assert (warning, metadata, values) == ("no total weight stored under 'n'", {}, [3.875 if mean else 31])


def test_a_skipped_gradient_does_not_count_towards_the_total(tmp_path, grads):
    path = made(tmp_path / "sum", grads[:1])
    bad = write(tmp_path / "bad", {"a": f32(math.nan)}, {"n": "50"})
    warned, metadata, values = added(path, [bad, grads[1]], weight_key="n", nonfinite="skip")
    assert (len(warned), metadata, values) == (1, {"n": "4"} | SUM, [11])


def test_a_clipped_sum_stands_for_its_weights_all_the_same(tmp_path, grads):
    path = made(tmp_path / "sum", grads[:2], max_norm=1, eps=0)
    assert added(path, grads[2], weight_key="n", max_norm=2, eps=0) == ([], {"n": "8"} | SUM, [2])
    clip(path, max_norm=1, eps=0)
    assert (metadata_of(path), values_of(path)) == ({"n": "8"} | SUM, [1])


AGAIN, KEEP = "use overwrite=True to start a new total", 'use weight_key="n"'
DROPPED = {
    "without the key": ({}, {}, KEEP),
    "overwritten without the key": ({}, {"overwrite": True}, KEEP),
    "to a mean": ({"mean": True}, {"weight_key": "n"}, AGAIN),
    "to a mean without the key": ({"mean": True}, {}, None),
    "a mean to a sum": ({}, {"weight_key": "n", "mean": True}, AGAIN),
    "with given weights": ({}, {"weight": [4]}, KEEP),
    "with other weights": ({}, {"weight_key": "m"}, AGAIN),
    "a median": ({}, {"reduce": "median", "overwrite": True}, None),
}


@MODES
@pytest.mark.parametrize("case", DROPPED)
def test_a_total_that_is_no_longer_true_is_dropped_with_a_warning(tmp_path, grads, write_mode, case):
    create, add, hint = DROPPED[case]
    path = made(tmp_path / "buffer", grads[:2], **create)
    grad = write(tmp_path / "grad", {"a": f32(1)}, {"n": "4", "m": "5"})
    (warning,) = accumulate(grad, into=path, write=write_mode, **add).call.warnings
    assert (warning.code, warning.file, warning.hint) == ("weight-dropped", str(path), hint)
    assert warning.message == "total weight removed, because it does not match the new content: 'n' = '4'"
    assert metadata_of(path) == {}


def test_another_key_takes_the_place_of_the_total_when_a_buffer_is_overwritten(tmp_path, grads):
    path = made(tmp_path / "buffer", grads[:2])
    grad = write(tmp_path / "grad", {"a": f32(7)}, {"m": "5"})
    (warning,), metadata, values = added(path, grad, overwrite=True, weight_key="m")
    assert metadata == {"m": "5", "gradtool.weight_key": "m", "gradtool.weighted": "sum"}
    assert "removed, because it does not match the new content: 'n' = '4'" in warning
    assert values == [35]


def test_an_unmarked_buffer_loses_the_weight_that_is_no_longer_true_and_nothing_else(tmp_path, grads):
    path = write(tmp_path / "micro", {"a": f32(1)}, {"format": "pt", "n": "3", "m": "1"})
    (warning,), metadata, values = added(path, grads[0], weight_key="n")
    assert (metadata, values) == ({"format": "pt", "m": "1"}, [10])
    assert "removed, because it does not match the new content: 'n' = '3'" in warning


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"weight": [2]}, {"weight_key": "n"}])
def test_buffers_without_a_total_get_none(tmp_path, grads, options):
    own = {"n": "3"} if "weight_key" not in options else {"m": "3"}
    path = write(tmp_path / "plain", {"a": f32(1)}, own | {"format": "pt"}, padding=3)
    header = path.read_bytes()[: -values_of(path).__len__() * 4]
    warnings = accumulate(grads[0], into=path, **options).call.warnings
    assert path.read_bytes().startswith(header)
    assert [one.message for one in warnings] == ["no total weight stored under 'n'"] * ("weight_key" in options)


@MODES
@pytest.mark.parametrize("options", [{"dry_run": True}, {"update": False}])
def test_nothing_changes_where_nothing_is_written(tmp_path, grads, options, write_mode):
    path = made(tmp_path / "mean", grads[:2], mean=True)
    before = snapshot(tmp_path)
    result = accumulate(grads[2], into=path, weight_key="n", write=write_mode, **options)
    assert snapshot(tmp_path) == before
    assert [one.code for one in result.call.warnings] == (["weight-dropped"] if "dry_run" in options else [])


@MODES
def test_a_part_of_a_buffer_cannot_have_another_total_than_the_rest(tmp_path, write_mode):
    tensors = {"a": f32(1), "b": f32(2), "ids": np.arange(3, dtype=np.int32)}
    grad = write(tmp_path / "grad", tensors, {"n": "3"})
    for options in ({"include": ["a"]}, {"include": ["a"], "overwrite": True}):
        made(tmp_path / "sum", grad, exclude=["ids"])
        (warning,), metadata, _ = added(tmp_path / "sum", grad, weight_key="n", write=write_mode, **options)
        assert "removed" in warning
        assert metadata == {}
        (tmp_path / "sum").unlink()
    made(tmp_path / "sum", grad, exclude=["ids"])
    only_a = write(tmp_path / "only_a", {"a": f32(5)}, {"n": "2"})
    # Zeros count with the weight of their gradient; what is left out does not.
    _, metadata, values = added(tmp_path / "sum", only_a, weight_key="n", missing="zero")
    assert (metadata, values) == ({"n": "5"} | SUM, [13])
    for options in ({}, {"overwrite": True}):
        made(tmp_path / "sum", grad, exclude=["ids"])
        (gap, warning), metadata, _ = added(tmp_path / "sum", only_a, weight_key="n", missing="skip", **options)
        assert "lacks 1 tensor ('b')" in gap
        assert "removed, because it does not match the new content: 'n' = '3'" in warning
        assert metadata == {}
    (gap, warning), metadata, _ = added(tmp_path / "sum", only_a, weight_key="n", missing="skip", overwrite=True)
    assert warning == "no total weight stored under 'n'"
    assert metadata == {}
    _, metadata, values = added(tmp_path / "sum", only_a, weight_key="n", missing="zero", overwrite=True)
    assert (metadata, values) == ({"n": "2"} | SUM, [10])
    assert read(tmp_path / "sum")["b"].tolist() == [0]


def test_a_new_set_to_which_not_all_gradients_add_has_no_total(tmp_path):
    both = write(tmp_path / "both", {"a": f32(1), "b": f32(4)}, {"n": "3"})
    only_a = write(tmp_path / "only_a", {"a": f32(5)}, {"n": "1"})
    result = accumulate([both, only_a], output=tmp_path / "new", weight_key="n", mean=True, missing="skip")
    assert [one.code for one in result.call.warnings] == ["unmatched", "weight-dropped"]
    assert {name: one.tolist() for name, one in read(tmp_path / "new").items()} == {"a": [2], "b": [4]}
    assert metadata_of(tmp_path / "new") == {}
    accumulate([both, only_a], output=tmp_path / "new", weight_key="n", mean=True, missing="zero")
    assert read(tmp_path / "new")["b"].tolist() == [3]
    assert metadata_of(tmp_path / "new") == {"n": "4"} | MEAN


def test_tensors_that_carry_no_values_are_no_part_of_the_buffer(tmp_path):
    path = write(tmp_path / "buffer", {"a": f32(1), "ids": np.arange(3, dtype=np.int32)}, {"n": "0"})
    grad = write(tmp_path / "grad", {"a": f32(1), "ids": np.arange(3, dtype=np.int32)}, {"n": "3"})
    assert added(path, grad, weight_key="n", exclude=["ids"], overwrite=True) == ([], {"n": "3"} | SUM, [3])
    zero(path, include=["ids"])
    assert metadata_of(path) == {"n": "3"} | SUM
    zero(path, exclude=["ids"])
    assert metadata_of(path) == {}


@MODES
def test_every_shard_has_the_same_total_even_if_no_tensor_of_it_changes(tmp_path, write_mode):
    shards = {"1.safetensors": {"a": f32(1)}, "2.safetensors": {"b": f32(2)}, "3.safetensors": {"e": f32()}}
    write_index(tmp_path / "set", shards)
    grad = write(tmp_path / "grad", {"a": f32(5), "b": f32(6), "e": f32()}, {"n": "3"})
    accumulate(grad, into=tmp_path / "set", weight_key="n", overwrite=True)
    only_a = write(tmp_path / "only_a", {"a": f32(5)}, {"n": "2"})
    result = accumulate(only_a, into=tmp_path / "set", weight_key="n", missing="zero", write=write_mode)
    found = [metadata_of(tmp_path / "set" / name) for name in shards]
    assert (found, result.output.files_written) == ([{"n": "5"} | SUM] * 3, 3)
    assert read(tmp_path / "set" / "2.safetensors")["b"].tolist() == [18]
    assert values_of(tmp_path / "set" / "1.safetensors") == [25]


def test_shards_that_differ_have_no_total(tmp_path):
    for number, metadata in ((1, {"n": "4"} | SUM), (2, {"n": "4"} | MEAN)):
        write(tmp_path / "set" / f"{number}.safetensors", {f"{'ab'[number - 1]}": f32(1)}, metadata)
    with pytest.raises(
        BadInputError, match=r"2.safetensors: has 'n' = 4 of a mean .* 1.safetensors of the .* of a sum"
    ):
        accumulate(tmp_path / "set", output=tmp_path / "new", weight_key="n")
    grad = write(tmp_path / "grad", {"a": f32(5), "b": f32(6)}, {"n": "3"})
    (warning,) = accumulate(grad, into=tmp_path / "set", weight_key="n").call.warnings
    assert (warning.code, warning.file) == ("weight-dropped", str(tmp_path / "set"))
    assert warning.message.endswith(": 'n' = '4'")
    assert [metadata_of(path) for path in sorted((tmp_path / "set").iterdir())] == [{}, {}]


def test_elsewhere_the_copies_get_the_new_total(tmp_path, grads):
    path = made(tmp_path / "sum", grads[:2])
    before = snapshot(tmp_path)
    accumulate(grads[2], into=path, weight_key="n", output=tmp_path / "out")
    zero(path, output_dir=tmp_path / "zeros")
    assert {one: kept for one, kept in snapshot(tmp_path).items() if one in before} == before
    assert (metadata_of(tmp_path / "out"), values_of(tmp_path / "out")) == ({"n": "8"} | SUM, [31])
    assert metadata_of(tmp_path / "zeros" / "sum") == {}


def test_a_total_that_has_no_room_in_place_is_refused_and_the_other_way_to_write_makes_room(tmp_path, grads):
    path = write(tmp_path / "plain", {"a": f32(1)}, {"n": "3"})
    options = {"weight_key": "n", "overwrite": True}
    for more in ({}, {"dry_run": True}):
        assert refused(BadInputError, tmp_path, path, grads, write="inplace", **options, **more) == [
            ("header", None, "plain")
        ]
    accumulate(grads, into=path, **options)
    huge = write(tmp_path / "huge", {"a": f32(0)}, {"n": "-1.2345678901234567e+300"})
    size = path.stat().st_size
    assert added(path, huge, write="inplace", **options)[1] == {"n": "-1.2345678901234567e+300"} | SUM
    assert path.stat().st_size == size


@pytest.mark.parametrize(
    ("weight", "text"),
    [("224", "224"), ("224.0", "224"), ("0.1", "0.1"), ("1e15", "1000000000000000"), ("1e300", "1e+300"), ("-2", "-2")],
)
def test_whole_totals_are_written_as_integers(tmp_path, weight, text):
    made(tmp_path / "new", write(tmp_path / "g", {"a": encode([0], "F64")}, {"n": weight}))
    assert metadata_of(tmp_path / "new")["n"] == text


def test_a_sum_is_added_as_it_is_and_counts_with_its_weight(tmp_path, grads):
    sum_, mean = made(tmp_path / "sum", grads[:2]), made(tmp_path / "mean", grads[:2], mean=True)
    for one in (sum_, mean):
        options = {"mean": True, "weight_key": "n", "per_gradient": True}
        result = accumulate([one, grads[2]], output=tmp_path / f"of_{one.name}", **options)
        assert values_of(tmp_path / f"of_{one.name}") == [31 / 8]
        assert ([row.weight for row in result.per_gradient], result.weight_sum) == ([4, 4], 8)
    # Without the key, and with weights that are given, it is a file like any other.
    accumulate([sum_, mean], output=tmp_path / "plain", weight=[2, 4])
    assert (values_of(tmp_path / "plain"), metadata_of(tmp_path / "plain")) == ([33], {})


def test_a_sum_is_clipped_as_the_gradient_that_it_stands_for(tmp_path, grads):
    sum_, mean = made(tmp_path / "sum", grads[:2]), made(tmp_path / "mean", grads[:2], mean=True)
    rows = []
    for one in (sum_, mean):
        options = {"weight_key": "n", "clip_each": 1, "eps": 0, "per_gradient": True}
        rows.append(accumulate(one, output=tmp_path / f"of_{one.name}", **options).per_gradient[0])
        assert values_of(tmp_path / f"of_{one.name}") == [4]
    assert (rows[0].norm, rows[0].coef) == (rows[1].norm, rows[1].coef) == (2.75, 1 / 2.75)


def test_a_sum_of_weight_0_is_added_as_it_is(tmp_path, grads):
    sum_ = write(tmp_path / "sum", {"a": f32(3)}, {"n": "0"} | SUM)
    options = {"mean": True, "weight_key": "n", "clip_each": 9, "per_gradient": True}
    result = accumulate([sum_, grads[2]], output=tmp_path / "new", **options)
    assert (values_of(tmp_path / "new"), result.per_gradient[0].norm) == ([5.75], 3)


def test_a_sum_of_other_weights_and_a_mark_that_says_neither_are_refused(tmp_path):
    path = write(tmp_path / "buffer", {"a": f32(0)})
    grad = write(tmp_path / "g1", {"a": f32(1)}, {"m": "2", "n": "4"} | SUM)
    assert refused(BadInputError, tmp_path, path, grad, weight_key="m") == [("weight", None, "g1")]
    grad = write(tmp_path / "g1", {"a": f32(1)}, {"n": "4", "gradtool.weighted": "both"})
    assert refused(BadInputError, tmp_path, path, grad, weight_key="n") == [("weight", None, "g1")]
    assert refused(UsageError, tmp_path, path, grad, weight_key="gradtool.weighted") == [("usage", None, None)]


def test_weights_that_cancel_out_leave_a_sum_that_can_be_added_to(tmp_path, grads):
    minus = write(tmp_path / "minus", {"a": f32(1)}, {"n": "-3"})
    path = made(tmp_path / "sum", [grads[0], minus])
    assert (metadata_of(path), values_of(path)) == ({"n": "0"} | SUM, [6])
    assert added(path, grads[2], weight_key="n") == ([], {"n": "4"} | SUM, [26])


def test_a_total_beyond_float64_is_refused(tmp_path):
    huge = write(tmp_path / "huge", {"a": f32(0)}, {"n": "1e308"})
    path = made(tmp_path / "sum", huge)
    assert refused(BadInputError, tmp_path, path, huge, weight_key="n") == [("weight", None, None)]


class Tree:
    """Micro-batches with numbers of tokens, merged in a random tree of steps."""

    def __init__(self, folder, rng):
        self.folder, self._rng, self._count = folder, rng, 0
        self.leaves = []

    def _new(self):
        self._count += 1
        return self.folder / f"{self._count}.safetensors"

    def leaf(self):
        tokens, grad = int(self._rng.integers(1, 500)), self._rng.standard_normal(2)
        self.leaves.append((tokens, grad))
        return write(self._new(), {"a": grad}, {"n": str(tokens)})

    def merge(self, how, parts):
        """Merge files into one, in one of several ways."""
        path = self._new()
        options = {"weight_key": "n", "dtype": "F64"}
        if how in {"alone", "the mean alone"}:
            accumulate(parts, output=path, mean="mean" in how, **options)
            return path
        # Into a buffer that held something else.
        accumulate(self._spare(), output=path, mean="mean" in how, **options)
        del options["dtype"]
        if how == "overwrite with the mean":
            accumulate(parts, into=path, overwrite=True, mean=True, write="inplace", **options)
            return path
        accumulate(parts[:1], into=path, overwrite=True, write="inplace", **options)
        for part in parts[1:]:
            accumulate(part, into=path, **options)
        return path

    def _spare(self):
        return write(self._new(), {"a": self._rng.standard_normal(2)}, {"n": "77"})

    def mean(self, top):
        accumulate(top, output=self.folder / "root", mean=True, dtype="F64", weight_key="n")
        return self.folder / "root"


HOW = ["alone", "the mean alone", "overwrite, then add", "overwrite with the mean"]
TREES = st.recursive(
    st.just("leaf"),
    lambda parts: st.tuples(st.sampled_from(HOW), st.lists(parts, min_size=1, max_size=3)),
    max_leaves=8,
)


@PARTS
def test_a_mean_of_means_and_sums_is_the_mean_of_all_whatever_the_tree(tmp_path_factory, part):
    @examples(150, part)
    @given(st.lists(TREES, min_size=1, max_size=3), st.integers(0, 1000))
    def check(top, seed):
        tree = Tree(tmp_path_factory.mktemp("tree"), np.random.default_rng(seed))

        def build(one):
            return tree.leaf() if one == "leaf" else tree.merge(one[0], [build(part) for part in one[1]])

        root = tree.mean([build(one) for one in top])
        tokens, values = map(np.array, zip(*tree.leaves, strict=True))
        flat = (tokens[:, None] * values).sum(0) / tokens.sum()
        assert read(root)["a"] == pytest.approx(flat, rel=1e-12, abs=1e-12)
        assert metadata_of(root)["n"] == str(tokens.sum())

    check()


@pytest.mark.parametrize("how", HOW)
def test_two_levels_give_the_flat_mean(tmp_path, how):
    """128 and 96 tokens on one node, 50 on another, 10 on a third; each way to merge them."""
    tree = Tree(tmp_path, np.random.default_rng(5))
    grads = {"1": (128, [1.0, 2]), "2": (96, [3.0, -1]), "3": (50, [0.5, 8]), "4": (10, [-7.0, 4])}
    micro = [write(tmp_path / name, {"a": np.array(g)}, {"n": str(n)}) for name, (n, g) in grads.items()]
    nodes = [tree.merge(how, micro[:2]), tree.merge("the mean alone", micro[2:3]), micro[3]]
    total = tree.mean(nodes)
    assert metadata_of(total)["n"] == "284"
    flat = sum(n * np.array(g) for n, g in grads.values()) / 284
    assert read(total)["a"] == pytest.approx(flat, rel=1e-15)
