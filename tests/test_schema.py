"""The JSON Schema in the package: it is strict, and what commands print is as it says (tests/schema.py checks all)."""

import copy
import importlib.util
import json
import math
import shutil
from dataclasses import dataclass
from typing import Literal

import jsonschema
import pytest
from runner import run
from schema import check_printed, checked, package_schema, validator
from support import SAMPLES, encode, gradtool, gradtool_json, write

CALLS = {
    "norm": ["sharded", "--per-tensor", "--by-file", "--group", "patch"],
    "diff": ["micro_0.safetensors", "micro_1.safetensors", "--per-tensor"],
    "check": ["sharded", "loss_scaled_f16.safetensors"],
    "digest": ["sharded"],
    "info": ["micro_0.safetensors"],
    "doctor": ["."],
    "clip": ["sharded", "--max-norm", "1", "--per-tensor"],
    "accumulate": ["micro_0.safetensors", "--into", "buffer.safetensors", "--per-gradient", "--clip-each", "1"],
    "zero": ["sharded"],
    "layernorm-backward": ["layernorm.safetensors"],
    "recover": ["killed"],
}
# Rows that cannot be had in the same call.
OTHER_ROWS = {
    "clip": ["sharded", "--group", "patch:1"],
    "info": ["split"],
    "accumulate": ["micro_0.safetensors", "nothing", "--into", "buffer.safetensors", "--screen", "readable"],
}
# The rows that these calls do not have; other tests have some.
NO_ROWS = {"norm": {"per_dtype"}, "diff": {"per_unmatched", "per_rule"}}


def tables_of(command, data):
    return {key: rows for key, rows in data.items() if key.startswith("per_") and key not in NO_ROWS.get(command, ())}


@pytest.fixture
def folder(tmp_path):
    """The sample data, and a set that a run left half changed when it was killed."""
    shutil.copytree(SAMPLES, tmp_path / "data")
    shutil.copytree(SAMPLES / "sharded", tmp_path / "data" / "killed")
    run("clip", "killed", "--max-norm", "1", "--write", "inplace", fault="kill@14", cwd=tmp_path / "data")
    return tmp_path / "data"


def parts(schema):
    """A schema and all schemas in it."""
    if isinstance(schema, dict):
        yield schema
    for item in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from parts(item)


def test_the_schema_is_valid_for_the_draft_that_it_names():
    schema = package_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)


def test_every_object_is_closed_and_every_field_is_described():
    definitions = package_schema()["$defs"]
    objects = [item for item in parts(definitions) if item.get("type") == "object" and "properties" in item]
    assert len(objects) >= 14
    for item in objects:
        assert item["additionalProperties"] is False
        for name, field in item["properties"].items():
            assert field["description"].endswith("."), name
    referred = {item["$ref"].removeprefix("#/$defs/") for item in parts(package_schema()) if "$ref" in item}
    assert referred | {"line"} == definitions.keys()


@pytest.mark.parametrize("command", CALLS)
def test_the_result_of_every_command_has_exactly_the_fields_of_the_schema(folder, command):
    answer = gradtool_json(command, *CALLS[command], cwd=folder)
    assert answer["exit_code"] == 0
    if command in OTHER_ROWS:
        others = gradtool_json(command, *OTHER_ROWS[command], cwd=folder)["data"]
        answer["data"] |= {key: rows for key, rows in others.items() if key.startswith("per_") and rows}
    assert all(tables_of(command, answer["data"]).values())
    assert not list(validator().iter_errors(answer))
    places = [answer, answer["data"], *(rows[0] for rows in tables_of(command, answer["data"]).values())]
    for number, place in enumerate(places):
        for key in [*place, "new"]:
            changed = copy.deepcopy(answer)
            data = changed["data"]
            where = [changed, data, *(rows[0] for rows in tables_of(command, data).values())][number]
            if where.pop(key, None) is None and key == "new":
                where["new"] = 1
            assert list(validator().iter_errors(changed)), f"{key} may be missing, or be there"


@pytest.mark.parametrize("command", CALLS)
def test_json_lines_have_every_key_of_the_schema_and_no_other(folder, command):
    done = gradtool(command, *CALLS[command], "--format", "jsonl", cwd=folder)
    *rows, last = [checked(line, "line") for line in done.stdout.splitlines()]
    assert (len(rows) > 0) == (command != "zero")
    for line in (*rows, last):
        assert list(validator("line").iter_errors(line | {"new": 1}))
        assert list(validator("line").iter_errors({key: value for key, value in line.items() if key != "type"}))
        assert list(validator().iter_errors(line))
    last["data"]["per_tensor"] = []
    assert list(validator("line").iter_errors(last))


