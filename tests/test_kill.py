"""Real processes on a real disk that are killed, or refused by the system, at steps that change something there.

Every step of every command, and all that may come together, is tried in `tests/stories`, on a simulated disk.
"""

import collections
import contextlib
import itertools
import json
import random
import signal
import time

import pytest
from crashes import CASES, KILLED, Scene, shards
from runner import run
from tiers import EXHAUSTIVE, numbers

MODES = {"replace": ["--write", "replace"], "inplace": ["--write", "inplace"]}


@pytest.fixture
def scene(request):
    scene = Scene(*request.param)
    yield scene
    scene.close()


def scenes(*names):
    """Cases, each as its name, the number of files and how they are written."""
    values = {name: name.split("-", 2) for name in names}
    params = [pytest.param((case, int(count), *MODES[mode]), id=name) for name, (case, count, mode) in values.items()]
    return pytest.mark.parametrize("scene", params, indirect=True)


def is_possible(case, mode):
    return not (CASES[case].grows and mode.startswith("inplace"))


THREE = scenes("clip-3-replace", "clip-3-inplace")


@scenes(
    "clip-1-replace", "clip-1-inplace", "clip-8-replace", "clip-8-inplace", "state-8-replace", "layernorm-8-inplace"
)
def test_a_run_that_is_killed_at_any_step_leaves_all_old_or_all_new(scene):
    check_kills(scene)


def check_kills(scene):
    states = {}
    for step in scene.each_step():
        states[step] = check_kill(scene, step)
        if states[step] is None:
            assert scene.state() == "new"
            break
    # Those between, one of which commits.
    last_old = max(step for step in states if states[step] == "old")
    for step in range(last_old + 1, min(step for step in states if states[step] == "new")):
        check_kill(scene, step)
    assert set(states.values()) >= {"old", "new"}
    assert len(states) > 3


def check_kill(scene, step):
    """Kill a run at a step: what the files hold when that is recovered; None if there is no such step."""
    scene.put_back()
    kind = "kill" if step % 3 else "tear"
    done = scene.run(fault=f"{kind}@{step}")
    if done.steps < step:
        assert done.code == 0
        return None
    # A step that writes nothing cannot be torn.
    if done.code == 0 and kind == "tear":
        scene.put_back()
        done = scene.run(fault=f"kill@{step}")
    assert done.code == KILLED, done
    before, looked = scene.state(), None
    if step % 2:
        looked = scene.norm()
        assert looked.code in (0, 5), looked
        assert (looked.code == 5) == ("gradtool recover" in looked.err)
    else:
        # Recovering is killed too, somewhere, and then goes on.
        assert scene.recover(fault=f"tear@{1 + step // 2 % 6}").code in (0, KILLED)
    recovered = scene.recover()
    assert recovered.code == 0
    state = scene.state()
    assert state in ("old", "new"), (step, before, state)
    check_recovered(recovered, state)
    if looked is not None and looked.code == 0:
        assert before == state or isinstance(before, dict)
    return state


def check_recovered(recovered, state):
    """That recovering said what is true, so that a script knows whether to do it again."""
    facts = dict(line.split("\t")[:2] for line in recovered.out.splitlines())
    outcomes = [name for name in ("finished", "untouched") if facts[name] != "0"]
    # A run that had not begun, or had ended, has left no log; and another one may have recovered it before.
    assert outcomes in ([], ["finished"] if state == "new" else ["untouched"])


def test_a_sharded_set_is_replaced_as_a_whole_or_not_at_all_and_can_be_written_again(tmp_path):
    new = tmp_path / "new"
    commands = []
    for name, size in (("old", 200), ("new", 300)):
        shards(tmp_path / "in" / name, 3, size)
        commands.append(["accumulate", tmp_path / "in" / name, "--output-dir", new])
        commands[-1] += ["--shard-like", tmp_path / "in" / name]
    states = []
    for command in commands:
        last = run(*command, fault="kill@0").steps
        states.append({path.name: path.read_bytes() for path in new.iterdir()})
    found = set()
    for step in numbers("sample", last):
        assert run(*commands[0]).code == 0
        done = run(*commands[1], fault=f"kill@{step}")
        looked = run("norm", new)
        assert looked.code in (0, 5), looked
        # Of other files, which are not mixed with those that are there.
        other = run("accumulate", tmp_path / "in" / "new", "--output-dir", new, "--max-shard-size", "1MB")
        assert (other.code, "which the new set does not have" in other.err) == (3, True), other
        if step % 2:
            assert run("recover", new).code == 0
            there = {path.name: path.read_bytes() for path in new.iterdir()}
            found.add(states.index(there))
        assert run(*commands[1]).code == 0
        # A run that was killed before it had written its log has left a lock or an empty log; recover removes them.
        there = {path.name: path.read_bytes() for path in new.iterdir()}
        empty = {name: b"" for name in there if name.startswith(".gradtool") and name.endswith((".lock", ".run"))}
        assert len(empty) <= 2
        assert there == states[1] | empty, step
        assert (run("recover", new).code, {path.name: path.read_bytes() for path in new.iterdir()}) == (0, states[1])
        if done.steps < step:
            break
    assert found == {0, 1}


@THREE
def test_a_signal_at_any_step_ends_a_run_that_tells_what_became_of_the_files(scene):
    codes = set()
    for step in scene.each_step():
        number = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[step % 3]
        done = scene.run("--json", fault=f"{number.name}@{step}")
        check_story(scene, done, step)
        codes.add(done.code)
        scene.put_back()
        if done.steps < step:
            break
    # Which of the signals strike while that can still end the run depends on the number of steps.
    assert 0 in codes
    assert len(codes) > 2


