"""Limits that learn, against the formulas of their papers spelled out here, and the state that they keep."""

import json
import math
import os
import shutil
import subprocess
import time

import numpy as np
import pytest
from crashes import KILLED
from hypothesis import given
from hypothesis import strategies as st
from runner import run
from support import COMMAND, encode, gradtool, gradtool_json, read, registered, snapshot, write, write_index

from gradtool import BadInputError, NonFiniteError, SystemRefusedError, UsageError, clip, recover
from gradtool.ops.clip.limits import Percentile, State, ZScore

Z = {"limit": "z=2.5", "warmup": 2}


def zclip_limits(norms, threshold, warmup, alpha=0.97, eps=0.0):
    """The limits of ZClip for a series of norms; with the `eps` of its published code, those of that code."""
    limits, warm, mean, var = [], [], None, None
    for norm in norms:
        if mean is None:
            warm.append(norm)
            limits.append(math.inf)
            if len(warm) == warmup:
                mean, var = np.mean(warm), np.var(warm)
            continue
        std = np.sqrt(var)
        z = (norm - mean) / (std + eps)
        limits.append(mean + threshold * std / (z / threshold) if z > threshold else math.inf)
        seen = min(norm, limits[-1])
        mean = alpha * mean + (1 - alpha) * seen
        var = alpha * var + (1 - alpha) * (seen - mean) ** 2
    return limits


def percentile_by_hand(norms, percent):
    """Linear interpolation between the two norms beside the place (n - 1) · P / 100."""
    ordered, place = sorted(norms), (len(norms) - 1) * percent / 100
    below = min(math.floor(place), len(norms) - 2) if len(norms) > 1 else 0
    above = min(below + 1, len(norms) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def limits_of(rule, norms):
    state, limits = State(rule.name, 2.0), []
    for norm in norms:
        limit, state = rule.learn(state, norm)
        limits.append(limit)
    return limits, state


NORMS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60)


@given(norms=NORMS, threshold=st.floats(0.5, 5), warmup=st.integers(2, 12))
def test_zclip_is_the_formula_of_its_paper(norms, threshold, warmup):
    limits, state = limits_of(ZScore(threshold, warmup), norms)
    wanted = zclip_limits(norms, threshold, warmup)
    # A norm may be so near to the threshold that rounding decides.
    near = [
        i for i, (one, other) in enumerate(zip(limits, wanted, strict=True)) if math.isinf(one) != math.isinf(other)
    ]
    end = near[0] if near else len(norms)
    assert limits[:end] == pytest.approx(wanted[:end], rel=1e-9)
    assert state.steps == len(norms)
    assert all(limit <= norm for limit, norm in zip(limits, norms, strict=True) if limit < math.inf)


def test_zclip_does_what_its_published_code_does():
    rng = np.random.default_rng(7)
    norms = rng.lognormal(0, 0.3, 400)
    norms[rng.random(400) < 0.05] *= 30
    limits, _ = limits_of(ZScore(2.5, 25), norms.tolist())
    # The code adds 1e-6 to the standard deviation, here about 0.3.
    assert limits == pytest.approx(zclip_limits(norms, 2.5, 25, eps=1e-6), rel=1e-5)
    assert sum(math.isfinite(one) for one in limits) > 10


def test_the_example_of_zclips_own_tests():
    # mean 1, std 0.5, T = 2: the norm 3 has z = 4, so that the limit is 1 + 2 · 0.5 / (4 / 2).
    assert ZScore(2.0, 25).learn(State("z", 2.0, 25, 1.0, 0.25), 3.0)[0] == 1.5


def test_a_norm_at_the_threshold_is_not_clipped_and_one_just_above_it_nearly_not():
    state = State("z", 2.0, 25, 1.0, 0.25)
    assert ZScore(2.0, 25).learn(state, 2.0)[0] == math.inf
    assert ZScore(2.0, 25).learn(state, math.nextafter(2.0, 3.0))[0] == pytest.approx(2.0)


