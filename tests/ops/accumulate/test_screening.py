"""Rules that leave out gradients: what each is about, what the rest add up to, and what stays an error."""

import math
import re
from functools import partialmethod

import numpy as np
import pytest
from buffers import f32, in_parts, lay_out, refused
from leftovers import half_changed
from support import build, gradtool, gradtool_json, read, snapshot, until_told, write, write_index
from terminal import on_terminal

from gradtool import BadInputError, SystemRefusedError, TooFewError, UsageError, accumulate
from gradtool.engines.threads import Threads
from gradtool.ops.accumulate import Screening

RULES = ["cosine>=0.3", "norm<=5x", "finite", "complete", "weighted", "readable"]
FLAGS = [word for rule in RULES for word in ("--screen", rule)]
# The client that fails each rule.
FAULTY = {"readable": 4, "weighted": 19, "complete": 14, "finite": 9, "norm<=5x": 23, "cosine>=0.3": 27}


def a_round(folder, *, sharded=False):
    """Thirty clients with samples as weights, six of them faulty, each in its way; and the honest ones by number."""
    rng = np.random.default_rng(7)
    truth = {"b": rng.standard_normal(30), "w": rng.standard_normal((40, 30))}
    paths, honest = [], {}
    for number in range(30):
        tensors = {n: (v + 0.7 * rng.standard_normal(v.shape)).astype(np.float32) for n, v in truth.items()}
        scale = {FAULTY["norm<=5x"]: 50, FAULTY["cosine>=0.3"]: -1}.get(number, 1)
        if number not in FAULTY.values():
            honest[number] = dict(tensors)
        tensors = {n: scale * v for n, v in tensors.items() if n != "b" or number != FAULTY["complete"]}
        if number == FAULTY["finite"]:
            tensors["w"][3, 5] = np.nan
        metadata = None if number == FAULTY["weighted"] else {"samples": str(10 + number)}
        path = folder / f"client_{number:02}"
        for name, tensor in tensors.items() if sharded else ():
            last = write(path / f"{name}.safetensors", {name: tensor}, metadata)
        if not sharded:
            last = write(path, tensors, metadata)
        if number == FAULTY["readable"]:
            last.write_bytes(last.read_bytes()[:-1000])
        paths.append(path)
    return paths, honest


def left_out(result):
    return [(row.rule, row.file.rpartition("/")[2]) for row in result.per_screened]


def test_a_round_of_30_clients_with_a_fault_of_each_kind_is_one_command(tmp_path):
    paths, honest = a_round(tmp_path / "round")
    before = snapshot(tmp_path / "round")
    arguments = [*paths, "--mean", "--weight-key", "samples", *FLAGS, "--per-gradient", "--at-least", "24"]
    answer = gradtool_json("accumulate", *arguments, "--output", tmp_path / "mean")
    data = answer["data"]
    weights = {number: 10 + number for number in honest}
    total = sum(weights.values())
    for name, values in read(tmp_path / "mean").items():
        expected = sum(weights[n] * honest[n][name].astype(np.float64) for n in honest) / total
        assert np.allclose(values, expected, rtol=1e-6, atol=0)
    assert (answer["exit_code"], data["taken"], data["skipped"], data["weight_sum"]) == (0, 24, 6, total)
    assert {row["rule"]: row["file"] for row in data["per_screened"]} == {
        rule: str(paths[number]) for rule, number in FAULTY.items()
    }
    reasons = [row["reason"] for row in data["per_screened"]]
    assert reasons[0].startswith("truncated: the header says 5,098 bytes, the file has 4,098")
    assert reasons[1:4] == [
        "no 'samples' in its metadata", "lacks 1 tensor of most gradients ('b')",
        "tensor 'w': 1 NaN, 0 Inf, the first at [3, 5]",
    ]  # fmt: skip
    assert reasons[4].startswith("norm 2085.09 is 50.2 times the median 41.")
    assert reasons[5] == "cosine to the result is -0.754"
    rows = data["per_gradient"]
    assert [row["file"] for row in rows] == list(map(str, paths))
    assert {row["screened"]: n for n, row in enumerate(rows) if row["screened"]} == FAULTY
    assert [n for n, row in enumerate(rows) if row["taken"]] == list(honest)
    known = [[rows[FAULTY[rule]][key] for key in ("weight", "nan", "cosine")] for rule in ("readable", "finite")]
    assert known == [[None, None, None], [19.0, 1, None]]
    # The rows of those that passed are about the result without the others.
    both = [np.concatenate([tensors[n].ravel() for n in "bw"]) for tensors in (honest[0], read(tmp_path / "mean"))]
    cosine = both[0] @ both[1] / np.linalg.norm(both[0]) / np.linalg.norm(both[1])
    assert rows[0]["cosine"] == pytest.approx(cosine, rel=1e-5)
    done = gradtool("accumulate", *arguments, "--output", tmp_path / "mean")
    assert [line.split(": left out by ")[0] for line in done.stderr.splitlines()] == [
        f"gradtool: warning: {paths[number]}{place}"
        for number, place in zip(FAULTY.values(), ["", "", "", ": tensor 'w'", "", ""], strict=True)
    ]
    assert f"{paths[23]}: left out by --screen 'norm<=5x': norm 2085.09 is 50.2 times the median" in done.stderr
    assert [(entry["tensor"], entry["index"]) for entry in data["warnings"] if "index" in entry] == [("w", 95)]
    assert f"screened\tcosine>=0.3\tcosine to the result is -0.754\t{paths[27]}\n" in done.stdout
    assert snapshot(tmp_path / "round") == before


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_terminal_shows_rows_of_which_little_is_known(tmp_path, columns):
    path, grads = lay_out(tmp_path, f32(0), f32(3), f32(4))
    grads[0].write_bytes(b"")
    arguments = [*grads, "--into", path, "--screen", "readable", "--per-gradient"]
    code, shown = on_terminal("accumulate", *arguments, errors=False, columns=columns)
    assert code == 0
    rows = re.sub(r"\x1b\[[0-9;]*m", "", shown).partition("g1")[2].split()
    assert rows.count("readable") == 1
    assert rows.count("-") >= 3
    # Its reason is on stderr.
    assert "bytes are too few" not in shown


