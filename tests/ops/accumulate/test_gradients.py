import numpy as np
import pytest
from buffers import f32, lay_out, refused
from support import encode, read, write, write_index

from gradtool import BadInputError, UsageError, accumulate, norm


def test_tensors_match_by_name_in_whatever_shard_and_order_they_are(tmp_path):
    old = {f"t{i}": np.full(i + 1, i, np.float32) for i in range(21)}
    grad = {name: encode(array * 10, "F64") for name, array in reversed(old.items())}
    index = write_index(
        tmp_path / "buffer",
        {f"{i}.safetensors": {n: old[n] for n in list(old)[i::7]} for i in (3, 0, 6, 2, 5, 1, 4)},
    )
    kept = index.read_bytes()
    write_index(
        tmp_path / "grad", {f"{i}.safetensors": {n: grad[n] for n in list(grad)[i * 11 : i * 11 + 11]} for i in (1, 0)}
    )
    result = accumulate(tmp_path / "grad", into=tmp_path / "buffer")
    found = {name: array for file in (tmp_path / "buffer").glob("*.safetensors") for name, array in read(file).items()}
    assert {name: array.tolist() for name, array in found.items()} == {
        name: (array * 11).tolist() for name, array in old.items()
    }
    assert (result.output.files_written, result.call.files, index.read_bytes()) == (7, 9, kept)
    assert result.norm_after == norm(tmp_path / "buffer").norm


def test_weights_come_from_the_metadata_of_the_gradients(tmp_path):
    metadata = [{"tokens": "3"}, {"tokens": "1e0"}]
    path, grads = lay_out(tmp_path, f32(0), f32(1), f32(5), metadata=metadata)
    result = accumulate(grads, into=path, weight_key="tokens", mean=True, per_gradient=True)
    assert read(path)["a"].tolist() == [2]
    assert ([row.weight for row in result.per_gradient], result.weight_sum) == ([3, 1], 4)


BAD_WEIGHTS = {
    "none there": ([{"n": "1"}, {}], "no 'n' in its metadata"),
    "no metadata": ([{"n": "1"}, None], "no 'n' in its metadata"),
    "a word": ([{"n": "1"}, {"n": "many"}], "'n' = 'many' in its metadata is not a number"),
    "nan": ([{"n": "1"}, {"n": "nan"}], "in its metadata is not a number"),
    "inf": ([{"n": "1"}, {"n": "1e999"}], "in its metadata is not a number"),
    "empty": ([{"n": "1"}, {"n": ""}], "in its metadata is not a number"),
    "digits of another script": ([{"n": "1"}, {"n": "\u0663"}], "in its metadata is not a number"),
    "digits in groups": ([{"n": "1"}, {"n": "1_000"}], "in its metadata is not a number"),
    "a space that is not ASCII": ([{"n": "1"}, {"n": "1\xa0"}], "in its metadata is not a number"),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_a_weight_that_is_no_number_names_the_file(tmp_path, name):
    metadata, message = BAD_WEIGHTS[name]
    path, grads = lay_out(tmp_path, f32(0), f32(1), f32(5), metadata=metadata)
    with pytest.raises(BadInputError, match=message):
        accumulate(grads, into=path, weight_key="n")
    assert refused(BadInputError, tmp_path, path, grads, weight_key="n") == [("weight", None, "g2")]


def test_shards_of_one_set_must_have_the_same_weight(tmp_path):
    path, _ = lay_out(tmp_path, {"a": f32(0), "b": f32(0)})
    write(tmp_path / "set" / "1.safetensors", {"a": f32(1)}, {"n": "2"})
    write(tmp_path / "set" / "2.safetensors", {"b": f32(1)}, {"n": "2.0"})
    accumulate(tmp_path / "set", into=path, weight_key="n")
    assert read(path)["b"].tolist() == [2]
    write(tmp_path / "set" / "2.safetensors", {"b": f32(1)}, {"n": "3"})
    with pytest.raises(
        BadInputError, match="'n' = 3 .* in its metadata, but 1.safetensors of the same set has 'n' = 2"
    ):
        accumulate(tmp_path / "set", into=path, weight_key="n")
    assert refused(BadInputError, tmp_path, path, tmp_path / "set", weight_key="n") == [
        ("weight", None, "2.safetensors")
    ]


def test_every_missing_and_extra_tensor_is_listed(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(1), "c": f32(1)}, {"d": f32(1)})
    assert refused(BadInputError, tmp_path, path, grads) == [
        ("missing-tensor", "b", "g1"), ("extra-tensor", "c", "g1"), ("missing-tensor", "a", "g2"),
        ("missing-tensor", "b", "g2"), ("extra-tensor", "d", "g2"),
    ]  # fmt: skip
    assert refused(BadInputError, tmp_path, path, grads, missing="skip") == [("missing-tensor", None, "g2")]
    accumulate(grads[:1], into=path, missing="skip")
    assert {name: array.tolist() for name, array in read(path).items()} == {"a": [2], "b": [1]}


