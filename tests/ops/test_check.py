import json
import math
import os
import pickle
import re
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from leftovers import ID, crash, half_changed, half_replaced
from leftovers import files_in as unaligned_files_in
from runner import run
from support import NUMPY_TYPES, VALUE_TYPES, encode, registered, snapshot, with_header
from support import gradtool as command
from support import gradtool_json as command_json
from support import write as write_unaligned
from support import write_index as write_unaligned_index
from terminal import on_terminal

from gradtool import BadInputError, SystemRefusedError, UsageError, check, norm
from gradtool.errors import as_command, changed_meanwhile
from gradtool.ops.passes import Measurement

ONES = {"a": np.ones(4, np.float32)}


def aligned(path):
    """The file with its data where the library lets it begin."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length].ljust(length + -length % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return path


def write(path, tensors):
    return aligned(write_unaligned(path, tensors))


def write_index(folder, shards, weight_map=None):
    index = write_unaligned_index(folder, shards, weight_map)
    for file in shards:
        aligned(folder / file)
    return index


def files_in(folder):
    return [aligned(path) for path in unaligned_files_in(folder)]


def one_file(folder, **tensors):
    return write(folder / "x.safetensors", tensors)


def found(result):
    """The severity, code and tensor of each finding."""
    return [(one.severity, one.code, one.name) for one in result.per_finding]


def codes(result):
    return [one.code for one in result.per_finding]


def test_a_sound_file_has_no_findings_and_its_values_are_counted(tmp_path):
    path = one_file(tmp_path, a=encode([1, 0, -2], "F32"), b=encode([0.5] * 4, "BF16"), c=np.ones(2, np.int32))
    result = check(path)
    assert (result.sound, result.faults, result.notes, result.per_finding, result.problems) == (True, 0, 0, (), ())
    assert (result.files, result.tensors, result.elements, result.bytes) == (1, 3, 9, 28)
    assert (result.nan, result.inf, result.zeros, result.subnormal, result.saturated) == (0, 0, 1, 0, 0)
    rows = {row.dtype: (row.tensors, row.elements, row.bytes, row.zeros) for row in result.per_dtype}
    # Values of I32 are not read.
    assert rows == {"F32": (1, 3, 12, 1), "BF16": (1, 4, 8, 0), "I32": (1, 2, 8, None)}


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_values_are_counted_by_type_as_numpy_counts_them(tmp_path, dtype, threads):
    limits = ml_dtypes.finfo(NUMPY_TYPES[dtype])
    rng = np.random.default_rng(1)
    special = [math.nan, 0.0, -0.0, float(limits.smallest_subnormal), float(limits.max), 1.0]
    special += [] if dtype == "F8_E4M3" else [math.inf, -math.inf]
    arrays = [encode(rng.choice(special, 300_007), dtype) for _ in range(2)]
    values = np.concatenate([array.astype(np.float64) for array in arrays])
    magnitudes = np.abs(values)
    row = check(one_file(tmp_path, a=arrays[0], b=arrays[1]), threads=threads).per_dtype[0]
    assert (row.dtype, row.elements) == (dtype, 600_014)
    assert row.nan == np.count_nonzero(np.isnan(values))
    assert row.inf == np.count_nonzero(np.isinf(values))
    assert row.zeros == np.count_nonzero(values == 0)
    assert row.subnormal == np.count_nonzero((magnitudes > 0) & (magnitudes < float(limits.smallest_normal)))
    assert row.saturated == np.count_nonzero(magnitudes == float(limits.max))


def test_nan_and_inf_are_a_fault_of_their_tensor_with_the_command_that_helps(tmp_path):
    path = one_file(tmp_path, fine=np.ones(3, np.float32), ill=encode([1, math.nan, math.inf], "F32"))
    result = check(path)
    assert found(result) == [("fault", "nonfinite", "ill")]
    (finding,) = result.per_finding
    assert finding.message == "1 NaN, 1 Inf, the first at [1]"
    remedy = as_command(finding.remedy)
    assert remedy == f"run gradtool clip {path} --max-norm inf --nonfinite zero to set them to 0"
    assert (result.problems[0].message, result.problems[0].hint) == (finding.message, finding.remedy)
    assert command(*remedy.removesuffix(" to set them to 0").split()[2:]).returncode == 0
    assert check(path).sound


@pytest.mark.parametrize(("dtype", "severity"), [("F32", "fault"), ("F16", "fault"), ("F8_E4M3", "note")])
def test_saturated_values_are_a_fault_but_not_in_types_that_values_are_scaled_to(tmp_path, dtype, severity):
    largest = float(ml_dtypes.finfo(NUMPY_TYPES[dtype]).max)
    result = check(one_file(tmp_path, a=encode([1, -largest, 2], dtype)))
    assert found(result) == [(severity, "saturated", "a")]
    assert result.sound == (severity == "note")
    assert f"1 value has the largest magnitude of {dtype}, {largest:.6g}," in result.per_finding[0].message


def test_the_value_below_the_largest_is_not_saturated(tmp_path):
    assert check(one_file(tmp_path, a=encode([65472], "F16"))).saturated == 0


def test_a_few_subnormal_values_are_counted_and_not_told(tmp_path):
    values = np.ones(100)
    values[:10] = 1e-6
    values[50:60] = 0
    # 10 of 90 are more than a tenth; 9 of 90 are not.
    result = check(one_file(tmp_path, many=encode(values, "F16"), few=encode(values[1:], "F16")))
    assert result.subnormal == 19
    assert found(result) == [("note", "subnormal", "many"), ("note", "subnormal", "few")][: len(result.per_finding)]
    few = values.copy()
    few[0] = 1
    result = check(one_file(tmp_path, many=encode(values, "F16"), few=encode(few, "F16")))
    assert found(result) == [("note", "subnormal", "many")]
    assert result.sound
    assert result.per_finding[0].message.startswith("10 of 90 values other than 0 are subnormal in F16")


def test_a_gradient_in_f16_with_its_usual_subnormal_values_is_healthy(tmp_path):
    values = 1e-2 * np.random.default_rng(1).standard_normal(100_000)
    result = check(one_file(tmp_path, a=encode(values, "F16")), strict=True)
    assert result.subnormal > 100
    assert (result.sound, result.per_finding) == (True, ())


def test_tensors_of_zeros_are_one_note_for_each_file(tmp_path):
    zeros = {name: np.zeros(2, np.float32) for name in "abcde"}
    path = one_file(tmp_path, **zeros, other=np.ones(2, np.float32), empty=np.zeros(0, np.float32))
    result = check(path)
    assert found(result) == [("note", "all-zero", None)]
    assert result.per_finding[0].message == "5 tensors of 7 hold only zeros: 'a', 'b', 'c' and 2 more"


def test_strict_makes_notes_matter(tmp_path):
    path = one_file(tmp_path, a=np.zeros(2, np.float32))
    assert (check(path).sound, check(path, strict=True).sound) == (True, False)
    assert [len(check(path).problems), len(check(path).warnings)] == [0, 1]
    assert [len(check(path, strict=True).problems), len(check(path, strict=True).warnings)] == [1, 0]
    assert [command("check", path).returncode, command("check", path, "--strict").returncode] == [0, 1]


def test_fast_reads_no_values(tmp_path):
    path = one_file(tmp_path, a=encode([math.nan], "F32"))
    result = check(path, fast=True)
    assert (result.sound, result.fast, result.nan, result.zeros, result.backend) == (True, True, None, None, None)
    assert (result.tensors, result.per_dtype[0].elements, result.per_dtype[0].nan) == (1, 1, None)
    assert result.timings.read_bytes == 0


@pytest.mark.parametrize(("spaces", "count"), [(0, None), (3, "byte")])
def test_data_that_is_not_aligned_is_a_note(tmp_path, spaces, count):
    path = tmp_path / "x"
    header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    length = len(json.dumps(header))
    path.write_bytes(with_header(header, b"\0\0\x80\x3f", padding=-length % 8 + spaces))
    result = check(path)
    assert found(result) == ([] if count is None else [("note", "unaligned", None)])


def test_a_tensor_that_begins_within_an_element_is_a_note(tmp_path):
    path = write(tmp_path / "x", {"byte": np.ones(1, np.uint8), "a": np.ones(2, np.float32)})
    header = json.loads(path.read_bytes()[8:].partition(b"}}")[0] + b"}}")
    path.write_bytes(with_header(header, path.read_bytes()[-9:], padding=-len(json.dumps(header)) % 8))
    result = check(path)
    assert found(result) == [("note", "unaligned", None)]
    assert "1 tensor begins within an element's size: 'a'" in result.per_finding[0].message


def test_every_broken_file_is_told_and_the_others_are_checked(tmp_path):
    good = {"n": encode([math.nan], "F32")}
    for number in range(3):
        path = write(tmp_path / f"{number}.safetensors", {f"t{number}": np.ones(9, np.float32)})
        path.write_bytes(path.read_bytes()[: -4 * (number + 1)])
    write(tmp_path / "good.safetensors", good)
    result = check(tmp_path)
    assert [(one.code, Path(one.file).name) for one in result.per_finding] == [
        ("input", "0.safetensors"),
        ("input", "1.safetensors"),
        ("input", "2.safetensors"),
        ("nonfinite", "good.safetensors"),
    ]
    first = result.per_finding[0]
    assert first.message.startswith("truncated: the header says 108 bytes, the file has 104 (4 missing)")
    assert first.remedy
    assert command("check", tmp_path).returncode == 1


def header_with_a_hole():
    entries = {name: {"dtype": "F32", "shape": [1], "data_offsets": [at, at + 4]} for name, at in (("a", 0), ("b", 8))}
    return with_header(entries, bytes(12))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header_with_a_hole(), "bad offsets: begins at 8 instead of 4"),
        (with_header({}, b"12345678"), "trailing bytes"),
        (with_header(b'{"a": 5}'), "is not a valid safetensors file"),
    ],
)
def test_a_damaged_file_is_a_fault(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    result = check(path)
    assert found(result)[0][:2] == ("fault", "input")
    assert message in result.per_finding[0].message
    assert result.per_finding[0].remedy
    assert not result.sound


def test_a_name_that_is_twice_in_a_header_is_a_fault(tmp_path):
    path = tmp_path / "x.safetensors"
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = b"{" + entry + b"," + entry.replace(b"F32", b"I32") + b"}"
    path.write_bytes(with_header(text, bytes(4), padding=-len(text) % 8))
    assert ("fault", "duplicate-name", "a") in found(check(path))
    metadata = b'{"__metadata__":{"a":"1","a":"2"},' + entry + b"}"
    path.write_bytes(with_header(metadata, b"\0\0\x80\x3f", padding=-len(metadata) % 8))
    assert found(check(path)) == []


def test_an_index_and_its_shards_are_compared_in_both_directions_to_the_end(tmp_path):
    shards = {"1.safetensors": {"a": ONES["a"], "b": ONES["a"]}, "2.safetensors": {"c": ONES["a"], "d": ONES["a"]}}
    weight_map = {"a": "1.safetensors", "lost": "1.safetensors", "c": "2.safetensors", "gone": "3.safetensors"}
    index = write_index(tmp_path, shards, weight_map)
    write(tmp_path / "4.safetensors", {"x": ONES["a"]})
    for path in (index, tmp_path):
        assert found(check(path)) == [
            ("fault", "missing-file", None),
            ("fault", "missing-tensor", "lost"),
            ("fault", "extra-tensor", "b"),
            ("fault", "extra-tensor", "d"),
            ("note", "unmapped-file", None),
        ]
    assert check(index).per_finding[-1].file == str(tmp_path / "4.safetensors")
    assert check(tmp_path / "1.safetensors").sound


def test_tensors_that_the_index_does_not_map_to_a_file_are_named_together(tmp_path):
    shards = {"1.safetensors": dict.fromkeys("abc", ONES["a"]), "2.safetensors": dict.fromkeys("de", ONES["a"])}
    index = write_index(tmp_path, shards, {"a": "1.safetensors", "d": "2.safetensors", "e": "1.safetensors"})
    result = check(index)
    assert [(one.code, one.name, one.message) for one in result.per_finding] == [
        ("missing-tensor", "e", "the index maps it to 1.safetensors, which does not contain it"),
        ("extra-tensor", None, "1.safetensors contains 'b', 'c', which the index does not map to it"),
        ("extra-tensor", "e", "is in 2.safetensors, but the index does not map it there"),
    ]
    # Other commands say the first of it, under the code of every invalid index.
    with pytest.raises(BadInputError) as caught:
        norm(index)
    (problem,) = caught.value.problems
    assert (problem.code, problem.tensor, problem.message) == ("input", "e", result.per_finding[0].message)


def test_a_name_that_the_index_maps_to_one_of_two_shards_which_have_it_is_one_fault(tmp_path):
    index = write_index(tmp_path, {"1.safetensors": ONES, "2.safetensors": ONES}, {"a": "1.safetensors"})
    (tmp_path / "2.safetensors").rename(tmp_path / "3.safetensors")
    write(tmp_path / "2.safetensors", ONES | {"b": ONES["a"]})
    mapped = {"a": "1.safetensors", "b": "2.safetensors"}
    index.write_text(json.dumps({"weight_map": mapped}))
    assert found(check(index)) == [("fault", "duplicate-name", "a"), ("note", "unmapped-file", None)]


def test_a_name_in_several_shards_is_one_fault_for_each_two_files(tmp_path):
    for name in ("1.safetensors", "2.safetensors", "3.safetensors"):
        write(tmp_path / name, {f"t{number}": ONES["a"] for number in range(5)})
    result = check(tmp_path)
    assert found(result) == [("fault", "duplicate-name", None)] * 2
    message = "has 't0', 't1', 't2' and 2 more, which 1.safetensors has too"
    assert all(one.message.startswith(message) for one in result.per_finding)
    # Each by itself is sound.
    assert check(sorted(tmp_path.iterdir())).sound


def test_one_file_under_two_names_of_an_index_is_a_fault(tmp_path):
    index = write_index(tmp_path, {"1.safetensors": ONES}, {"a": "1.safetensors", "b": "2.safetensors"})
    os.link(tmp_path / "1.safetensors", tmp_path / "2.safetensors")
    assert "duplicate-file" in codes(check(index))


def test_a_damaged_index_is_a_fault_and_the_files_beside_it_are_checked(tmp_path):
    write(tmp_path / "1.safetensors", {"a": encode([math.inf], "F32")})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5')
    assert codes(check(tmp_path)) == ["input", "nonfinite"]


def test_several_indexes_are_a_fault(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    assert found(check(tmp_path)) == [("fault", "input", None)]


FOREIGN = {
    "pickle": pickle.dumps(list(range(1000))),
    "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "empty": b"",
    "short": b"12345",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_of_another_type_has_exit_code_3_and_does_not_hide_other_problems(tmp_path, kind):
    (tmp_path / "0.safetensors").write_bytes(FOREIGN[kind])
    write(tmp_path / "1.safetensors", {"a": encode([math.nan], "F32")})
    write(tmp_path / "2.safetensors", ONES | {"b": ONES["a"]}).write_bytes(with_header({}, b"123"))
    with pytest.raises(BadInputError) as caught:
        check(tmp_path)
    assert [Path(one.file).name for one in caught.value.problems] == [f"{n}.safetensors" for n in (0, 2, 1)]
    answer = command_json("check", tmp_path)
    assert (answer["exit_code"], answer["status"], len(answer["errors"])) == (3, "error", 3)


def test_a_path_that_is_missing_has_exit_code_3(tmp_path):
    good = one_file(tmp_path, **ONES)
    for path, message in ((tmp_path / "nothing", "no such file"), (tmp_path / "empty", "has no .safetensors file")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(BadInputError, match=message) as caught:
            check([good, path])
        assert caught.value.problems[0].code == "missing-file"
    with pytest.raises(BadInputError, match="is not a regular file"):
        check("/dev/null")
    with pytest.raises(UsageError, match="no path is given"):
        check([])


# Around all that a run does to the disk; the last steps only clean up.
STEPS = [3, 6, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 25]


@pytest.mark.parametrize("way", ["replace", "inplace"])
@pytest.mark.parametrize("step", STEPS)
def test_what_a_killed_run_left_is_told_and_stays_as_it_is(tmp_path, way, step):
    folder = tmp_path / "grads"
    rng = np.random.default_rng(1)
    for number in range(3):
        array = rng.standard_normal(1000).astype(np.float32)
        write(folder / f"{number}.safetensors", {f"t{number}": array})
    done = run("clip", folder, "--max-norm", "1", "--write", way, "--threads", "1", fault=f"kill@{step}")
    before = snapshot(folder)
    left = [path.name for path in before if path.name.startswith(".gradtool-") and path.suffix != ".lock"]
    result = check(folder)
    # A file that is half overwritten may have any value.
    told = [one for one in found(result) if one[1] in {"unfinished", "leftover"}]
    if (refused := run("norm", folder)).code == 5:
        assert "may be half changed" in refused.err
        assert told == [("fault", "unfinished", None)]
    else:
        assert told == [("note", "leftover", None)] * bool(left)
        assert result.sound
    assert (done.code == 0) == (not left and not told and step > 15)
    for path in sorted(folder.glob("*.safetensors")):
        assert [one[1] for one in found(check(path)) if one[0] == "fault"] == ["unfinished"] * (refused.code == 5)
    assert snapshot(folder) == before
    for one in result.per_finding:
        assert as_command(one.remedy) == f"run gradtool recover {folder}"
        assert command("recover", folder).returncode == 0
    assert check(folder, strict=True).sound


@pytest.mark.parametrize(
    ("leave", "faults"), [(half_replaced, {"unfinished"}), (half_changed, {"unfinished", "input"})]
)
def test_a_file_that_is_no_safetensors_file_because_a_run_crashed_is_a_fault(tmp_path, leave, faults):
    leave(unaligned_files_in(tmp_path))
    before = snapshot(tmp_path)
    result = check(tmp_path)
    assert faults == {one.code for one in result.per_finding if one.severity == "fault"}
    assert snapshot(tmp_path) == before


def test_a_run_that_is_changing_files_is_a_fault_for_as_long_as_it_does(tmp_path):
    paths = files_in(tmp_path)
    run = registered(paths)
    try:
        assert check(tmp_path).sound
        changes = [[0, path.name, path.stat().st_size, path.stat().st_ino] for path in paths]
        run.append(ready=[[], changes, [0, 1, 0]], fsync=False)
        result = check(paths[1])
        assert found(result) == [("fault", "in-use", None)]
        assert f"PID {os.getpid()}" in result.per_finding[0].message
    finally:
        run.withdraw()
        run.close()
    assert check(tmp_path, strict=True).sound


def test_what_a_crashed_run_left_beside_whole_files_is_a_note(tmp_path):
    paths = files_in(tmp_path)
    crash(lambda: registered(paths))
    assert found(check(tmp_path)) == [("note", "leftover", None)]
    assert command("recover", tmp_path).returncode == 0
    assert found(check(tmp_path)) == []


def test_files_of_a_run_without_a_log_are_a_note_with_their_bytes(tmp_path):
    path = one_file(tmp_path, **ONES)
    (tmp_path / f"{ID}-0.tmp").write_bytes(bytes(1000))
    (tmp_path / f"{ID}-1.tmp").write_bytes(bytes(500))
    for named in (tmp_path, path):
        result = check(named)
        assert found(result) == [("note", "leftover", None)]
        assert result.per_finding[0].message == "a run without a log has left 2 files of 1,500 bytes"
    # One that may be about to write its log.
    for name in tmp_path.glob(f"{ID}*"):
        name.unlink()
    (tmp_path / f"{ID}.lock").touch()
    assert check(tmp_path, strict=True).sound


def test_the_remedy_names_the_folder_as_it_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    half_replaced(files_in(tmp_path))
    for path, named in (("0.safetensors", "."), (".", "."), (f"../{tmp_path.name}", f"../{tmp_path.name}")):
        (finding,) = (one for one in check(path).per_finding if one.code == "unfinished")
        assert as_command(finding.remedy) == f"run gradtool recover {named}"


def test_files_that_are_replaced_all_the_time_are_checked(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": np.ones(100, np.float32)})
    over = threading.Event()

    def replace():
        while not over.is_set():
            write(tmp_path / "new", {"a": np.ones(100, np.float32)}).replace(path)
            over.wait(0.02)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        assert all(check(path).sound for _ in range(5))
    finally:
        over.set()
        writer.join()


def test_a_file_that_changes_whenever_it_is_read_is_refused_in_the_end(tmp_path, monkeypatch):
    path, calls = one_file(tmp_path, **ONES), []

    def add(*_, **__):
        calls.append(1)
        raise changed_meanwhile(path)

    monkeypatch.setattr(Measurement, "add", add)
    with pytest.raises(SystemRefusedError, match="was changed by another program") as caught:
        check(path)
    assert (len(calls), caught.value.problems[0].code) == (3, "changed")


def test_what_is_selected_is_checked(tmp_path):
    path = one_file(tmp_path, good=np.ones(2, np.float32), bad=encode([math.nan], "F32"))
    assert check(path, exclude="^bad$").sound
    assert check(path, include="good").tensors == 1
    with pytest.raises(BadInputError, match="matches no tensor name"):
        check(path, include="nothing")
    with pytest.raises(UsageError, match="is not a regular expression"):
        check(path, include="(")


def client(folder, name, tensors, **metadata):
    """A set of one file, with metadata."""
    return aligned(write_unaligned(folder / f"{name}.safetensors", tensors, metadata))


def clients(folder):
    """Five sets: two that are alike, and three that differ in names, in types and shapes, and in a weight."""
    a, b, c = (np.ones(shape, np.float32) for shape in ((2, 3), (4,), ()))
    usual = {"a": a, "b": b, "c": c}
    return [
        client(folder, "named", {"a": a, "z": b, "y": c}, tokens="7", note="text"),
        client(folder, "same", usual, tokens="8", format="pt"),
        client(folder, "like", usual, tokens="1e3"),
        client(folder, "other", {"a": a.T.copy(), "b": b.astype(np.float16), "c": c}, tokens="9"),
        client(folder, "light", usual, tokens="many", epoch="1"),
    ]


def test_what_differs_between_sets_is_a_note_for_each_that_is_not_like_most(tmp_path):
    paths = clients(tmp_path)
    named, _, _, other, light = map(str, paths)
    result = check(paths)
    assert [(row.severity, row.code, row.file, row.message) for row in result.per_finding] == [
        (
            *("note", "unlike", named),
            "differs from 2 of 5 sets: 2 tensors missing ('b', 'c'); 2 tensors extra ('z', 'y')",
        ),
        (
            *("note", "unlike", other),
            "differs from 2 of 5 sets: 2 tensors different ('a' is F32 3x2, not F32 2x3)",
        ),
        (
            *("note", "unlike", light),
            "differs from 2 of 5 sets: 1 weight missing ('tokens'); 1 weight extra ('epoch')",
        ),
    ]
    assert [tuple(vars(row).values()) for row in result.per_difference] == [
        ("tensor", "b", named, None, "F32 4"),
        ("tensor", "c", named, None, "F32 scalar"),
        ("tensor", "z", named, "F32 4", None),
        ("tensor", "y", named, "F32 scalar", None),
        ("tensor", "a", other, "F32 3x2", "F32 2x3"),
        ("tensor", "b", other, "F16 4", "F32 4"),
        ("weight", "tokens", light, None, "a number"),
        ("weight", "epoch", light, "a number", None),
    ]
    assert (result.sound, result.faults, result.notes, result.problems) == (True, 0, 3, ())
    done = command("check", *paths)
    assert (done.returncode, done.stderr.count("gradtool: warning: "), done.stderr.count("hint: ")) == (0, 3, 1)
    assert command("check", *paths, "--strict").returncode == 1


def test_two_sets_that_differ_in_many_names_have_one_line(tmp_path):
    first = client(tmp_path, "a", {f"x{i}": np.ones(1, np.float32) for i in range(100)})
    second = client(tmp_path, "b", {f"x{i}": np.ones(1, np.float32) for i in range(50, 150)})
    done = command("check", first, second)
    missing, extra = "'x0', 'x1', 'x2' and 47 more", "'x100', 'x101', 'x102' and 47 more"
    message = f"differs from {first}: 50 tensors missing ({missing}); 50 tensors extra ({extra})"
    hint = "  hint: leave it out, or write it again like the others"
    assert done.stderr.splitlines() == [f"gradtool: warning: {second}: {message}", hint]
    code, shown = on_terminal("check", first, second)
    assert (code, shown.count("x100"), "difference" in shown) == (0, 1, False)


def test_parts_of_one_vector_and_tensors_that_are_not_selected_do_not_differ(tmp_path):
    ones = np.ones(2, np.float32)
    parts = [client(tmp_path, f"rank{i}", {f"layer{i}": ones}, tokens="3") for i in range(3)]
    assert check(parts, strict=True).sound
    paths = clients(tmp_path)
    assert check(paths[:4], include=["a"]).notes == 1
    assert check([paths[0], paths[1]], include=["a"], strict=True).sound
    # Its files are those of the set before.
    assert check([paths[1], paths[1], paths[2]], strict=True).sound


def test_a_file_that_is_named_twice_is_counted_once(tmp_path):
    path = one_file(tmp_path, **ONES)
    assert (check([path, path, tmp_path]).files, check([path, tmp_path]).tensors) == (1, 1)


def test_paths_may_come_from_a_list(tmp_path):
    path = one_file(tmp_path, **ONES)
    (tmp_path / "list").write_text(f"{path}\n")
    assert check(files_from=tmp_path / "list").files == 1


def test_the_keys_of_the_json_are_documented(tmp_path):
    answer = command_json("check", one_file(tmp_path, a=encode([math.nan], "F32")))
    assert (answer["exit_code"], answer["status"]) == (1, "found")
    assert list(answer["data"]) == [
        *("sound", "faults", "notes", "fast", "nan", "inf", "zeros", "subnormal", "saturated", "warnings", "files"),
        *("tensors", "elements", "bytes", "backend", "backend_why", "threads", "seconds", "timings"),
        *("per_dtype", "per_finding", "per_difference"),
    ]
    (finding,) = answer["data"]["per_finding"]
    assert list(finding) == ["severity", "code", "message", "remedy", "name", "file"]
    (error,) = answer["errors"]
    assert (error["message"], error["hint"]) == (finding["message"], finding["remedy"])
    (row,) = answer["data"]["per_dtype"]
    assert list(row) == [
        *("dtype", "tensors", "elements", "bytes", "nan", "inf", "zeros", "subnormal", "saturated"),
    ]


def test_lines_have_a_finding_each_and_errors_and_warnings_go_to_stderr(tmp_path):
    path = one_file(tmp_path, a=encode([math.nan], "F32"), b=np.zeros(3, np.float32))
    done = command("check", path)
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [line[:3] for line in lines if line[0] == "finding"] == [
        ["finding", "fault", "nonfinite"],
        ["finding", "note", "all-zero"],
    ]
    assert ["sound", "no"] in lines
    kinds = [line.removeprefix("gradtool: ").partition(":")[0].strip() for line in done.stderr.splitlines()]
    assert kinds == ["error", "hint", "warning", "hint"]


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_shows_the_counts_and_each_finding_once(tmp_path, columns):
    path = one_file(tmp_path, a=encode([math.nan], "F32"), b=encode([1], "F16"))
    code, shown = on_terminal("check", path, columns=columns)
    assert code == 1
    assert shown.count("1 NaN, 0 Inf, the first") == 1
    assert "subnormal" in shown
    # Slow machines show a progress bar, too.
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.splitlines() if "\x1b[?" not in line]
    assert max(len(line) for line in lines if str(path) not in line and "\x1b[2K" not in line) <= columns


def test_nothing_is_written(tmp_path):
    folder = tmp_path / "read"
    one_file(folder, **ONES)
    before = snapshot(folder)
    folder.chmod(0o555)
    assert command("check", folder).returncode == 0
    assert snapshot(folder) == before