def test_after_a_warm_up_of_equal_norms_the_limit_is_the_mean():
    limits, state = limits_of(ZScore(2.5, 3), [2.0, 2.0, 2.0, 2.0, 3.0])
    assert limits == [math.inf] * 4 + [2.0]
    assert (state.mean, state.variance) == (2.0, 0.0)
    assert ZScore(1e200, 3).learn(state, 3.0)[0] == 2.0


def test_a_threshold_whose_square_overflows_is_a_threshold():
    state = State("z", 2.0, 30, 0.0, 2.0**-1000)
    assert ZScore(2.0**600, 3).learn(state, 2.0**101)[0] == 2.0**99


@given(norms=NORMS, percent=st.floats(0, 100), window=st.integers(1, 20))
def test_autoclip_is_the_percentile_of_the_last_norms(norms, percent, window):
    limits, state = limits_of(Percentile(percent, window), norms)
    for i, limit in enumerate(limits):
        last = norms[max(0, i + 1 - window) : i + 1]
        assert limit == pytest.approx(percentile_by_hand(last, percent), rel=1e-12)
        assert limit == np.percentile(last, percent)
    assert (state.steps, list(state.norms)) == (len(norms), norms[-window:])


@pytest.mark.parametrize("rule", [ZScore(2.5, 2), Percentile(10.0, 5)], ids=["z", "percentile"])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_never_enters_the_state(rule, norm):
    _, state = limits_of(rule, [1.0, 2.0, 1.5])
    for known in (state, State(rule.name, 2.0)):
        assert rule.learn(known, norm)[1] == known


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "set" / "x.safetensors", {"a": encode([3, 4], "F32")})


def gradient(path, norm):
    write(path, {"a": encode([0.6 * norm, 0.8 * norm], "F64")})


@pytest.mark.parametrize("mode", ["replace", "inplace"])
def test_calls_one_after_another_clip_by_what_those_before_have_seen(tmp_path, path, mode):
    norms, state = [2.0, 3.0, 2.5, 40.0, 3.0, 2.0, 35.0], tmp_path / "clip.json"
    for step, (norm, limit) in enumerate(zip(norms, zclip_limits(norms, 2.5, 2), strict=True), 1):
        gradient(path, norm)
        result = clip(path, **Z, state=state, eps=0, write=mode, fsync=False)
        assert result.norm_before == pytest.approx(norm)
        assert result.limit == (None if math.isinf(limit) else pytest.approx(limit, rel=1e-9))
        assert result.norm_after == pytest.approx(min(norm, limit), rel=1e-9)
        assert (result.clipped, result.steps, result.state) == (limit < norm, step, str(state))
        assert bool(result.output.wrote) == (limit < norm)
    assert json.loads(state.read_text())["steps"] == len(norms)
    assert sorted(one.name for one in tmp_path.rglob(".gradtool*")) == []


def test_the_state_is_json_with_these_keys(tmp_path, path):
    state = tmp_path / "clip.json"
    clip(path, limit="percentile=50", state=state, norm_type=math.inf)
    clip(path, limit="percentile=50", state=state, norm_type=math.inf, eps=0)
    assert json.loads(state.read_text()) == {
        "gradtool_state": 1, "rule": "percentile", "norm_type": "Infinity", "steps": 2, "mean": None, "variance": None,
        "norms": [4.0, pytest.approx(4.0)],
    }  # fmt: skip


def test_a_window_keeps_the_last_norms(tmp_path, path):
    for norm in (8.0, 6.0, 1.0, 2.0):
        gradient(path, norm)
        result = clip(path, limit="percentile=0", window=2, state=tmp_path / "s", eps=0)
    assert (result.limit, result.steps) == (pytest.approx(1.0), 4)
    assert len(json.loads((tmp_path / "s").read_text())["norms"]) == 2


