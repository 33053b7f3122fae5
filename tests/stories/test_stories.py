import contextlib
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import story

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the calls of Linux are simulated")

HERE = Path(__file__).parent
STORIES, CHUNK = 2000, 50
FOUND = sorted((HERE / "found").glob("*.json"))


def require_kept(tale):
    """Play a story; a failure is told as the smallest story that fails, ready to be kept."""
    try:
        oracle.play(tale)
    except oracle.BrokenError:
        small = oracle.smaller(tale)
        kept = f"Keep it as tests/stories/found/{tale.seed}.json:\n{story.to_json(small)}"
        pytest.fail(f"{small}\n{oracle.failure_of(small)}\n{kept}", pytrace=False)


@pytest.mark.parametrize("first", range(1, STORIES + 1, CHUNK))
def test_stories_keep_every_promise(first):
    for seed in range(first, first + CHUNK):
        require_kept(story.story_of(seed))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_was_found_once_stays_mended(path):
    require_kept(story.from_json(path.read_text()))


def test_one_story(request, capsys):
    tale, trace = story.story_of(request.config.getoption("--seed")), []
    with contextlib.suppress(oracle.BrokenError):
        oracle.play(tale, trace=trace)
    with capsys.disabled():
        print(f"\n{tale}\n")
        for process, call, what in trace:
            print(f"{process:3} {call:10} {what}")
    require_kept(tale)


def digest_of(*seeds):
    traces = []
    for seed in seeds:
        oracle.play(story.story_of(seed), trace=traces)
    return hashlib.sha256(repr(traces).encode()).hexdigest()


def test_the_same_seed_is_the_same_story_in_any_process():
    code = "import test_stories; print(test_stories.digest_of(*range(1, 13)), end='')"
    path = f"{HERE}:{HERE.parent}"
    for seed in "12":
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == digest_of(*range(1, 13))


def test_a_story_can_be_written_down():
    for seed in range(1, 200):
        tale = story.story_of(seed)
        assert story.from_json(story.to_json(tale)) == tale


def test_a_story_that_fails_is_made_smaller(monkeypatch):
    # As if every run of `zero` broke a promise.
    def failure_of(tale):
        return "broken" if any(run.command.function == "zero" for run in tale.runs) else None

    monkeypatch.setattr(oracle, "failure_of", failure_of)
    tale = next(tale for tale in map(story.story_of, range(1, 999)) if len(tale.runs) > 3 and failure_of(tale))
    small = oracle.smaller(tale)
    assert [run.command.function for run in small.runs] == ["zero"]
    assert small.events == ()
    assert small.restless == 0
