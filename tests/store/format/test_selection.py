"""Patterns that take forever for the names of a file, and new names by --map."""

import signal
import threading

import numpy as np
import pytest
from support import snapshot, write

import gradtool
from gradtool import BadInputError
from gradtool.store.format import selection
from gradtool.store.format.gradset import open_sets
from gradtool.store.format.selection import Renames

ENDLESS = r"^(\w+\.?)*weight$"
# It takes 2**60 steps and more.
NAME = "a" * 60 + "!"
ONES = np.ones(2, np.float32)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "LIMIT", 0.05)
    return write(tmp_path / "x.safetensors", {NAME: ONES})


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (lambda path: gradtool.norm(path, include=[ENDLESS]), "include"),
        (lambda path: gradtool.clip(path, max_norm=1, exclude=[ENDLESS]), "exclude"),
        (lambda path: gradtool.norm(path, group=[ENDLESS]), "group"),
        (lambda path: gradtool.clip(path, max_norm=1, group=[f"{ENDLESS}:1"]), "group"),
        (lambda path: gradtool.diff(path, path, map=[f"{ENDLESS}="]), "map"),
        (lambda path: gradtool.info(path, include=[ENDLESS]), "include"),
        (lambda path: gradtool.check(path, exclude=[ENDLESS]), "exclude"),
    ],
)
def test_a_pattern_that_takes_forever_is_an_error_that_names_it_and_the_tensor(path, call, option):
    before = snapshot(path.parent)
    with pytest.raises(BadInputError) as caught:
        call(path)
    (problem,) = caught.value.problems
    assert (problem.code, problem.tensor) == ("limit", NAME)
    spelled = ENDLESS.replace("\\", "\\\\")
    assert problem.message == f'{option}="{spelled}" takes more than 0.05 s of CPU time to match the name'
    assert snapshot(path.parent) == before


def test_a_replacement_is_limited(path):
    # The search finds what is in front; the substitution goes on behind it.
    renames = Renames.parse([rf"(^a)|{ENDLESS[1:]}=b"], slice(None))
    with pytest.raises(BadInputError, match="takes more than"):
        renames.applied(open_sets([path]))


@pytest.mark.parametrize("pattern", ["^a", ENDLESS])
def test_afterwards_the_timer_is_off_and_the_handler_is_the_one_that_was_there(path, pattern):
    calls = []
    former = signal.signal(signal.SIGVTALRM, lambda *_: calls.append(1))
    try:
        ours = signal.getsignal(signal.SIGVTALRM)
        if pattern == ENDLESS:
            with pytest.raises(BadInputError):
                gradtool.norm(path, include=[pattern])
        else:
            gradtool.norm(path, include=[pattern])
        assert signal.getsignal(signal.SIGVTALRM) is ours
        assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
        assert calls == []
    finally:
        signal.signal(signal.SIGVTALRM, former)


def test_a_timer_of_the_program_that_calls_is_left_alone(path):
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000)
    try:
        gradtool.norm(path, include=["a"])
        left, interval = signal.getitimer(signal.ITIMER_VIRTUAL)
        assert left > 900
        assert interval == 0
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def test_in_other_threads_no_handler_is_installed(path, monkeypatch):
    results = []

    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(signal, "setitimer", fail)
    monkeypatch.setattr(signal, "signal", fail)
    thread = threading.Thread(target=lambda: results.append(gradtool.norm(path, include=["a"]).call.tensors))
    thread.start()
    thread.join()
    assert results == [1]


def test_the_time_of_other_threads_does_not_count():
    with selection.time_limit(1000):
        # As the timer does when other threads have computed.
        signal.raise_signal(signal.SIGVTALRM)


def renamed(path, *rules):
    (one,) = Renames.parse(rules, slice(None)).applied(open_sets([path]))
    return [tensor.name for shard in one.shards for tensor in shard.tensors]


@pytest.mark.parametrize(
    ("rule", "code", "why"),
    [
        ("^a$=__metadata__", "input", "map makes the new name '__metadata__', which the format reserves"),
        ("^a$=" + "n" * 4097, "limit", "exceeds the limit of 4,096 characters (it has 4,097)"),
        ("^a$=b", "duplicate-name", "map gives the name 'b' to it and to 'b'"),
    ],
)
def test_a_name_that_no_tensor_can_have_is_refused(tmp_path, rule, code, why):
    path = write(tmp_path / "x", {"b": ONES, "a": ONES})
    with pytest.raises(BadInputError) as caught:
        renamed(path, rule)
    (problem,) = caught.value.problems
    assert (problem.code, problem.file) == (code, str(path))
    assert problem.tensor in ("a", "b")
    assert why in problem.message


def test_only_the_last_new_name_of_a_tensor_counts(tmp_path):
    path = write(tmp_path / "x", {"b": ONES, "a": ONES})
    assert sorted(renamed(path, "^a$=__metadata__", "^__metadata__$=" + "n" * 4096)) == ["b", "n" * 4096]