def test_with_a_maximum_norm_the_smaller_limit_counts_and_the_state_is_the_same(tmp_path, path):
    for state, max_norm, after in (("one", 1.0, 1.0), ("other", 4.0, 2.0)):
        for norm in (2.0, 2.0, 5.0):
            gradient(path, norm)
            result = clip(path, **Z, state=tmp_path / state, max_norm=max_norm, eps=0)
        assert (result.limit, result.norm_after) == (2.0, pytest.approx(after))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_the_norm_that_counts_is_the_unscaled_or_the_given_one(tmp_path, path):
    clip(path, limit="percentile=100", state=tmp_path / "s", unscale=4, dry_run=False)
    clip(path, limit="percentile=100", state=tmp_path / "s", total_norm=7)
    assert json.loads((tmp_path / "s").read_text())["norms"] == [1.25, 7.0]


def test_a_dry_run_leaves_the_state_and_makes_none(tmp_path, path):
    assert clip(path, **Z, state=tmp_path / "s", dry_run=True).steps == 1
    assert not (tmp_path / "s").exists()
    clip(path, **Z, state=tmp_path / "s")
    before = snapshot(tmp_path)
    assert clip(path, **Z, state=tmp_path / "s", dry_run=True).steps == 2
    assert snapshot(tmp_path) == before


def test_an_error_leaves_the_state(tmp_path, path):
    clip(path, **Z, state=tmp_path / "s")
    write(path, {"a": encode([1, math.nan], "F32")})
    before = snapshot(tmp_path)
    with pytest.raises(NonFiniteError):
        clip(path, **Z, state=tmp_path / "s")
    assert snapshot(tmp_path) == before
    assert clip(path, **Z, state=tmp_path / "s", nonfinite="propagate").steps == 1
    assert clip(path, **Z, state=tmp_path / "s", nonfinite="zero").steps == 2


