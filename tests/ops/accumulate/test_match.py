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
    assert (result.files_written, result.files, index.read_bytes()) == (7, 9, kept)
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
    with pytest.raises(BadInputError, match="'n' = 3 in its metadata, where 1.safetensors of the same set has 2"):
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
    with pytest.raises(
        BadInputError, match=r'nothing written\. Rename tensors, or use missing="skip" to add only those'
    ):
        accumulate(some, into=path)
    for grads in (none, [some, none]):
        with pytest.raises(BadInputError, match=r"nothing written\. Rename tensors;"):
            accumulate(grads, into=path)


def test_include_and_exclude_choose_on_both_sides(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(1), "c": f32(1)})
    result = accumulate(grads, into=path, include=["a|b"], exclude=["b"])
    assert {name: array.tolist() for name, array in read(path).items()} == {"a": [2], "b": [1]}
    assert (result.tensors, result.norm_after) == (1, 2.0)
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


def test_a_gradient_that_has_nothing_of_the_buffer_is_refused_even_with_skip(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), {"a": f32(1)}, {"module.a": f32(1)})
    assert refused(BadInputError, tmp_path, path, grads, missing="skip") == [("missing-tensor", None, "g2")]


def test_a_gradient_whose_tensors_are_all_excluded_is_refused_with_skip_too(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(4)}, {"b": f32(9)})
    options = {"missing": "skip", "include": ["a"], "mean": True}
    assert refused(BadInputError, tmp_path, path, grads, **options) == [("missing-tensor", None, "g2")]