@pytest.mark.parametrize(
    "change",
    [
        {"status": "found"},
        {"exit_code": 1},
        {"exit_code": 6},
        {"schema": 2},
        {"command": "clip"},
        {"command": "recover"},
        {"data": {}},
        {"data": None},
        {"errors": [{"code": "nonfinite", "message": "x"}]},
        {"status": "error", "exit_code": 3, "errors": [{"code": "input", "message": "x"}]},
        {"status": "error", "exit_code": 3, "data": {}},
        {"status": "error", "exit_code": 3, "data": {}, "errors": [{"code": "no-such-code", "message": "x"}]},
        {"status": "error", "exit_code": 3, "data": {}, "errors": [{"code": "input", "message": "x", "file": None}]},
        {"status": "error", "exit_code": 3, "data": {}, "errors": [{"code": "input"}]},
    ],
    ids=str,
)
def test_what_no_command_prints_is_no_result(change):
    answer = gradtool_json("norm", SAMPLES / "buffer.safetensors")
    assert list(validator().iter_errors(answer | change))


@pytest.mark.parametrize("value", [None, "nan", "5.0", True, [5.0]], ids=str)
def test_a_float_is_a_number_or_one_of_three_words(value):
    answer = gradtool_json("norm", SAMPLES / "buffer.safetensors")
    for good in ("NaN", "Infinity", "-Infinity", 5, 5e-324):
        answer["data"]["norm"] = good
        assert not list(validator().iter_errors(answer))
    answer["data"]["norm"] = value
    assert list(validator().iter_errors(answer))


def test_tests_check_what_they_print():
    for words in (["norm", "x", "--json"], ["norm", "x", "--format=json"], ["norm", "x", "--format", "jsonl"]):
        with pytest.raises(AssertionError):
            check_printed(words, '{"norm": 5.0}\n')
    check_printed(["norm", "x"], "norm\t5.0\n")
    with pytest.raises(json.JSONDecodeError):
        check_printed(["norm", "x", "--json"], "norm\t5.0\n")


def test_numbers_that_json_does_not_have_are_as_the_schema_says(tmp_path):
    path = write(tmp_path / "x", {"a": encode([math.inf], "F32"), "b": encode([math.nan], "F32")})
    answer = gradtool_json("norm", path, "--per-tensor")
    assert [row["norm"] for row in answer["data"]["per_tensor"]] == ["Infinity", "NaN"]


@dataclass(frozen=True)
class Bin:
    """How many values have an exponent."""

    exponent: int
    count: int


@dataclass(frozen=True)
class Row:
    """One tensor."""

    name: str | None
    severity: Literal["fault", "note"]


@dataclass(frozen=True)
class RowOfMore(Row):
    """The same, and more."""

    per_bin: tuple[Bin, ...]


@dataclass(frozen=True)
class Result:
    """What was found; None is null."""

    counts: dict[str, int]
    shape: tuple[int, ...] | None
    per_bin: tuple[Bin, ...]
    per_tensor: tuple[Row, ...]


@pytest.fixture
def generator():
    """What makes the schema, of classes that no command has."""
    path = SAMPLES.parent / "docs" / "make_schema.py"
    spec = importlib.util.spec_from_file_location("make_schema", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.Schema()
    made.types = {cls.__name__: cls for cls in (Bin, Row, RowOfMore, Result)}
    return made


def test_rows_may_extend_others_and_have_rows_themselves(generator):
    names = ("name", "exponent", "count", "severity", "per_bin", "counts", "shape", "per_tensor")
    generator.texts = {f"any.{name}": "A text." for name in names}
    generator.define(Result)
    definitions = generator.definitions
    assert definitions["Result"]["description"] == "What was found; null is null."
    assert definitions["Result"]["required"] == ["counts", "shape", "per_bin", "per_tensor"]
    schema = {"$ref": "#/$defs/Result", "$defs": definitions}
    row = {"exponent": 0, "count": 1}
    rows = [{"name": None, "severity": "note"}, {"name": "a", "severity": "fault", "per_bin": [row]}]
    good = {"counts": {"F32": 1}, "shape": None, "per_bin": [row], "per_tensor": rows}
    jsonschema.validate(good, schema)
    for wrong in (
        {"counts": {"F32": "1"}},
        {"shape": ["1"]},
        {"per_bin": [row | {"type": "bin"}]},
        {"per_bin": [{"exponent": 0}]},
        {"per_tensor": [rows[0] | {"severity": "?"}]},
        {"per_tensor": [rows[0] | {"per_bin": [{}]}]},
        {"per_tensor": [rows[0] | {"type": "tensor"}]},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(good | wrong, schema)
    for name, kind in (("Bin", "bin"), ("Row", "tensor"), ("RowOfMore", "tensor")):
        assert definitions[name]["properties"]["type"]["enum"] == [kind]


def test_a_field_that_nothing_is_said_of_is_refused_and_so_is_a_text_of_no_field(generator):
    generator.texts = {"Bin.exponent": "A text."}
    with pytest.raises(SystemExit, match=r"^docs/schema.toml does not say what Bin.count is$"):
        generator.define(Bin)
    generator.texts = {"Bin.exponent": "A text.", "any.count": "A text.", "Bin.none": "A text."}
    generator.definitions.clear()
    generator.define(Bin)
    with pytest.raises(SystemExit, match=r"^docs/schema.toml is about what there is not: Bin.none$"):
        generator.refuse_unused()