@pytest.mark.parametrize("more", [{}, {"limit": "percentile=10", "state": "s"}])
def test_a_norm_above_the_one_to_skip_writes_nothing_at_all(tmp_path, path, more, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    for options in ({}, {"output": tmp_path / "new"}, {"write": "inplace"}):
        result = clip(path, **({"max_norm": 1} | more), skip_above=4.9, **options)
        assert [(one.code, one.message) for one in result.problems] == [
            ("above-limit", "the norm 5.0 is above the limit 4.9 of skip_above; nothing written")
        ]
        assert (result.norm_before, result.norm_after, result.clipped, result.output.wrote) == (5.0, 5.0, False, ())
    assert snapshot(tmp_path) == before
    assert clip(path, max_norm=1, skip_above=5.0).clipped


def test_skipping_exits_with_1_and_says_the_norm(path):
    done = gradtool("clip", path, "--max-norm", "1", "--skip-above", "2")
    assert done.returncode == 1
    assert done.stderr == "gradtool: error: the norm 5.0 is above the limit 2.0 of --skip-above; nothing written\n"
    assert done.stdout.startswith("norm_before\t5.0\nnorm_after\t5.0\ncoef\t1.0\nclipped\tno\n")
    answer = gradtool_json("clip", path, "--max-norm", "1", "--skip-above", "2")
    assert (answer["status"], answer["data"]["files_written"], answer["errors"][0]["code"]) == (
        "found",
        0,
        "above-limit",
    )


def test_a_nan_is_above_every_norm_to_skip(path):
    write(path, {"a": encode([1, math.nan], "F32")})
    result = clip(path, max_norm=1, skip_above=math.inf, nonfinite="propagate")
    assert "is NaN" in result.problems[0].message


GOOD = {"gradtool_state": 1, "rule": "z", "norm_type": 2.0, "steps": 3, "mean": 1.0, "variance": 0.5, "norms": []}
HOSTILE = {
    "empty": b"",
    "text": b"hello",
    "list": b"[1]",
    "torn": json.dumps(GOOD).encode()[:-9],
    "not UTF-8": b"\xff\xfe{",
    "deep": b"[" * 100_000,
    "missing key": json.dumps({key: value for key, value in GOOD.items() if key != "mean"}).encode(),
    "other key": json.dumps(GOOD | {"more": 1}).encode(),
    "newer": json.dumps(GOOD | {"gradtool_state": 2}).encode(),
    "version is true": json.dumps(GOOD | {"gradtool_state": True}).encode(),
    "unknown rule": json.dumps(GOOD | {"rule": "agc"}).encode(),
    "NaN": json.dumps(GOOD | {"mean": math.nan}).encode(),
    "negative": json.dumps(GOOD | {"variance": -1.0}).encode(),
    "huge mean": json.dumps(GOOD | {"mean": 1e200}).encode(),
    "huge integer": json.dumps(GOOD).encode().replace(b"1.0", b"1" * 4000),
    "as many digits as Python reads": json.dumps(GOOD).encode().replace(b'"steps": 3', b'"steps": ' + b"9" * 4300),
    "more digits than Python reads": json.dumps(GOOD).encode().replace(b"0.5", b"9" * 4301),
    "half of the moments": json.dumps(GOOD | {"mean": None}).encode(),
    "more norms than steps": json.dumps(GOOD | {"norms": [1.0] * 4}).encode(),
    "a norm is text": json.dumps(GOOD | {"norms": ["1"]}).encode(),
    "norms are a number": json.dumps(GOOD | {"norms": 1}).encode(),
    "too many norms": json.dumps(GOOD | {"norms": [1] * 100_200, "steps": 200_000}).encode(),
    "too many bytes": json.dumps(GOOD).encode() + b" " * 4_000_000,
    "of a percentile": json.dumps(GOOD | {"rule": "percentile"}).encode(),
    "of another order": json.dumps(GOOD | {"norm_type": 1.0}).encode(),
    "a gradient": write,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_state_that_is_none_is_one_line_and_changes_nothing(tmp_path, path, what):
    content = path.read_bytes() if HOSTILE[what] is write else HOSTILE[what]
    (tmp_path / "clip.json").write_bytes(content)
    before = snapshot(tmp_path)
    done = gradtool("clip", path, "--limit", "z=2", "--state", tmp_path / "clip.json")
    assert (done.returncode, done.stderr.count("gradtool: "), done.stdout) == (3, 1, ""), done.stderr
    assert done.stderr.startswith(f"gradtool: error: {tmp_path}/clip.json: ")
    assert "another --state" in done.stderr or "check that this is the right file" in done.stderr
    assert len(done.stderr) < 500 + len(str(tmp_path))
    assert snapshot(tmp_path) == before


def test_what_is_no_file_is_no_state(tmp_path, path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(BadInputError, match="is not a regular file"):
        clip(path, **Z, state=tmp_path / "fifo")
    with pytest.raises(UsageError, match="must be a file"):
        clip(path, **Z, state=tmp_path / "set")
    for dry_run in (False, True):
        with pytest.raises(BadInputError, match="no such folder"):
            clip(path, **Z, state=tmp_path / "missing" / "s", dry_run=dry_run)


@pytest.mark.parametrize("name", [".gradtool-0123456789ab.lock", ".gradtool-0123456789ab-1.tmp", ".gradtool-x"])
def test_a_name_that_recovery_would_remove_is_refused(tmp_path, path, name):
    before = snapshot(tmp_path)
    for options in (Z | {"state": tmp_path / name}, {"max_norm": 1, "output": tmp_path / name}):
        with pytest.raises(UsageError, match="removes; use another name"):
            clip(path, **options)
    # Nor does a link make another name of it.
    (tmp_path / "link").symlink_to(name)
    with pytest.raises(UsageError, match="removes; use another name"):
        clip(path, **Z, state=tmp_path / "link")
    (tmp_path / "link").unlink()
    assert snapshot(tmp_path) == before


WRONG = {
    "no state": ({"limit": "z=2"}, "limit requires state"),
    "no limit": ({"max_norm": 1, "state": "s"}, "state requires limit"),
    "no number": ({"limit": "z=", "state": "s"}, "limit must be z=T"),
    "no rule": ({"limit": "y=2", "state": "s"}, "limit must be z=T"),
    "zero": ({"limit": "z=0", "state": "s"}, "limit must be z=T"),
    "over 100": ({"limit": "percentile=101", "state": "s"}, "limit must be z=T"),
    "window of z": ({"limit": "z=2", "state": "s", "window": 5}, 'window requires limit="percentile=P"'),
    "warm-up of a percentile": ({"limit": "percentile=2", "state": "s", "warmup": 5}, 'warmup requires limit="z=T"'),
    "warm-up of one": ({"limit": "z=2", "state": "s", "warmup": 1}, "at least 2"),
    "window too large": ({"limit": "percentile=2", "state": "s", "window": 100_001}, "at most 100,000"),
    "groups": ({"limit": "z=2", "state": "s", "group": "a:1"}, "cannot be combined with group"),
    "per tensor": ({"limit": "z=2", "state": "s", "per_tensor": True}, "cannot be combined with per_tensor"),
    "by value": ({"limit": "z=2", "state": "s", "max_value": 1}, "cannot be combined with limit"),
    "a name of gradients": ({"limit": "z=2", "state": "s.safetensors"}, "has the name of a gradient set"),
    "a folder": ({"limit": "z=2", "state": "s/"}, "must be a file"),
    "the output": ({"limit": "z=2", "state": "s", "output": "s"}, "are written to"),
}


@pytest.mark.parametrize("what", WRONG)
def test_options_that_make_no_sense_together_are_refused(path, what, monkeypatch):
    monkeypatch.chdir(path.parent)
    options, message = WRONG[what]
    before = snapshot(path.parent)
    with pytest.raises(UsageError, match=message):
        clip(path, **options)
    assert snapshot(path.parent) == before


@pytest.mark.parametrize("new", [False, True])
def test_an_output_folder_and_the_state_beside_it_are_written_as_one(tmp_path, path, new, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    if not new:
        out.mkdir()
    source = snapshot(path.parent)
    result = clip(path.parent, limit="percentile=10", max_norm=1, state="clip.json", output_dir=out, eps=0)
    assert (result.output.wrote, snapshot(path.parent)) == ((str(out),), source)
    assert read(out / "x.safetensors")["a"].tolist() == pytest.approx([0.6, 0.8])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["clip.json", "out", "set"]


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_state_in_the_new_output_folder_is_made_with_it(tmp_path, path, options, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["clip", path, "--limit", "percentile=10", "--max-norm", "1", "--state", "out/clip.json"]
    for steps in (1, 2):
        done = gradtool_json(*command, "--output-dir", "out", *options)
        assert done["data"]["steps"] == (1 if options else steps)
        names = [] if options else ["clip.json", "x.safetensors"]
        assert sorted(one.name for one in tmp_path.glob("out/*")) == names
    done = gradtool(*command, "--output-dir", "out/deeper", *options)
    assert done.returncode == (3 if options else 0), done


@pytest.mark.parametrize("place", [".", "states", "out"])
def test_a_killed_run_into_a_new_folder_leaves_folder_and_state_or_neither(tmp_path, place):
    write_index(tmp_path / "set", {f"{i}.safetensors": {f"t{i}": encode([3, 4], "F32")} for i in range(2)})
    (tmp_path / "states").mkdir()
    state, out = tmp_path / place / "clip.json", tmp_path / "out"
    command = ["clip", tmp_path / "set", "--limit", "percentile=9", "--max-norm", "1", "--state", state]
    command += ["--output-dir", out]
    last, outcomes = run(*command, fault="kill@0").steps, []
    for step in range(1, last + 1):
        shutil.rmtree(out, ignore_errors=True)
        state.unlink(missing_ok=True)
        assert run(*command, fault=f"kill@{step}").code == KILLED
        for folder in (tmp_path, tmp_path / "states", out):
            assert not folder.exists() or run("recover", folder).code == 0
        files = sorted(one.name for one in out.iterdir() if one != state) if out.exists() else None
        outcomes.append((files, state.exists()))
        assert not list(tmp_path.rglob(".gradtool*")), step
    whole = ["0.safetensors", "1.safetensors", "model.safetensors.index.json"]
    assert sorted(set(map(str, outcomes))) == sorted([str((None, False)), str((whole, True))])


@pytest.mark.parametrize("mode", ["replace", "inplace"])
def test_the_state_is_locked_with_the_files_and_alone(tmp_path, path, mode):
    other = write(tmp_path / "other" / "y.safetensors", {"b": encode([1], "F32")})
    state = tmp_path / "clip.json"
    clip(path, **Z, state=state)
    held = registered([str(state)])
    try:
        for options in ({"write": mode}, {"output": tmp_path / "new"}):
            with pytest.raises(SystemRefusedError, match="in use by PID") as caught:
                clip(other, **Z, state=state, **options)
            assert caught.value.problems[0].file == str(state)
        assert clip(other, **Z, state=state, dry_run=True).steps == 2
    finally:
        held.close()
    assert clip(other, **Z, state=state, write=mode).steps == 2


def test_many_runs_at_once_that_share_a_state_lose_no_norm(tmp_path):
    runs = []
    for number in range(8):
        path = write(tmp_path / f"{number}" / "x.safetensors", {"a": encode([number + 1], "F32")})
        command = ["clip", path, "--limit", "percentile=100", "--state", tmp_path / "clip.json", "--lock-timeout", "90"]
        command += [[], ["--write", "inplace"], ["--output", tmp_path / f"{number}.out"]][number % 3]
        runs.append(subprocess.Popen([*COMMAND, *map(str, command)], stdout=subprocess.DEVNULL))
    assert [one.wait(timeout=180) for one in runs] == [0] * 8
    assert sorted(json.loads((tmp_path / "clip.json").read_text())["norms"]) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize("mode", ["replace", "inplace"])
def test_a_state_that_another_program_writes_meanwhile_stops_the_run(tmp_path, path, mode):
    state = tmp_path / "clip.json"
    clip(path, limit="percentile=10", state=state)
    before = path.read_bytes()

    def meddle(title, *_):
        if title == "clipping":
            state.write_text("mine")
            os.utime(state, ns=(time.time_ns(), 1))

    with pytest.raises(SystemRefusedError, match="changed by another program"):
        clip(path, limit="percentile=10", max_norm=1, state=state, write=mode, progress=meddle)
    assert (path.read_bytes(), state.read_text()) == (before, "mine")
    assert not list(tmp_path.rglob(".gradtool*"))


def test_a_copy_of_a_crashed_run_belongs_together(tmp_path, path):
    state = path.parent / "clip.json"
    clip(path, limit="percentile=10", state=state)
    old = (path.read_bytes(), state.read_bytes())
    command = ["clip", path, "--limit", "percentile=10", "--max-norm", "1", "--state", state, "--write", "inplace"]
    done = run(*command, "--dry-run")
    assert done.code == 0
    for step in range(1, 60):
        folder = tmp_path / f"copy{step}"
        run(*command, fault=f"kill@{step}")
        subprocess.run(["cp", "-r", path.parent, folder], check=True)
        recover(folder, force=True)
        recover(path.parent)
        now = (path.read_bytes(), state.read_bytes())
        assert ((folder / path.name).read_bytes(), (folder / state.name).read_bytes()) == now, step
        if now != old:
            break
    assert now[0] != old[0]
    assert now[1] != old[1]


def test_a_state_behind_a_link_stays_behind_it(tmp_path, path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "clip.json")
    for steps in (1, 2):
        assert clip(path, **Z, state=tmp_path / "link").steps == steps
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "real" / "clip.json").read_text())["steps"] == 2