def test_skip_is_named_as_a_remedy_only_where_it_is_one(tmp_path):
    path, (some, none) = lay_out(tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(1)}, {"module.a": f32(1)})
    remedy = 'rename tensors, or use missing="skip" to leave out gradients where they lack a tensor, '
    remedy += 'or missing="zero" to count zeros'
    with pytest.raises(BadInputError, match=rf"; {remedy}$"):
        accumulate(some, into=path)
    for grads in (none, [some, none]):
        with pytest.raises(BadInputError, match=r"; rename tensors$"):
            accumulate(grads, into=path)


def test_include_and_exclude_choose_on_both_sides(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(1), "c": f32(1)})
    result = accumulate(grads, into=path, include=["a|b"], exclude=["b"])
    assert {name: array.tolist() for name, array in read(path).items()} == {"a": [2], "b": [1]}
    assert (result.call.tensors, result.norm_after) == (1, 2.0)
    assert refused(BadInputError, tmp_path, path, grads, include=["zzz"]) == [("no-match", None, None)]


def test_integers_are_refused_by_name_on_either_side(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(1), "ids": np.ones(1, np.int32)}, {"a": f32(1), "ids": f32(1)})
    assert refused(BadInputError, tmp_path, path, grads) == [("dtype", "ids", "buffer")]
    path, grads = lay_out(tmp_path, {"a": f32(1), "ids": f32(1)}, {"a": f32(1), "ids": np.ones(1, np.int32)})
    assert refused(BadInputError, tmp_path, path, grads) == [("dtype", "ids", "g1")]
    accumulate(grads, into=path, exclude=["ids"])
    assert read(path)["ids"].tolist() == [1]


def test_a_file_is_not_added_to_itself(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), f32(2))
    (tmp_path / "link").symlink_to(path)
    for twice in ([path], [tmp_path / "link"], [grads[0], grads[0]]):
        assert refused(BadInputError, tmp_path, path, twice)[0][0] == "duplicate-file"


def test_without_a_gradient_there_is_nothing_to_add(tmp_path):
    path, _ = lay_out(tmp_path, f32(1))
    refused(UsageError, tmp_path, path, [])
    refused(UsageError, tmp_path, "", [path])
    refused(UsageError, tmp_path, path, [""])


def test_weights_that_add_up_to_zero_have_no_mean(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), f32(2), f32(3))
    assert refused(BadInputError, tmp_path, path, grads, weight=[1, -1], mean=True) == [("weight", None, None)]
    accumulate(grads, into=path, weight=[1, -1])
    assert read(path)["a"].tolist() == [0]


def test_gradients_from_a_list_come_after_those_that_are_named(tmp_path):
    path, grads = lay_out(tmp_path, f32(0), f32(1), f32(1), f32(1))
    (tmp_path / "list").write_text(f"{grads[1]}\n{grads[2]}\n")
    result = accumulate(grads[:1], into=path, weight=[1, 10, 100], files_from=tmp_path / "list", per_gradient=True)
    assert [row.file for row in result.per_gradient] == [str(grad) for grad in grads]
    assert read(path)["a"].tolist() == [111]


@pytest.mark.parametrize("mean", [False, True])
def test_weights_that_add_up_to_more_than_float64_are_refused_before_a_byte_is_written(tmp_path, mean):
    path, grads = lay_out(tmp_path, f32(1), encode([1e-300], "F64"), encode([1e-300], "F64"))
    assert refused(BadInputError, tmp_path, path, grads, weight=[1e308, 1e308], mean=mean) == [("weight", None, None)]


@pytest.mark.parametrize("weight", [np.array([2.0]), np.float32(2), 2, np.array(2.0), (2,)])
def test_a_weight_may_be_any_kind_of_number(tmp_path, weight):
    path, grads = lay_out(tmp_path, f32(1), f32(3))
    accumulate(grads, into=path, weight=weight)
    assert read(path)["a"].tolist() == [7]


def values(path):
    return {name: array.tolist() for name, array in read(path).items()}


BOTH, ONE = {"w": f32(3, 3), "v": f32(3)}, {"w": f32(5, 5)}