WAYS = {
    "mean": {"mean": True, "weight_key": "samples"},
    "weights in order": {"mean": True, "weight": [0.5 + n for n in range(30)]},
    "median": {"reduce": "median"},
    "trimmed": {"reduce": "trimmed=3", "clip_each": 40.0},
    "clipped": {"max_norm": 1.0, "clip_each": 2.0, "per_gradient": True},
}


@pytest.mark.parametrize("engine", ["threads", "parts"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["output", "folder", "into", "both"])
def test_the_bits_are_those_of_naming_only_the_gradients_that_pass(tmp_path, monkeypatch, engine, way, where):
    if engine == "parts":
        monkeypatch.setattr(Threads, "run", partialmethod(in_parts, Threads.run))
    paths, honest = a_round(tmp_path / "round", sharded=where in ("folder", "into"))
    # The client without a weight fails another rule where there are none.
    rules = [rule for rule in RULES if rule != "weighted" or "weight_key" in WAYS[way]]
    if rules != RULES:
        paths.pop(19)
    results = []
    for kind in ("all", "honest"):
        options = dict(WAYS[way])
        buffer = write(tmp_path / kind / "buffer", {"b": np.ones(30, np.float32), "w": np.ones((40, 30), np.float32)})
        if where in ("into", "both"):
            options["into"] = buffer
        if where != "into":
            options["output_dir" if where == "folder" else "output"] = tmp_path / kind / "result"
        named, weight = paths, [0.5 + n for n in range(len(paths))]
        if kind == "honest":
            named = [path for path in paths if int(path.name[-2:]) in honest]
            weight = [w for w, path in zip(weight, paths, strict=True) if path in named]
        if "weight" in options:
            options["weight"] = weight
        if kind == "all":
            options["screen"] = rules
        result = accumulate(named, **options)
        files = [path for path in sorted((tmp_path / kind).rglob("*")) if path.is_file()]
        taken = [row for row in result.per_gradient if row.taken]
        results.append(([path.read_bytes() for path in files], result.norm_after, result.weight_sum, taken))
    assert results[0] == results[1]


def test_a_dry_run_says_who_would_be_left_out_and_writes_nothing(tmp_path):
    path, grads = lay_out(tmp_path, f32(0), f32(1), f32(math.nan))
    before = snapshot(tmp_path)
    result = accumulate(grads, into=path, screen="finite", dry_run=True)
    assert (left_out(result), result.norm_after) == ([("finite", "g2")], 1.0)
    assert snapshot(tmp_path) == before
    result = accumulate(grads, into=path, screen="finite", update=False, per_gradient=True)
    assert [(row.taken, row.screened) for row in result.per_gradient] == [(False, None), (False, "finite")]
    assert snapshot(tmp_path) == before


def test_fewer_than_at_least_is_exit_code_1_and_nothing_is_written(tmp_path):
    path, grads = lay_out(tmp_path, f32(0), f32(1), f32(math.nan), {"b": f32(1)})
    before = snapshot(tmp_path)
    with pytest.raises(TooFewError) as caught:
        accumulate(grads, into=path, screen=["complete", "finite"], at_least=2)
    assert [(problem.code, problem.file) for problem in caught.value.problems] == [
        ("too-few", None), ("screened", str(grads[2])), ("screened", str(grads[1])),
    ]  # fmt: skip
    message = "screen leaves 1 of 3 gradients, but at least 2 must be left; nothing written"
    assert caught.value.problems[0].message == message
    arguments = ["accumulate", *grads, "--output", tmp_path / "sum", "--screen", "finite", "--screen", "complete"]
    answer = gradtool_json(*arguments, "--at-least", "2")
    assert (answer["status"], answer["exit_code"], answer["data"]) == ("found", 1, {})
    assert answer["errors"][0]["message"] == f"--{message}"
    assert answer["errors"][1]["message"].startswith("left out by --screen complete: lacks 1 tensor")
    assert snapshot(tmp_path) == before
    assert accumulate(grads, into=path, screen=["complete", "finite"], at_least=1).taken == 1
    # None left is never enough; nor are fewer than a trimmed mean needs.
    for options in ({"screen": "norm>=2x"}, {"screen": "finite", "reduce": "trimmed=1"}):
        three = [*grads[:2], write(tmp_path / "c", {"a": f32(1)})]
        problems = refused(TooFewError, tmp_path, path, three, **options)
        assert problems[0][0] == "too-few"


UNREADABLE = {
    "missing": None,
    "empty": b"",
    "truncated": build({"a": f32(1, 2)})[:-1],
    "a text": b"hello, world: this is no gradient",
    "a pickle": b"\x80\x02}q\x00.",
    "a hostile header": (1 << 62).to_bytes(8, "little") + b"{}",
    "an overlap": build({"a": f32(1)}).replace(b"[0, 4]", b"[0, 8]"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_is_left_out_where_it_was_an_error(tmp_path, name):
    path, grads = lay_out(tmp_path, f32(0), f32(1), f32(5))
    grads[0].unlink()
    if UNREADABLE[name] is not None:
        grads[0].write_bytes(UNREADABLE[name])
    assert len(refused(BadInputError, tmp_path, path, grads)) == 1
    assert len(refused(BadInputError, tmp_path, path, grads, screen="finite")) == 1
    result = accumulate(grads, into=path, screen="readable")
    assert (left_out(result), read(path)["a"].tolist()) == ([("readable", "g1")], [5])


def test_a_shard_that_cannot_be_read_is_named(tmp_path):
    write_index(tmp_path / "set", {"1.safetensors": {"a": f32(1)}, "2.safetensors": {"b": f32(1)}})
    (tmp_path / "set" / "2.safetensors").unlink()
    path, grads = lay_out(tmp_path, f32(0), f32(5))
    result = accumulate([tmp_path / "set", *grads], into=path, screen="readable")
    index = tmp_path / "set" / "model.safetensors.index.json"
    reason = f"{index}: the index names the shard 2.safetensors, which does not exist"
    assert [(row.file, row.reason) for row in result.per_screened] == [(str(tmp_path / "set"), reason)]


def test_what_is_not_about_a_client_stays_an_error(tmp_path):
    path, grads = lay_out(tmp_path, f32(0), f32(1), f32(5))
    assert refused(BadInputError, tmp_path, path, [*grads, grads[0]], screen="readable")[0][0] == "duplicate-file"
    assert refused(BadInputError, tmp_path, tmp_path / "nothing", grads, screen="readable")[0][0] == "missing-file"
    half_changed(grads[:1])
    assert refused(SystemRefusedError, tmp_path, path, grads, screen=["readable", "finite"])[0][0] == "unfinished"


@pytest.mark.parametrize("reopened", [False, True])
def test_a_gradient_that_changes_after_it_passed_is_not_added(tmp_path, monkeypatch, reopened):
    path, grads = lay_out(tmp_path, f32(0), f32(1), f32(5))
    screened = Screening.opened

    def opened(screening, created):
        sets, before = screened(screening, created), grads[0].stat()
        grads[0].write_bytes(build({"a": f32(1e9)}))
        until_told(grads[0], before)
        return None if reopened else sets

    monkeypatch.setattr(Screening, "opened", opened)
    with pytest.raises(SystemRefusedError) as caught:
        accumulate(grads, into=path, screen="norm<=5x")
    assert (caught.value.problems[0].code, read(path)["a"].tolist()) == ("changed", [0])


# The clients, and those that fail `complete` with a new set, each with its reason.
TENSORS = {
    "an extra tensor of one client is its own fault": (
        [{"a": f32(1)}, {"a": f32(1), "x": f32(1)}, {"a": f32(1)}],
        {1: "has 1 tensor beyond those of most gradients ('x')"},
    ),
    "a tensor that half have is not usual": (
        [{"a": f32(1)}, {"a": f32(1), "b": f32(1)}],
        {1: "has 1 tensor beyond those of most gradients ('b')"},
    ),
    "the first does not decide on shapes": (
        [{"a": f32(1, 2)}, {"a": f32(1)}, {"a": f32(1)}],
        {0: "tensor 'a': shape [2], but [1] in most gradients"},
    ),
    "nor does its type": (
        [{"a": np.ones(1, np.int32)}, {"a": f32(1)}],
        {0: "tensor 'a': unsupported dtype I32 (supported: F64, F32, F16, BF16, F8_E4M3, F8_E5M2)"},
    ),
    "several are counted": (
        [{"a": f32(1)}, *3 * [{n: f32(1) for n in "abcdef"}]],
        {0: "lacks 5 tensors of most gradients ('b', 'c', 'd' and 2 more)"},
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_complete_compares_with_what_most_clients_have(tmp_path, name):
    clients, reasons = TENSORS[name]
    _, grads = lay_out(tmp_path, f32(0), *clients)
    result = accumulate(grads, output=tmp_path / "sum", screen="complete")
    assert {row.file: row.reason for row in result.per_screened} == {str(grads[n]): why for n, why in reasons.items()}
    passed = [client for number, client in enumerate(clients) if number not in reasons]
    assert {n: v.tolist() for n, v in read(tmp_path / "sum").items()} == {n: [len(passed)] for n in passed[0]}


def test_complete_compares_with_the_buffer_where_there_is_one(tmp_path):
    path, grads = lay_out(
        tmp_path, {"a": f32(0, 0), "b": f32(0)}, *2 * [{"a": f32(1)}], {"a": f32(3), "b": f32(3)},
        {"a": f32(3, 3, 3), "b": f32(3)}, {n: f32(1) for n in "abc"},
    )  # fmt: skip
    result = accumulate(grads, into=path, screen="complete")
    assert [(row.file, row.reason) for row in result.per_screened] == [
        *((str(grad), "lacks 1 tensor of the buffer ('b')") for grad in grads[:2]),
        (str(grads[3]), "tensor 'a': shape [3], but [2] in the buffer"),
        (str(grads[4]), "has 1 tensor beyond those of the buffer ('c')"),
    ]
    assert {n: v.tolist() for n, v in read(path).items()} == {"a": [3, 3], "b": [3]}
    result = accumulate(grads, into=path, screen="complete", include="a")
    assert left_out(result) == [("complete", "g4")]


def test_a_new_set_has_the_types_of_the_gradients_that_passed(tmp_path):
    _, grads = lay_out(tmp_path, f32(0), np.array([1e6]), f32(1), f32(2))
    accumulate(grads, output=tmp_path / "sum", screen="norm<=5x")
    assert (read(tmp_path / "sum")["a"].dtype, read(tmp_path / "sum")["a"].tolist()) == (np.float32, [3])


def test_norms_are_compared_with_the_median_of_those_that_passed_before(tmp_path):
    path, grads = lay_out(tmp_path, f32(0), *map(f32, (1, 2, 4, 20, 21, 0.5, math.nan)), {"b": f32(9)})
    # The median of 1, 2, 4, 20, 21 and 0.5 is 3: NaN and the client without the tensor do not count.
    rules = ["norm<=7x", "norm>=0.2x", "complete"]
    result = accumulate(grads, into=path, screen=rules, dry_run=True, per_gradient=True)
    assert left_out(result) == [("complete", "g8"), ("norm<=7x", "g7"), ("norm>=0.2x", "g6")]
    assert result.per_screened[2].reason == "norm 0.5 is 0.167 times the median 3"
    result = accumulate(grads[:7], into=path, screen=["finite", "norm<=6.9x"])
    assert left_out(result) == [("finite", "g7"), ("norm<=6.9x", "g5")]
    assert read(path)["a"].tolist() == [27.5]


def test_the_cosine_is_that_to_the_result_of_all_that_passed_before_in_one_round(tmp_path):
    values = [f32(1, 0.1), f32(1, -0.1), f32(1, 2), f32(-1, 0), f32(-50, 1)]
    path, grads = lay_out(tmp_path, f32(0, 0), *values)
    # Without the last, the sum is (2, 2): the first two have cosines of 0.77 and 0.63.
    result = accumulate(grads, into=path, screen=["cosine>=0.7", "norm<=5x"], per_gradient=True)
    assert left_out(result) == [("norm<=5x", "g5"), ("cosine>=0.7", "g2"), ("cosine>=0.7", "g4")]
    assert [round(row.cosine, 3) for row in result.per_gradient if row.screened == "cosine>=0.7"] == [0.633, -0.707]
    assert read(path)["a"].tolist() == pytest.approx([2, 2.1])


def test_the_median_finds_who_drags_the_mean_along(tmp_path):
    rng = np.random.default_rng(3)
    truth = rng.standard_normal(5000)
    clients = [(truth + 1.4 * rng.standard_normal(5000)).astype(np.float32) for _ in range(10)]
    clients.append((50 * (truth + 1.4 * rng.standard_normal(5000))).astype(np.float32))
    _, grads = lay_out(tmp_path, f32(0), *clients)
    cosines = {}
    for way in ("mean", "median"):
        result = accumulate(grads, output=tmp_path / way, reduce=way, per_gradient=True)
        cosines[way] = [row.cosine for row in result.per_gradient]
    assert cosines["mean"][-1] > 0.98
    assert max(cosines["mean"][:-1]) < 0.5
    assert min(cosines["median"][:-1]) > 0.6
    result = accumulate(grads, output=tmp_path / "mean", mean=True, screen=["norm<=5x", "cosine>=0.5"])
    assert left_out(result) == [("norm<=5x", "g11")]


REFUSED = {
    "no rule": ({"screen": "small"}, "screen must be readable, weighted, complete, finite, norm<=Kx, .*, not 'small'"),
    "cut by a shell": ({"screen": "norm"}, "not 'norm'; quote the rule, because < and > redirect in a shell"),
    "a norm that is no multiple": ({"screen": "norm<=5"}, "not 'norm<=5'$"),
    "an upper bound of cosines": ({"screen": "cosine<=5"}, "not 'cosine<=5'$"),
    "no cosine": ({"screen": "cosine>=1.5"}, 'screen="cosine>=1.5" must be from -1 to 1, not 1.5'),
    "no weights": ({"screen": "weighted"}, 'screen="weighted" requires weight_key or weights$'),
    "twice skipped": ({"screen": "finite", "nonfinite": "skip"}, 'screen="finite" and nonfinite="skip" exclude'),
    "skipped in part": ({"screen": "complete", "missing": "skip"}, 'screen="complete" and missing="skip" exclude'),
    "nothing to count": ({"at_least": 1}, "at_least requires screen$"),
    "none": ({"screen": "finite", "at_least": 0}, "at_least must be at least 1, not 0"),
    "weights": ({"screen": "finite", "weight": [1]}, "weight gives 1 weight for 2 gradients"),
    "two kinds of weights": ({"weights": "x", "weight_key": "n"}, "weights and weight_key exclude each other"),
    "weights in two ways": ({"weights": "x", "weight": [1, 2]}, "weights and weight exclude each other"),
    "a weighted median": ({"weights": "x", "reduce": "median"}, "weights requires a sum or a mean"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_contradict_each_other_are_refused(tmp_path, name):
    options, message = REFUSED[name]
    path, grads = lay_out(tmp_path, f32(0), f32(1), f32(5))
    with pytest.raises(UsageError, match=message):
        accumulate(grads, into=path, **options)