def check_story(scene, done, where):
    """That exit code, result and files tell the same story."""
    assert done.out, (where, done)
    answer = json.loads(done.out)
    assert answer["exit_code"] == done.code, (where, done)
    if done.code == 0:
        warnings = answer["data"].get("warnings", ())
        lines = list(stderr_of(warnings))
        assert (scene.state(), done.err.splitlines(), answer["status"]) == ("new", lines, "ok"), (where, done)
        assert {warning["code"] for warning in warnings} <= {"underflow", "unmatched", "weight-dropped"}, (where, done)
        return
    assert done.code in (129, 130, 143), (where, done)
    assert (scene.state(), answer["errors"][0]["code"]) == ("old", "interrupted"), (where, done, scene.state())
    assert len(done.err.splitlines()) == 1, (where, done)


def messages_in(stderr):
    """The lines that are no hint below another one."""
    return [line for line in stderr.splitlines() if not line.startswith("  hint: ")]


def stderr_of(warnings):
    """The lines that the command prints for the warnings of its result."""
    for number, warning in enumerate(warnings):
        yield ": ".join(["gradtool: warning", *(warning[key] for key in ("file", "message") if key in warning)])
        hint, following = warning.get("hint"), warnings[number + 1 : number + 2]
        # What several in a row have in common follows the last of them.
        if hint is not None and not (following and following[0].get("hint") == hint):
            yield f"  hint: {hint}"


def at_any_instant(pytestconfig):
    """Every case in turn, as often as was asked for: a scene, its seconds, its name, and a source of instants."""
    count, seed = pytestconfig.getoption("--kills"), random.randrange(1 << 32)  # noqa: S311 - no secret
    print(f"seed {seed}")  # noqa: T201 - shown where the test fails
    rng = random.Random(seed)  # noqa: S311 - no secret
    every = [one for one in itertools.product(CASES, MODES) if is_possible(*one)]
    for number, (case, mode) in enumerate(every):
        # Large enough for two threads, and for more than a block each.
        with contextlib.closing(Scene(case, 8, *MODES[mode], "--threads", "2", size=250_000)) as scene:
            began = time.perf_counter()
            scene.run()
            seconds = time.perf_counter() - began
            for _ in range(number, count, len(every)):
                scene.put_back()
                yield scene, seconds, (case, mode), rng


@EXHAUSTIVE
def test_a_run_that_is_terminated_at_any_instant_tells_what_became_of_the_files(pytestconfig):
    seen = collections.Counter()
    for scene, seconds, where, rng in at_any_instant(pytestconfig):
        done = scene.run("--json", strike_after=rng.uniform(0, 1.2 * seconds), number=signal.SIGTERM)
        if done.code == -signal.SIGTERM:
            # Before it took care of signals; it had not begun.
            assert (scene.state(), done.out, done.err) == ("old", "", "")
        else:
            check_story(scene, done, where)
        seen[done.code] += 1
    print(dict(seen))  # noqa: T201 - for those who ask for many


@EXHAUSTIVE
def test_a_run_that_is_killed_at_any_instant_leaves_all_old_or_all_new(pytestconfig):
    seen = collections.Counter()
    for scene, seconds, where, rng in at_any_instant(pytestconfig):
        code = scene.run(strike_after=rng.uniform(0, 1.2 * seconds)).code
        assert code in (0, KILLED)
        looked = scene.norm()
        assert looked.code == 0 or "gradtool recover" in looked.err
        if rng.random() < 0.5:
            assert scene.recover(strike_after=rng.uniform(0, seconds)).code in (0, KILLED)
        assert scene.recover().code == 0
        state = scene.state()
        assert state in ("old", "new"), (where, state)
        seen[state] += 1
    print(dict(seen))  # noqa: T201 - for those who ask for many


@THREE
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_call_that_fails_leaves_all_old_and_nothing_behind_or_is_completed_by_recovery(scene, error):
    for step in scene.each_step():
        done = scene.run(fault=f"{error}@{step}")
        if "hint: run gradtool recover" in done.err:
            # Refused when everything was ready, which recovery completes.
            assert ("all files were written" in done.err) != ("some files are new and some are not" in done.err), done
            assert (done.code, scene.recover().code, scene.state()) == (5, 0, "new")
        elif "all files were written" in done.err:
            assert (done.code, scene.state()) == (5, "new")
        else:
            # Once all files are in their places, what is left to do may fail and be done again.
            assert (done.code, scene.state()) in ((5, "old"), (0, "new")), (step, done, scene.state())
        errors = [line for line in messages_in(done.err) if not line.startswith("gradtool: warning: ")]
        assert len(errors) == (done.code != 0), (step, done)
        scene.put_back()
        if done.steps < step:
            break


@THREE
def test_a_disk_that_fails_from_some_call_on_loses_nothing(scene):
    for step in scene.each_step():
        done = scene.run(fault=f"EIO@{step}+")
        if done.code == 0:
            break
        assert (done.code, len(messages_in(done.err))) == (5, 1), (step, done)
        data = {name: content for name, content in scene.files().items() if not name.startswith(".gradtool")}
        # An error about half-changed files names the remedy.
        assert data in (scene.old, scene.new) or "gradtool recover" in done.err, (step, done)
        assert scene.recover().code == 0
        assert scene.state() in ("old", "new"), (step, scene.state())
        scene.put_back()
    assert step > 5
