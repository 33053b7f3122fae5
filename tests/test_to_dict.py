"""`to_dict` of every result: what the command prints as JSON, as plain Python values."""

import json
import math
import types
from pathlib import Path

import numpy as np
import pytest
from layers import layer
from support import gradtool as command
from support import gradtool_json, write

import gradtool

PLAIN = (dict, list, str, int, float, bool, types.NoneType)
# Times differ from call to call, and so does what follows from them.
CHANGING = {"seconds", "timings", "gb_per_s", "threads", "backend_why", "free_bytes", "executable", "settings"}
CALLS = {
    "norm": (["x", "y", "--per-tensor", "--by-file", "--group", "a", "--histogram"], lambda: gradtool.norm(
        ["x", "y"], per_tensor=True, by_file=True, group="a", histogram=True
    )),
    "diff": (["x", "y", "--per-tensor", "--map", "a=c", "--missing", "skip"], lambda: gradtool.diff(
        "x", "y", per_tensor=True, map="a=c", missing="skip"
    )),
    "digest": (["x", "y"], lambda: gradtool.digest(["x", "y"])),
    "check": (["x", "y"], lambda: gradtool.check(["x", "y"])),
    "info": (["x", "y"], lambda: gradtool.info(["x", "y"])),
    "clip": (["x", "--per-tensor", "--max-norm", "1", "--output", "new"], lambda: gradtool.clip(
        "x", per_tensor=True, max_norm=1, output="new"
    )),
    "accumulate": (["x", "--output", "new", "--unscale", "2", "--per-gradient"], lambda: gradtool.accumulate(
        "x", output="new", unscale=2, per_gradient=True
    )),
    "zero": (["x", "--output", "new"], lambda: gradtool.zero("x", output="new")),
    "layernorm-backward": (["layers", "--output", "new"], lambda: gradtool.layernorm_backward(
        "layers", output="new"
    )),
    "recover": (["x"], lambda: gradtool.recover("x")),
    "doctor": (["."], lambda: gradtool.doctor(".")),
}  # fmt: skip


def leaves(value):
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    yield value


def stable(value):
    if isinstance(value, dict):
        return {key: stable(item) for key, item in value.items() if key not in CHANGING}
    return [stable(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x", {"a": np.array([[3, 4]], np.float32), "b": np.array([12], np.float64)}, {"step": "7"})
    write(tmp_path / "y", {"c": np.array([[1, 4]], np.float32)})
    write(tmp_path / "layers", layer((6, 9)))


@pytest.mark.parametrize("name", CALLS)
def test_to_dict_is_the_data_of_the_json(name):
    arguments, call = CALLS[name]
    expected = gradtool_json(name, *arguments)["data"]
    given = call().to_dict()
    assert list(given) == list(expected)
    assert {type(value) for value in leaves(given)} <= set(PLAIN)
    assert stable(given) == stable(expected)
    assert json.loads(json.dumps(given)) == given


def test_nan_and_inf_are_floats_and_messages_are_those_of_python():
    write(Path("bad"), {"a": np.array([[0, 1], [math.nan, math.inf]], np.float32)})
    data = gradtool.norm("bad", top=1).to_dict()
    assert math.isnan(data["norm"])
    assert data["max_abs"] == math.inf
    assert data["per_tensor"][0]["shape"] == [2, 2]
    write(Path("good"), {"a": np.ones((2, 2), np.float32)})
    result = gradtool.accumulate(["good", "bad"], output="new", nonfinite="skip")
    warning = result.to_dict()["warnings"][-1]
    assert type(warning) is dict
    assert (warning["code"], warning["index"]) == ("skipped", 2)
    finding = gradtool.check("bad").to_dict()["per_finding"][0]
    assert finding["message"] == "1 NaN, 1 Inf, the first at [1, 0]"
    assert 'nonfinite="zero"' in finding["remedy"]
    assert type(finding["remedy"]) is str


def test_an_index_is_data_in_json_and_readable_in_the_message():
    write(Path("bad"), {"a": np.where(np.arange(120).reshape(2, 6, 10) == 79, np.nan, 1).astype(np.float32)})
    done = command("norm", "bad")
    assert "tensor 'a': 1 NaN, 0 Inf, the first at [1, 1, 9]\n" in done.stderr
    (error,) = gradtool_json("norm", "bad")["errors"]
    assert error["index"] == 79
