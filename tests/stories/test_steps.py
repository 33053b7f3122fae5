"""Every command, struck at every one of its steps: killed, refused, interrupted or without power; then recovered."""

import errno
import signal

import oracle
import pytest
import story
from tiers import EXHAUSTIVE, PARTS, numbers
from world import Event

# What strikes, and what belongs to it. A power cut keeps another part of what was not safe each time.
STRIKES = {
    "kill": [("kill", None)],
    "tear": [("tear", None)],
    "cut": [("cut", None)] * 3,
    "error": [("error", errno.EIO), ("error", errno.ENOSPC), ("late", errno.EIO)],
    "signal": [("signal", int(signal.SIGTERM)), ("signal", int(signal.SIGINT))],
    "short": [("short", None)],
}
COMMANDS = {str(command): command for command in story.WRITERS}
# Without syncs, only a power cut may lose anything.
UNSYNCED = {name: command for name, command in COMMANDS.items() if "max_norm=3.0" in name or "/w/states" in name}


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


def check_every_step(command, kind, part):
    last = story.changes_of(command)
    struck = []
    for step in numbers(part, last):
        if step > last:
            break
        for seed, (what, detail) in enumerate(STRIKES[kind]):
            following = [story.RECOVER] * (step % 2)
            struck.append(check(command, [Event(0, "change", step, what, detail)], 1000 * step + seed, following))
    assert all(struck)


@PARTS
@pytest.mark.parametrize("kind", STRIKES)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_keeps_every_promise_though_it_is_struck_at_any_step(command, kind, part):
    check_every_step(command, kind, part)


@PARTS
@pytest.mark.parametrize("kind", [kind for kind in STRIKES if kind != "cut"])
@pytest.mark.parametrize("command", UNSYNCED.values(), ids=UNSYNCED)
def test_a_command_without_syncs_does_so_too(command, kind, part):
    check_every_step(command._replace(options=(*command.options, ("fsync", False))), kind, part)


@PARTS
@pytest.mark.parametrize("command", UNSYNCED.values(), ids=UNSYNCED)
def test_a_disk_that_fails_from_some_call_on_loses_nothing(command, part):
    last = story.changes_of(command)
    for step in numbers(part, last):
        if step > last:
            break
        events = [Event(0, "change", later, "error", errno.EIO) for later in range(step, last + 20)]
        check(command, events, step)


@EXHAUSTIVE
@pytest.mark.parametrize("kind", ["kill", "tear", "cut"])
@pytest.mark.parametrize("first", ["kill", "cut"])
@pytest.mark.parametrize("command", UNSYNCED.values(), ids=UNSYNCED)
def test_what_recovers_a_crashed_run_can_crash_at_any_step_too(command, first, kind):
    following = (story.RECOVER, command)
    for step in range(1, story.changes_of(command) + 1):
        for inner in range(1, 60):
            events = [Event(0, "change", step, first), Event(1, "change", inner, kind)]
            if not check(command, events, 100 * step + inner, following):
                break
