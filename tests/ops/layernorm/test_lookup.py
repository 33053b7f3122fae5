"""Layers whose tensors are in several paths: where they are looked for, and which files are written and locked."""

import json

import pytest
from layers import FORMS, OUTPUTS, assert_all, gradients, layer, reference
from support import gradtool, read, registered, snapshot, write, write_index

from gradtool import BadInputError, SystemRefusedError, UsageError, layernorm_backward
from gradtool.ops import layernorm

SHAPE = (6, 9)


def split(folder, *elsewhere, prefix="n.", **options):
    """A layer in two files: `acts`, and `weights` with the tensors named; and what is expected of it, by name."""
    tensors = layer(SHAPE, **options)
    named = {prefix + name: array for name, array in tensors.items()}
    there = {prefix + name for name in elsewhere}
    acts = write(folder / "acts.safetensors", {name: named[name] for name in named if name not in there})
    weights = write(folder / "weights.safetensors", {name: named[name] for name in named if name in there})
    return acts, weights, tensors


def assert_results(path, tensors, form="layernorm", prefix="n."):
    found = {name.removeprefix(prefix): array for name, array in gradients(path, prefix).items()}
    assert_all(found, reference(tensors, **FORMS[form]), "F32", "F32")


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("form", FORMS)
def test_inputs_in_another_path_are_used_and_that_path_stays_as_it_is(tmp_path, form, order):
    acts, weights, tensors = split(tmp_path, "scale", "bias", "mean", "inv_std_dev")
    before = snapshot(tmp_path)
    result = layernorm_backward([acts, weights][::order], **FORMS[form])
    assert snapshot(tmp_path)[weights] == before[weights]
    assert_results(acts, tensors, form)
    assert (result.call.files, result.output.files_written) == (2, 1)
    assert [row.file for row in result.per_layer] == [str(acts)]


def test_even_x_may_be_in_another_path(tmp_path):
    acts, others, tensors = split(tmp_path, "X", "Y", "scale", "bias", "mean", "inv_std_dev")
    layernorm_backward([others, acts])
    assert sorted(read(acts)) == sorted(f"n.{name}" for name in ("Y_grad", *OUTPUTS))
    assert_results(acts, tensors)


def test_the_path_of_y_grad_comes_first(tmp_path):
    acts, weights, tensors = split(tmp_path)
    write(weights, {"n.scale": tensors["scale"] * 2, "n.mean": tensors["mean"] * 2})
    layernorm_backward([weights, acts])
    assert_results(acts, tensors)


@pytest.mark.parametrize("name", ["scale", "mean"])
def test_an_input_in_several_other_paths_is_an_error_that_names_them(tmp_path, name):
    acts, weights, tensors = split(tmp_path, name)
    other = write(tmp_path / "other", {f"n.{name}": tensors[name]})
    before = snapshot(tmp_path)
    with pytest.raises(BadInputError) as caught:
        layernorm_backward([acts, weights, other])
    (problem,) = caught.value.problems
    assert (problem.code, problem.file, problem.tensor) == ("duplicate-name", str(acts), f"n.{name}")
    assert problem.message == f"is missing here, and in several of the other files: {weights}, {other}"
    assert problem.hint == "name only one of them"
    assert snapshot(tmp_path) == before


def test_an_input_that_no_path_has_is_an_error_that_names_all_paths(tmp_path):
    acts, weights, _ = split(tmp_path, "scale")
    weights.unlink()
    others = [write(tmp_path / f"{i}", {"other": layer(SHAPE)["X"]}) for i in range(8)]
    with pytest.raises(BadInputError) as caught:
        layernorm_backward([acts, others[0], others[1]])
    (problem,) = caught.value.problems
    assert (problem.code, problem.file, problem.tensor) == ("missing-tensor", str(acts), "n.scale")
    assert problem.message == f"is missing, here and in {others[0]}, {others[1]}, but needed with 'n.Y_grad'"
    assert problem.hint == 'use scale="NAME" if it has another name, or affine=False for layers without weights'
    with pytest.raises(BadInputError, match=rf"{others[4]} and 3 more, but needed"):
        layernorm_backward([acts, *others])


