"""`--once ID`: a call that is repeated after a crash, or by two processes at once, does its work exactly once."""

import json
import random
import re
import shutil
import subprocess
import time

import numpy as np
import pytest
from crashes import KILLED
from runner import run
from support import COMMAND, gradtool, gradtool_json, read, snapshot, write, write_index
from terminal import on_terminal
from tiers import EXHAUSTIVE

import gradtool as api
from gradtool import BadInputError, NonFiniteError, UsageError
from gradtool.store.format.header import read_shard
from gradtool.store.source import Source
from gradtool.store.transaction import open as opening

MODES = pytest.mark.parametrize("mode", ["replace", "inplace"])
LIMIT = {"limit": "z=2.5", "warmup": 2}


def ids_in(path, command="accumulate"):
    text = read_shard(path).metadata.get(f"gradtool.once.{command}")
    return None if text is None else json.loads(text)


def tensors(value, size=300):
    return {f"t{number}": np.full(size + number, value * (number + 1), np.float32) for number in range(4)}


@pytest.fixture
def buffer(tmp_path):
    """Two shards of two tensors each, all 0."""
    zeros = tensors(0)
    parts = {"m-0.safetensors": ["t0", "t1"], "m-1.safetensors": ["t2", "t3"]}
    write_index(tmp_path / "set", {file: {name: zeros[name] for name in names} for file, names in parts.items()})
    return tmp_path / "set"


@pytest.fixture
def gradient(tmp_path):
    return write(tmp_path / "g.safetensors", tensors(1))