@pytest.mark.parametrize("reduce", ["mean", "median"])
@pytest.mark.parametrize("order", [[BOTH, ONE], [ONE, BOTH]], ids=["all first", "all last"])
def test_a_mean_and_a_median_are_those_of_the_gradients_that_have_a_tensor(tmp_path, reduce, order):
    path, grads = lay_out(tmp_path, {"v": f32(100), "w": f32(100, 100)}, *order)
    options = {"reduce": reduce, "per_gradient": True}
    result = accumulate(grads, output=tmp_path / "new", missing="skip", **options)
    assert values(tmp_path / "new") == {"w": [4, 4], "v": [3]}
    lacks = order.index(ONE)
    assert [(row.missing, row.extra) for row in result.per_gradient] == [(int(i == lacks), 0) for i in range(2)]
    assert [(one.code, one.message, one.file) for one in result.call.warnings] == [
        ("unmatched", "lacks 1 tensor ('v') and is left out there", str(grads[lacks]))
    ]
    assert (result.missing, result.extra, result.taken) == (1, 0, 2)
    accumulate(grads, output=tmp_path / "zeros", missing="zero", **options)
    assert values(tmp_path / "zeros") == {"w": [4, 4], "v": [1.5]}
    accumulate(grads, into=path, missing="skip", **options)
    assert values(path) == {"v": [103], "w": [104, 104]}
    accumulate(grads, into=path, missing="zero", overwrite=True, **options)
    assert values(path) == {"v": [1.5], "w": [4, 4]}


def test_a_trimmed_mean_counts_zeros(tmp_path):
    _, grads = lay_out(tmp_path, f32(), *[{"a": f32(i), "b": f32(9)} for i in (1, 2)], *[{"a": f32(3)}] * 3)
    assert refused(BadInputError, tmp_path, None, grads, output=tmp_path / "x", reduce="trimmed=1", missing="skip") == [
        ("too-few", "b", "x")
    ]
    accumulate(grads, output=tmp_path / "new", reduce="trimmed=1", missing="zero")
    assert values(tmp_path / "new") == {"a": [f32(8 / 3).tolist()[0]], "b": [3]}
    # An Inf that is given is not mixed up with a zero that is not.
    inf = write(tmp_path / "inf", {"a": f32(1), "b": f32(np.inf)})
    accumulate([inf, *grads[2:4]], output=tmp_path / "new", reduce="median", missing="zero", nonfinite="propagate")
    assert values(tmp_path / "new") == {"a": [3], "b": [0]}


def test_a_new_set_has_every_tensor_as_the_first_that_has_it(tmp_path):
    first = {"b": encode([1, 2], "BF16")}
    second = {"module.c": encode([[1], [2]], "F64"), "module.b": f32(1)}
    third = {"c": f32(5), "a": encode([7], "F16")}
    _, grads = lay_out(tmp_path, f32(), first, second, third)
    options = {"missing": "skip", "map": [r"^module\.="]}
    result = accumulate(grads, output=tmp_path / "new", **options)
    found = read(tmp_path / "new")
    assert {name: (one.dtype, one.tolist()) for name, one in found.items()} == {
        "b": (encode([], "BF16").dtype, [2, 3]), "c": (np.float64, [[6], [7]]), "a": (np.float16, [7]),
    }  # fmt: skip
    assert (result.missing, result.call.tensors) == (4, 3)
    content = (tmp_path / "new").read_bytes()
    assert content.index(b'"b"') < content.index(b'"c"') < content.index(b'"a"')
    like = write_index(tmp_path / "like", {"2.safetensors": {"a": f32(0)}, "1.safetensors": {"c": f32(0), "b": f32(0)}})
    accumulate(grads, output_dir=tmp_path / "dir", shard_like=like, dtype="F32", **options)
    assert values(tmp_path / "dir" / "1.safetensors") == {"c": [[6], [7]], "b": [2, 3]}
    assert values(tmp_path / "dir" / "2.safetensors") == {"a": [7]}
    assert refused(BadInputError, tmp_path, None, grads, output=tmp_path / "x", map=options["map"])[:2] == [
        ("extra-tensor", "c", "g2"), ("missing-tensor", "b", "g3"),
    ]  # fmt: skip
    wide = write(tmp_path / "wide", {"b": f32(1, 2, 3)})
    with pytest.raises(
        BadInputError, match=r"shape \[3\] does not broadcast to \[2\], its shape in the first gradient"
    ):
        accumulate([grads[0], wide], output=tmp_path / "x")