def test_a_path_with_a_layer_of_its_own_lends_its_weights_but_no_activations(tmp_path):
    first, second = layer(SHAPE, seed=1, prefix="n."), layer(SHAPE, seed=2, statistics=False, prefix="n.")
    del second["n.scale"]
    paths = [write(tmp_path / "first", first), write(tmp_path / "second", second)]
    layernorm_backward(paths)
    # The statistics of the first are not those of the second, which are computed.
    for path, tensors in zip(paths, (first, second | {"n.scale": first["n.scale"]}), strict=True):
        assert_results(path, {name[2:]: array for name, array in tensors.items()})
    del second["n.X"]
    write(paths[1], second)
    with pytest.raises(BadInputError, match=r"'n\.X': is missing, here and in .*first, but needed"):
        layernorm_backward(paths)


def test_several_layers_can_share_weights_which_are_counted_once(tmp_path):
    names = ("1", "2")
    tensors = {name: layer(SHAPE, seed=int(name), statistics=False) for name in names}
    for one in tensors.values():
        one["scale"] = tensors["1"]["scale"]
    parts = ("Y_grad", "X")
    paths = [write(tmp_path / name, {f"n.{part}": tensors[name][part] for part in parts}) for name in names]
    weights = write(tmp_path / "weights", {"n.scale": tensors["1"]["scale"]})
    result = layernorm_backward([*paths, weights])
    assert (result.layers, result.call.tensors, result.call.elements) == (2, 5, 4 * 54 + 9)
    for name, path in zip(names, paths, strict=True):
        assert_results(path, tensors[name])


def test_a_prefix_that_ends_in_a_word_may_have_its_x_elsewhere(tmp_path):
    acts, _, tensors = split(tmp_path, "X", prefix="norm_")
    layernorm_backward([acts, tmp_path / "weights.safetensors"])
    assert_results(acts, tensors, prefix="norm_")


def test_only_files_that_get_results_are_locked(tmp_path):
    acts, weights, tensors = split(tmp_path, "scale")
    held = registered([weights])
    layernorm_backward([acts, weights])
    assert_results(acts, tensors)
    held.close()
    held = registered([acts])
    with pytest.raises(SystemRefusedError) as caught:
        layernorm_backward([acts, weights])
    assert caught.value.problems[0].code == "in-use"
    held.close()


def test_a_path_whose_layers_are_not_selected_is_not_locked(tmp_path):
    acts, _, tensors = split(tmp_path)
    other = write(tmp_path / "other", layer(SHAPE, prefix="m."))
    held = registered([other])
    layernorm_backward([acts, other], prefix=["n"])
    layernorm_backward([acts, other], exclude=["^m"])
    held.close()
    assert_results(acts, tensors)
    assert not gradients(other, "m.")


@pytest.mark.parametrize("option", [None, "output", "output_dir", "dry_run"])
def test_a_file_that_gets_a_layer_before_it_is_locked_is_not_written(tmp_path, monkeypatch, option):
    acts, weights, _ = split(tmp_path, "scale")
    found = layernorm.files_with_layers

    def files_with_layers(*arguments):
        homes = found(*arguments)
        write(weights, layer(SHAPE, prefix="m.") | read(weights))
        return homes

    monkeypatch.setattr(layernorm, "files_with_layers", files_with_layers)
    before = acts.read_bytes()
    options = {} if option is None else {option: True if option == "dry_run" else tmp_path / "out"}
    with pytest.raises(SystemRefusedError, match="was changed by another program") as caught:
        layernorm_backward([acts, weights], **options)
    assert caught.value.problems[0].file == str(weights)
    assert acts.read_bytes() == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{}, {"write": "inplace"}])
def test_a_second_run_gives_the_same_bytes(tmp_path, options):
    acts, weights, _ = split(tmp_path, "scale")
    layernorm_backward([acts, weights])
    before = acts.read_bytes()
    assert layernorm_backward([acts, weights], **options).output.files_written == 1
    assert acts.read_bytes() == before


def test_output_takes_several_paths_if_one_file_gets_results(tmp_path):
    acts, weights, tensors = split(tmp_path, "scale")
    before = snapshot(tmp_path)
    layernorm_backward([weights, acts], output=tmp_path / "out")
    assert sorted(read(tmp_path / "out")) == sorted(f"n.{name}" for name in OUTPUTS)
    assert_results(tmp_path / "out", tensors)
    other = write(tmp_path / "other", layer(SHAPE, prefix="m."))
    with pytest.raises(UsageError, match="output is one file, but 2 files get results"):
        layernorm_backward([acts, weights, other], output=tmp_path / "new")
    layernorm_backward([acts, weights, other], output=tmp_path / "new", prefix=["m"])
    assert list(gradients(tmp_path / "new", "m.")) == [f"m.{name}" for name in OUTPUTS]
    assert {path: kept for path, kept in snapshot(tmp_path).items() if path in before} == before