def content_of(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= read(path)
    return found


def require_sum(folder, total, size=300):
    """Every tensor of the buffer is exactly the sum of the gradients, of which each adds its value."""
    expected = tensors(total, size)
    found = content_of(folder)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert np.array_equal(array, expected[name]), (name, array[0], expected[name][0])


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_repeated_call_says_that_it_is_already_done_and_touches_nothing(buffer, gradient):
    done = gradtool_json("accumulate", gradient, "--into", buffer, "--once", "step-1")["data"]
    assert (done["already_done"], done["taken"], done["files_written"]) == (False, 1, 2)
    assert ids_in(buffer / "m-0.safetensors") == ids_in(buffer / "m-1.safetensors") == ["step-1"]
    before = snapshot(buffer)
    again = gradtool_json("accumulate", gradient, "--into", buffer, "--once", "step-1")["data"]
    assert snapshot(buffer) == before
    require_sum(buffer, 1)
    nothing = {"wrote": [], "taken": 0, "weight_sum": 0.0, "updated": False, "clipped": False, "files_written": 0}
    assert again.items() >= ({"already_done": True} | nothing).items()
    unknown = ("norm_before", "norm_after", "sum_norm", "coef", "max_abs", "nan", "inf", "zeros", "zeros_before")
    assert {again[key] for key in unknown} == {None}
    assert again["timings"]["read_bytes"] == 0
    plain = gradtool("accumulate", gradient, "--into", buffer, "--once", "step-1").stdout.splitlines()
    assert plain[0] == "already_done\tyes"
    assert not [line for line in plain if line.startswith(("wrote", "taken", "norm"))]
    result = api.accumulate(gradient, into=buffer, once="step-1")
    assert (result.already_done, result.norm_after) == (True, None)
    assert repr(result) == "AccumulateResult(already_done=True, files=2, tensors=4)"


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_a_terminal_says_that_nothing_was_written_and_why(buffer, gradient, columns):
    api.accumulate(gradient, into=buffer, once="1")
    command = ["accumulate", gradient, "--into", buffer, "--once", "1"]
    code, shown = on_terminal(*command, columns=columns, errors=False)
    lines = re.sub("\x1b\\[[0-9;]*m", "", shown).splitlines()
    assert (code, lines[0]) == (0, "wrote  nothing (already done)")
    assert max(map(len, lines)) <= columns
    assert not [line for line in lines if line.startswith(("norm", "taken", "values", "files written"))]


def test_another_id_adds_again(buffer, gradient):
    for name in ("a", "b", "a", "b"):
        api.accumulate(gradient, into=buffer, once=name)
    require_sum(buffer, 2)
    assert ids_in(buffer / "m-1.safetensors") == ["a", "b"]


def test_a_call_without_an_id_keeps_the_ids(buffer, gradient):
    api.accumulate(gradient, into=buffer, once="a")
    api.accumulate(gradient, into=buffer)
    api.zero(buffer)
    assert ids_in(buffer / "m-0.safetensors") == ["a"]
    assert api.accumulate(gradient, into=buffer, once="a").already_done
    require_sum(buffer, 0)


def test_an_id_counts_for_its_command_alone(buffer, gradient):
    for _ in range(2):
        api.accumulate(gradient, into=buffer, once="step-1")
        api.clip(buffer, max_norm=1, once="step-1")
    assert api.norm(buffer).norm == pytest.approx(1, rel=1e-5)
    results = [api.zero(buffer, once="step-1") for _ in range(2)]
    assert [(result.already_done, result.output.files_written) for result in results] == [(False, 2), (True, 0)]
    require_sum(buffer, 0)
    files = [buffer / "m-0.safetensors"] * 3
    assert [*map(ids_in, files, ("accumulate", "clip", "zero"))] == [["step-1"]] * 3


def test_a_gradient_that_is_gone_by_then_is_not_missed(buffer, gradient, tmp_path):
    (tmp_path / "list").write_text(f"{gradient}\n")
    screened = ["--files-from", tmp_path / "list", "--screen", "norm<=9x", "--into", buffer, "--once", "1"]
    assert gradtool_json("accumulate", *screened)["data"]["taken"] == 1
    gradient.unlink()
    (tmp_path / "list").unlink()
    assert api.accumulate(gradient, into=buffer, once="1", screen="norm<=9x").already_done
    assert api.accumulate(gradient, into=buffer, once="1").already_done
    with pytest.raises(BadInputError, match="no such file"):
        api.accumulate(gradient, into=buffer, once="2")


@MODES
def test_the_last_64_ids_are_kept_with_room_for_all_of_them_after_the_first_time(buffer, gradient, mode):
    api.accumulate(gradient, into=buffer, once="step-0")
    size = (buffer / "m-0.safetensors").stat().st_size
    for number in range(1, 66):
        assert not api.accumulate(gradient, into=buffer, once=f"step-{number}", write=mode, fsync=False).already_done
        if mode == "inplace":
            # The other commands find room, too.
            api.clip(buffer, max_norm=1e9, once=f"step-{number}", write=mode, fsync=False)
            api.zero(buffer, include="t1", once=f"step-{number}", write=mode, fsync=False)
    assert ids_in(buffer / "m-0.safetensors") == [f"step-{number}" for number in range(2, 66)]
    assert (buffer / "m-0.safetensors").stat().st_size == size
    # The oldest that is kept, and the newest that is not.
    assert api.accumulate(gradient, into=buffer, once="step-2").already_done
    assert not api.accumulate(gradient, into=buffer, once="step-1").already_done


def test_in_place_a_header_without_room_is_an_error_with_a_remedy_and_changes_nothing(buffer, gradient):
    before = snapshot(buffer)
    command = ["accumulate", gradient, "--into", buffer, "--once", "step-1", "--write"]
    done = gradtool(*command, "inplace")
    assert (done.returncode, snapshot(buffer)) == (3, before)
    assert "the header has no room for new metadata in place" in done.stderr
    assert "hint: use --write replace this time, which makes room" in done.stderr
    assert gradtool(*command, "replace").returncode == 0
    assert gradtool_json(*command, "inplace")["data"]["already_done"]
    command[5] = "step-1000"
    assert not gradtool_json(*command, "inplace")["data"]["already_done"]
    require_sum(buffer, 2)


@pytest.mark.parametrize(
    "name", ['say "hi", \\ \\n {1} [2]', "Schritt Nº 7 — 段階 🌍", "'; $(rm -rf /)", "  a  ", "x" * 200]
)
def test_an_id_may_be_any_printable_text(buffer, gradient, name):
    for expected in (False, True):
        result = gradtool_json("accumulate", gradient, "--into", buffer, f"--once={name}")["data"]
        assert result["already_done"] == expected
    assert ids_in(buffer / "m-0.safetensors") == [name]
    assert api.accumulate(gradient, into=buffer, once=name, write="inplace").already_done
    require_sum(buffer, 1)


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[1m", "tab\t", "x" * 201, "\ud800", "\u2028", 7])
def test_what_is_no_id_is_refused(buffer, gradient, name):
    with pytest.raises(UsageError, match="once must be"):
        api.accumulate(gradient, into=buffer, once=name)
    assert ids_in(buffer / "m-0.safetensors") is None


@pytest.mark.parametrize("options", [{"output": "new.safetensors"}, {"output_dir": "new"}])
def test_new_files_have_no_history(buffer, gradient, options, tmp_path):
    options = {name: tmp_path / value for name, value in options.items()}
    for call in (api.clip, api.zero):
        with pytest.raises(UsageError, match=r"once cannot be combined with output or output_dir.*no_clobber=True"):
            call([gradient], once="1", **options, **({"max_norm": 1} if call is api.clip else {}))
    for into in (None, buffer):
        with pytest.raises(UsageError, match="once cannot be combined"):
            api.accumulate(gradient, into=into, once="1", **options)


def test_what_writes_nothing_records_nothing(buffer, gradient, tmp_path):
    bad = write(tmp_path / "bad.safetensors", {**tensors(1), "t0": np.full(300, np.nan, np.float32)})
    before = snapshot(buffer)
    assert not api.accumulate(gradient, into=buffer, once="1", dry_run=True).already_done
    assert api.accumulate(gradient, into=buffer, once="1", update=False).updated is False
    for options in ({}, {"nonfinite": "skip"}):
        with pytest.raises(NonFiniteError):
            api.accumulate(bad, into=buffer, once="1", **options)
    with pytest.raises(api.TooFewError):
        api.accumulate(bad, into=buffer, once="1", screen="finite")
    assert gradtool("clip", gradient, "--max-norm", "1", "--skip-above", "0.5", "--once", "1").returncode == 1
    assert ids_in(gradient, "clip") is None
    assert snapshot(buffer) == before
    # So the same call does its work once it can.
    assert api.accumulate([bad, gradient], into=buffer, once="1", nonfinite="skip").taken == 1
    assert api.accumulate([bad, gradient], into=buffer, once="1", dry_run=True).already_done
    require_sum(buffer, 1)
    # A check is a check, each time.
    assert not api.accumulate(gradient, into=buffer, once="1", update=False).already_done


@MODES
def test_clipping_that_changes_no_value_is_recorded_and_not_done_later(buffer, gradient, mode):
    api.accumulate(gradient, into=buffer, once="step-1")
    values = content_of(buffer)
    done = api.clip(buffer, max_norm=1e6, once="step-1", write=mode)
    assert (done.clipped, done.coef, done.output.files_written) == (False, 1.0, 2)
    assert {name: array.tobytes() for name, array in content_of(buffer).items()} == {
        name: array.tobytes() for name, array in values.items()
    }
    # The next step has begun when the old call comes again, with a limit that would clip.
    api.accumulate(gradient, into=buffer, once="step-2")
    assert api.clip(buffer, max_norm=1, once="step-1", write=mode).already_done
    require_sum(buffer, 2)


@MODES
def test_a_file_in_which_no_tensor_is_selected_records_the_id_too(buffer, gradient, mode):
    api.accumulate(gradient, into=buffer, once="0")
    before = content_of(buffer)
    api.zero(buffer, include="t0", once="1", write=mode)
    assert ids_in(buffer / "m-1.safetensors", "zero") == ["1"]
    after = content_of(buffer)
    assert not after.pop("t0").any()
    assert all(np.array_equal(array, before[name]) for name, array in after.items())
    # Also where it is named by itself, or by its index.
    for path in (buffer / "m-1.safetensors", buffer / "model.safetensors.index.json", buffer):
        assert api.zero(path, include="t", once="1", write=mode).already_done


def test_files_of_which_only_some_have_the_id_are_an_error_that_names_the_others(buffer, gradient):
    api.zero(buffer / "m-0.safetensors", once="1")
    before = snapshot(buffer)
    done = gradtool("zero", buffer, gradient, "--once", "1", "--json")
    assert (done.returncode, snapshot(buffer)) == (3, before)
    errors = json.loads(done.stdout)["errors"]
    assert [error["file"] for error in errors] == [str(buffer / "m-1.safetensors"), str(gradient)]
    first = buffer / "m-0.safetensors"
    assert {(error["code"], error["message"]) for error in errors} == {
        ("once", f"has no record of --once 1, but {first} has")
    }
    assert "use another ID" in errors[0]["hint"]


@pytest.mark.parametrize("text", ["", "1", "{}", '["a", 1]', '["\\n"]', '[""]', "[" * 9999, json.dumps(["a"] * 65)])
def test_metadata_that_are_no_list_of_ids_are_an_error(tmp_path, text):
    path = write(tmp_path / "x.safetensors", tensors(1), {"gradtool.once.zero": text})
    with pytest.raises(BadInputError, match="in its metadata is not a list of IDs") as raised:
        api.zero(path, once="1")
    assert raised.value.problems[0].code == "once"
    require_sum(tmp_path, 1)
    api.zero(path)


def test_a_total_weight_and_an_id_are_stored_together(buffer, tmp_path):
    gradient = write(tmp_path / "g.safetensors", tensors(1), {"n": "3"})
    options = {"into": buffer, "weight_key": "n", "overwrite": True}
    assert api.accumulate(gradient, once="1", **options).weight_sum == 3
    options["overwrite"] = False
    for name in ("2", "1", "2"):
        api.accumulate(gradient, once=name, **options)
    require_sum(buffer, 6)
    for file in buffer.glob("*.safetensors"):
        assert read_shard(file).metadata["n"] == "6"
        assert ids_in(file) == ["1", "2"]


class TestState:
    """`clip --limit`: the state has the IDs too, so that no norm is learnt twice."""

    @pytest.fixture
    def clip(self, gradient, tmp_path):
        def clip(**options):
            return api.clip(gradient, state=tmp_path / "state.json", **LIMIT, **options)

        return clip

    @MODES
    def test_a_repeated_call_does_not_learn_the_norm_twice(self, clip, gradient, tmp_path, mode):
        clip(once="0")
        state = tmp_path / "state.json"
        for number in range(1, 70):
            assert not clip(once=f"{number}[,{{", write=mode, fsync=False).already_done
        before = snapshot(tmp_path)
        again = clip(once="69[,{", write=mode)
        assert (again.already_done, again.steps, again.limit, again.state) == (True, None, None, str(state))
        assert snapshot(tmp_path) == before
        document = json.loads(state.read_text())
        assert (document["steps"], document["once"]) == (70, [f"{number}[,{{" for number in range(6, 70)])
        assert ids_in(gradient, "clip") == document["once"]

    def test_calls_without_an_id_keep_those_of_the_state(self, clip, tmp_path):
        clip()
        assert "once" not in json.loads((tmp_path / "state.json").read_text())
        clip(once="1")
        clip()
        document = json.loads((tmp_path / "state.json").read_text())
        assert (document["steps"], document["once"]) == (3, ["1"])

    def test_a_state_that_lacks_an_id_of_the_files_is_an_error(self, clip, tmp_path):
        clip(once="1")
        (tmp_path / "state.json").unlink()
        with pytest.raises(BadInputError, match=r"state\.json: has no record of once=\"1\", but .*g\.safetensors has"):
            clip(once="1")
        assert not (tmp_path / "state.json").exists()

    def test_files_that_lack_an_id_of_the_state_are_an_error(self, clip, gradient):
        clip(once="1")
        write(gradient, tensors(1))
        with pytest.raises(BadInputError, match=r"g\.safetensors: has no record of once=\"1\", but .*state\.json has"):
            clip(once="1")

    @pytest.mark.parametrize("ids", ["a", ["a", 1], [["a"]], ["a"] * 65, ["\n"], {"a": 1}])
    def test_what_is_no_list_of_ids_is_an_error(self, clip, tmp_path, ids):
        clip()
        document = json.loads((tmp_path / "state.json").read_text())
        (tmp_path / "state.json").write_text(json.dumps(document | {"once": ids}))
        with pytest.raises(BadInputError, match="is not a state that this call can use"):
            clip()


def test_of_two_processes_at_once_one_does_the_work(buffer, gradient):
    command = [*COMMAND, "accumulate", gradient, "--into", buffer, "--once", "1", "--lock-timeout", "60", "--json"]
    calls = [subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE) for _ in range(4)]
    results = [json.loads(call.communicate(timeout=120)[0])["data"]["already_done"] for call in calls]
    assert sorted(results) == [False, True, True, True]
    require_sum(buffer, 1)


def test_what_another_call_recorded_just_before_the_lock_is_seen(buffer, gradient, monkeypatch):
    """Even where the clock of the file system is too coarse to tell that the files have changed."""
    acquire, others = opening.acquire, []

    api.accumulate(gradient, into=buffer, once="0")

    def acquire_later(*arguments, **options):
        if not others:
            others.append(None)
            others.append(api.accumulate(gradient, into=buffer, once="1", write="inplace"))
        return acquire(*arguments, **options)

    monkeypatch.setattr(Source, "is_unchanged", True)
    monkeypatch.setattr(opening, "acquire", acquire_later)
    result = api.accumulate(gradient, into=buffer, once="1", write="inplace")
    assert (result.already_done, others[1].already_done) == (True, False)
    require_sum(buffer, 2)


class Killer:
    """Runs commands that are killed at a random step or instant, and the same commands again until they end."""

    def __init__(self, at, seed):
        self._at, self._chance, self.kills = at, random.Random(seed), 0  # noqa: S311 - no secret

    def run(self, command, steps, seconds, cwd):
        """Run a command that takes so many steps and seconds when nothing befalls it; return its data in the end."""
        while True:
            strike = {"fault": f"kill@{self._chance.randint(1, steps + 2)}"}
            if self._at == "instant":
                strike = {"strike_after": self._chance.uniform(0, 1.2 * seconds)}
            answer = run(*command, "--json", cwd=cwd, **strike)
            if answer.code == 0:
                return json.loads(answer.out)["data"]
            assert answer.code == KILLED, answer
            self.kills += 1
            if self._chance.random() < 0.3:
                assert run("recover", cwd, cwd=cwd).code == 0
            if self._chance.random() < 0.5:
                answer = run(*command, "--json", cwd=cwd)
                assert answer.code == 0, answer
                return json.loads(answer.out)["data"]


def times(*command, cwd):
    """Run a command, and count its steps and its seconds."""
    began = time.perf_counter()
    answer = run(*command, fault="kill@0", cwd=cwd)
    assert answer.code == 0, answer
    return answer.steps, time.perf_counter() - began


KILLS = pytest.mark.parametrize(
    ("count", "at"), [(40, "step"), pytest.param(200, "instant", marks=EXHAUSTIVE, id="200-instant")]
)


@MODES
@KILLS
def test_the_sum_is_exact_though_calls_are_killed_and_repeated(buffer, tmp_path, mode, count, at):
    killer, outcomes = Killer(at, f"{mode} {at} sum"), set()
    gradients = [write(tmp_path / f"g{value}.safetensors", tensors(value)) for value in (1, 2, 5)]
    api.accumulate(gradients[0], into=buffer, once="first")
    options = ["--into", buffer, "--write", mode, "--no-fsync"]
    steps, seconds = times("accumulate", gradients[0], *options, "--once", "second", cwd=tmp_path)
    total, number = 2, 0
    while killer.kills < count:
        command = ["accumulate", gradients[number % 3], *options, "--once", f"step {number}"]
        outcomes.add(killer.run(command, steps, seconds, tmp_path)["already_done"])
        total += (1, 2, 5)[number % 3]
        require_sum(buffer, total)
        number += 1
    # Some kills come before the commit, and some after it.
    assert outcomes == {False, True}


def commands(gradient, mode, number):
    """The calls of a step: to add, to clip with a state, and sometimes to begin anew."""
    once = ["--once", f'step "{number}"', "--write", mode if number else "replace"]
    yield ["accumulate", gradient, "--into", "set", *once]
    yield ["clip", "set", "--limit", "z=2.5", "--warmup", "2", "--state", "state.json", *once]
    if number % 5 in (0, 4):
        yield ["zero", "set", *once]


@MODES
@KILLS
def test_all_files_are_those_of_calls_that_were_never_killed(buffer, gradient, tmp_path, mode, count, at):
    killer, number = Killer(at, f"{mode} {at}"), 0
    shutil.copytree(buffer, tmp_path / "killed" / "set")
    shutil.copytree(buffer, tmp_path / "alive" / "set")
    while killer.kills < count:
        for command in commands(gradient, mode, number):
            steps, seconds = times(*command, cwd=tmp_path / "alive")
            killer.run(command, steps, seconds, tmp_path / "killed")
        assert run("recover", tmp_path / "killed").code == 0
        assert run("recover", tmp_path / "killed" / "set").code == 0
        assert files_in(tmp_path / "killed") == files_in(tmp_path / "alive"), number
        number += 1
    assert json.loads((tmp_path / "killed" / "state.json").read_text())["steps"] == number
