"""Every command, struck at every one of its steps: killed, refused, interrupted or without power; then recovered."""

import errno
import signal
import sys

import oracle
import pytest
import story
from places import state_of
from tiers import EXHAUSTIVE, PARTS, numbers, up_to
from world import Event

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the calls of Linux are simulated")

# What strikes at a change of the disk. A power cut, then or at the end, keeps another part of what is unsafe each time.
STRIKES = {
    "kill": [("kill", None)] * 3,
    "tear": [("tear", None)],
    "cut": [("cut", None)] * 3,
    "error": [("error", errno.EIO), ("error", errno.ENOSPC), ("late", errno.EIO)],
    "signal": [("signal", int(signal.SIGTERM)), ("signal", int(signal.SIGINT))],
    "short": [("short", None)],
}
# What other programs do at any call: they write to each file of a set, and set its date back or not; they put an old
# copy or something else in its place; and they make it private.
FOREIGN = [(what, number) for what in ("write", "replace") for number in (0, 3, 7, 10)] + [("chmod", 0), ("chmod", 3)]
# Those that would add, clip or learn again if they were repeated.
WITH_IDS = {
    "accumulate": story.Command("accumulate", ("/w/b",), (("into", "/w/a"),), ("/w/b",)),
    "clip": story.Command(
        "clip", ("/w/a",), (("limit", "percentile=10"), ("max_norm", 4.0), ("state", "/w/states/s.json"))
    ),
    "zero": story.Command("zero", ("/w/a",), (("include", "t0"),)),
}
COMMANDS = {str(command): command for command in story.WRITERS}
FEW = {name: command for name, command in COMMANDS.items() if "max_norm=3.0" in name or "/w/states" in name}


def check(command, events, seed, following=()):
    """Play a run that is struck, and what follows it; whether it was struck."""
    runs = (story.Run(command, "alice"), *(story.Run(later, "alice", number) for number, later in enumerate(following)))
    ends_with_cut = ("fsync", False) not in command.options
    tale = story.Story(seed, "ext4", "private", 0.0, runs, tuple(events), ends_with_cut=ends_with_cut)
    try:
        world = oracle.play(tale)
    except oracle.BrokenError as error:
        pytest.fail(f"{tale}\n{error}\n{story.to_json(tale)}", pytrace=False)
    return len(world.struck) >= len(events)


def check_every_step(command, strikes, part, of="change"):
    struck = []
    for step in up_to(story.count_of(command, of), part):
        for seed, (what, detail) in enumerate(strikes):
            following = [story.RECOVER] * ((step + seed) % 2 or what in ("kill", "tear"))
            struck.append(check(command, [Event(0, of, step, what, detail)], 1000 * step + seed, following))
    assert all(struck)


@PARTS
@pytest.mark.parametrize("kind", STRIKES)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_keeps_every_promise_though_it_is_struck_at_any_step(command, kind, part):
    check_every_step(command, STRIKES[kind], part)


@PARTS
@pytest.mark.parametrize("kind", [kind for kind in STRIKES if kind != "cut"])
@pytest.mark.parametrize("command", FEW.values(), ids=FEW)
def test_a_command_without_syncs_keeps_every_promise_though_it_is_struck_at_any_step(command, kind, part):
    check_every_step(command._replace(options=(*command.options, ("fsync", False))), STRIKES[kind], part)


@PARTS
@pytest.mark.parametrize("command", FEW.values(), ids=FEW)
def test_what_other_programs_write_at_any_call_is_kept_or_told(command, part):
    check_every_step(command, FOREIGN, part, "call")


@PARTS
@pytest.mark.parametrize("command", FEW.values(), ids=FEW)
def test_a_disk_that_fails_from_some_call_on_loses_nothing(command, part):
    last = story.count_of(command, "change")
    for step in up_to(last, part):
        events = [Event(0, "change", later, "error", errno.EIO) for later in range(step, last + 20)]
        check(command, events, step)


@PARTS
@pytest.mark.parametrize("command", FEW.values(), ids=FEW)
def test_what_other_programs_write_after_a_crash_is_kept(command, part):
    for step in up_to(story.count_of(command, "change"), part):
        for seed, (what, number) in enumerate(FOREIGN):
            events = [Event(0, "change", step, "kill"), Event(1, "call", 1, what, number)]
            check(command, events, 1000 * step + seed, [story.RECOVER])


def with_id(command, name, write):
    return command._replace(options=(*command.options, ("once", name), ("write", write)))


def play_with_ids(command, write, *events, repeats):
    """Play a call that makes room for IDs, and one that is struck and repeated; its world, checked."""
    first, again = with_id(command, "6", "replace"), with_id(command, "7", write)
    runs = [
        story.Run(one, "alice", number - 1 if number else None)
        for number, one in enumerate([first, *[again] * repeats])
    ]
    tale = story.Story(1, "ext4", "private", 0.0, tuple(runs), events)
    try:
        return oracle.play(tale)
    except oracle.BrokenError as error:
        pytest.fail(f"{tale}\n{error}\n{story.to_json(tale)}", pytrace=False)


@PARTS
@pytest.mark.parametrize("kind", ["kill", "tear", "cut"])
@pytest.mark.parametrize("write", ["replace", "inplace"])
@pytest.mark.parametrize("command", WITH_IDS.values(), ids=WITH_IDS)
def test_a_call_with_an_id_that_is_struck_at_any_step_and_repeated_does_its_work_once(command, write, kind, part):
    expected, outcomes = state_of(play_with_ids(command, write, repeats=1)), set()
    for step in numbers(part):
        world = play_with_ids(command, write, Event(1, "change", step, kind), repeats=2)
        if not world.struck:
            break
        assert state_of(world) == expected, step
        outcomes.add(world.tasks[2].result.already_done)
    assert outcomes == {False, True}


@EXHAUSTIVE
@pytest.mark.parametrize("kind", ["kill", "tear", "cut"])
@pytest.mark.parametrize("first", ["kill", "cut"])
@pytest.mark.parametrize("command", FEW.values(), ids=FEW)
def test_a_recovery_can_crash_at_any_step(command, first, kind):
    following = (story.RECOVER, command)
    for step in range(1, story.count_of(command, "change") + 1):
        for inner in range(1, 60):
            events = [Event(0, "change", step, first), Event(1, "change", inner, kind)]
            if not check(command, events, 100 * step + inner, following):
                break