def test_output_takes_a_set_of_many_files_beside_another_if_one_of_them_gets_results(tmp_path):
    tensors = {f"n.{name}": array for name, array in layer(SHAPE).items()}
    shards = {"1.safetensors": {"n.Y_grad": tensors["n.Y_grad"]}, "2.safetensors": {"n.X": tensors["n.X"]}}
    write_index(tmp_path / "acts", shards)
    weights = write(tmp_path / "weights", {"n.scale": tensors["n.scale"]})
    layernorm_backward([tmp_path / "acts", weights], output=tmp_path / "out")
    del tensors["n.mean"], tensors["n.inv_std_dev"]
    assert_results(tmp_path / "out", {name[2:]: array for name, array in tensors.items()})


def test_output_takes_a_folder_of_many_files_if_one_of_them_gets_results(tmp_path):
    acts, _, tensors = split(tmp_path / "set", "scale")
    layernorm_backward(tmp_path / "set", output=tmp_path / "out")
    assert_results(tmp_path / "out", tensors)
    write(tmp_path / "set" / "other.safetensors", layer(SHAPE, prefix="m."))
    with pytest.raises(UsageError, match="output is one file, but 2 files get results"):
        layernorm_backward(tmp_path / "set", output=tmp_path / "new")
    with pytest.raises(UsageError, match="output is one file, but 2 files get results"):
        layernorm_backward([acts, tmp_path / "set" / "other.safetensors"], output=tmp_path / "new")


def test_output_dir_gets_only_files_with_results_and_indexes_of_them(tmp_path):
    tensors = {f"n.{name}": array for name, array in layer(SHAPE, statistics=False).items()}
    shards = {"1.safetensors": {"n.Y_grad": tensors["n.Y_grad"]}, "2.safetensors": {"n.X": tensors["n.X"]}}
    write_index(tmp_path / "acts", shards)
    # Of the same names as files that do get results.
    write_index(tmp_path / "weights", {"1.safetensors": {"n.scale": tensors["n.scale"]}})
    before = snapshot(tmp_path)
    result = layernorm_backward([tmp_path / "acts", tmp_path / "weights"], output_dir=tmp_path / "out")
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["1.safetensors", index.name]
    assert json.loads(index.read_text())["weight_map"] == {f"n.{name}": "1.safetensors" for name in OUTPUTS}
    assert_results(tmp_path / "out" / "1.safetensors", {name[2:]: array for name, array in tensors.items()})
    assert (result.call.files, result.output.files_written) == (3, 1)
    assert {path: kept for path, kept in snapshot(tmp_path).items() if path in before} == before


def test_only_the_index_of_the_set_that_gets_results_is_kept_up_to_date(tmp_path):
    tensors = {f"n.{name}": array for name, array in layer(SHAPE, statistics=False).items()}
    acts = write_index(tmp_path / "acts", {"1.safetensors": {name: tensors[name] for name in ("n.Y_grad", "n.X")}})
    weights = write_index(tmp_path / "weights", {"w.safetensors": {"n.scale": tensors["n.scale"]}})
    before = snapshot(tmp_path / "weights")
    layernorm_backward([acts, weights])
    assert {f"n.{name}" for name in OUTPUTS} < set(json.loads(acts.read_text())["weight_map"])
    assert snapshot(tmp_path / "weights") == before


def test_no_layer_in_any_path_is_refused(tmp_path):
    paths = [write(tmp_path / name, {"X": layer(SHAPE)["X"]}) for name in ("a", "b")]
    with pytest.raises(BadInputError, match="no tensor name ends in Y_grad"):
        layernorm_backward(paths)


def test_paths_may_come_from_a_list_and_a_dry_run_changes_nothing(tmp_path):
    acts, weights, _ = split(tmp_path, "scale")
    (tmp_path / "list").write_text(f"{weights}\n")
    before = snapshot(tmp_path)
    done = gradtool("layernorm-backward", acts, "--files-from", tmp_path / "list", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert snapshot(tmp_path) == before
