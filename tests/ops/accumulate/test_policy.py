import math

import pytest
from buffers import f32, lay_out, refused
from support import gradtool, snapshot

from gradtool import UsageError


@pytest.mark.parametrize(
    "options",
    [
        {"weight": [1]},
        {"weight": [1, 1, 1]},
        {"weight": [1, math.nan]},
        {"weight": [1, math.inf]},
        {"weight": ["much", 1]},
        {"weight": [1, 1], "weight_key": "n"},
        {"dtype": "F32"},
        {"into": None},
        {"into": None, "output": "out", "dtype": "I32"},
        {"into": None, "output": "out", "overwrite": True},
        {"into": None, "output": "out", "max_shard_size": "1GB"},
        {"into": None, "output": "out", "shard_like": "g1"},
        {"into": None, "output_dir": "out", "shard_like": "g1", "max_shard_size": 1},
        {"into": None, "output": "out", "write": "inplace"},
        {"into": None, "output": "out/"},
        {"into": None, "output": "out.safetensors.index.json"},
        {"into": None, "output": "a", "output_dir": "b"},
        {"max_shard_size": 1, "output_dir": "out"},
        {"missing": "ignore"},
        {"nonfinite": "zero"},
        {"max_norm": -1},
        {"max_norm": math.nan},
        {"clip_each": -1},
        {"clip_each": math.nan},
        {"norm_type": 0},
        {"max_norm": 1, "eps": -1},
        {"max_norm": 1, "eps": math.inf},
        {"output": "a", "output_dir": "b"},
        {"output": ""},
        {"threads": 0},
        {"include": ["("]},
        {"backend": "tpu"},
    ],
)
def test_arguments_that_make_no_sense_are_usage_errors_and_change_nothing(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    path, grads = lay_out(tmp_path, f32(1), f32(2), f32(3))
    others = {name: value for name, value in options.items() if name != "into"}
    refused(UsageError, tmp_path, options.get("into", path), grads, **others)


def test_no_positional_argument_is_written(tmp_path):
    _, grads = lay_out(tmp_path, f32(), f32(1), f32(2))
    before = snapshot(tmp_path)
    done = gradtool("accumulate", *grads, "--mean")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gradtool: error: --into, --output or --output-dir is required\n"
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "options", [{"weight": "2"}, {"weight": [None]}, {"weight_key": ""}, {"weight_key": ["n"]}, {"missing": ["skip"]}]
)
def test_arguments_of_a_wrong_kind_are_usage_errors(tmp_path, options):
    path, grads = lay_out(tmp_path, f32(1), f32(3))
    assert refused(UsageError, tmp_path, path, grads, **options)[0][0] == "usage"


@pytest.mark.parametrize("dtype", ["", "float32", ["F32"]])
def test_a_type_that_is_none_is_a_usage_error(tmp_path, dtype):
    _, grads = lay_out(tmp_path, f32(), f32(1))
    assert refused(UsageError, tmp_path, None, grads, output=tmp_path / "new", dtype=dtype)[0][0] == "usage"
    assert not (tmp_path / "new").exists()