def test_names_that_a_prefix_tells_apart_are_no_gaps(tmp_path):
    _, grads = lay_out(tmp_path, f32(), {"a": f32(1), "b": f32(1)}, {"module.a": f32(1), "module.b": f32(1)})
    for missing in ("error", "skip", "zero"):
        with pytest.raises(BadInputError, match="2 tensor names have the prefix 'module.'.* use map"):
            accumulate(grads, output=tmp_path / "x", missing=missing)
    # Parts of a model have other names.
    _, grads = lay_out(tmp_path, f32(), {"a": f32(1), "b": f32(2)}, {"c": f32(3)})
    accumulate(grads, output=tmp_path / "x", missing="skip", mean=True)
    assert values(tmp_path / "x") == {"a": [1], "b": [2], "c": [3]}


def test_what_a_buffer_lacks_is_counted_and_named(tmp_path):
    extra = {f"e{i}": f32(i) for i in range(4)}
    path, grads = lay_out(tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(1), **extra}, {"a": f32(1), "b": f32(1)})
    result = accumulate(grads, into=path, missing="skip", per_gradient=True)
    (warning,) = result.call.warnings
    assert warning.message == (
        "lacks 1 tensor ('b') and is left out there; "
        "has 4 tensors that the buffer lacks ('e0', 'e1', 'e2' and 1 more), not added"
    )
    assert [(row.missing, row.extra) for row in result.per_gradient] == [(1, 4), (0, 0)]
    assert (result.missing, result.extra) == (1, 4)


def test_each_tensor_has_the_mean_by_the_weights_of_those_that_have_it(tmp_path):
    rng = np.random.default_rng(8)
    names = [f"t{i}" for i in range(12)]
    arrays = [{name: rng.standard_normal((3, 30_000)).astype(np.float32) for name in names} for _ in range(5)]
    sets = [{name: one[name] for name in names if i == 0 or rng.random() < 0.6} for i, one in enumerate(arrays)]
    weights = [0.25, 3.0, 1.5, 7.0, 0.125]
    old = {name: rng.standard_normal((3, 30_000)).astype(np.float32) for name in names}
    _, grads = lay_out(tmp_path, f32(), *sets)
    expected = {}
    for name in names:
        total, divisor = np.full((3, 30_000), -0.0), 0.0
        for weight, one in zip(weights, sets, strict=True):
            if name in one:
                total, divisor = total + weight * one[name].astype(np.float64), divisor + weight
        expected[name] = old[name] + total / divisor
    contents = []
    for number, how in enumerate(({}, {"write": "inplace", "threads": 1}, {"write": "inplace", "threads": 4})):
        path = write(tmp_path / f"buffer{number}", old)
        result = accumulate(grads, into=path, weight=weights, mean=True, missing="skip", **how)
        assert result.norm_after == norm(path).norm
        found = read(path)
        assert all(found[name].tobytes() == expected[name].astype(np.float32).tobytes() for name in names)
        contents.append(path.read_bytes())
    assert len(set(contents)) == 1
    clipped = accumulate(grads, into=path, output=tmp_path / "x", overwrite=True, weight=weights, mean=True,
                         missing="skip", max_norm=1, eps=0)  # fmt: skip
    wide = np.sqrt(sum(((expected[name] - old[name]) ** 2).sum() for name in names))
    assert clipped.sum_norm == pytest.approx(wide, rel=1e-12)


def test_weights_that_add_up_to_zero_for_a_tensor_are_refused(tmp_path):
    _, grads = lay_out(tmp_path, f32(), {"a": f32(1), "b": f32(1)}, {"a": f32(2)}, {"a": f32(2), "b": f32(1)})
    options = {"weight": [1, 1, -1], "mean": True, "missing": "skip"}
    assert refused(BadInputError, tmp_path, None, grads, output=tmp_path / "x", **options) == [("weight", "b", "x")]


@pytest.mark.parametrize("keeps", [True, False])
def test_zeros_do_not_touch_what_no_gradient_has_unless_it_is_overwritten(tmp_path, keeps):
    path, grads = lay_out(tmp_path, {"a": f32(1), "b": f32(-0.0, np.nan)}, {"a": f32(2)})
    before = read(path)["b"].tobytes()
    accumulate(grads, into=path, missing="zero", overwrite=not keeps)
    assert read(path)["b"].tobytes() == (before if keeps else bytes(8))


def test_a_gradient_that_has_nothing_of_the_buffer_is_refused_even_with_skip(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), {"a": f32(1)}, {"b": f32(1), "c": f32(1)})
    assert refused(BadInputError, tmp_path, path, grads, missing="skip") == [("missing-tensor", None, "g2")]


def test_a_gradient_whose_tensors_are_all_excluded_is_refused_even_with_skip(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(4)}, {"b": f32(9)})
    options = {"missing": "skip", "include": ["a"], "mean": True}
    assert refused(BadInputError, tmp_path, path, grads, **options) == [("missing-tensor", None, "g2")]
