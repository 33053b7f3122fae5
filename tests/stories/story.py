"""Stories: what a seed makes of a few runs, their users, and what befalls them.

A `Story` is a value that prints as it is written, can be kept as JSON, and can be made smaller.
"""

import errno
import functools
import json
import random
import signal
from typing import NamedTuple

from acts import ACTS
from places import FOLDERS, USERS, first_files, world_with
from world import Event

import gradtool


class Command(NamedTuple):
    """A call of one of gradtool's functions; `reads` are the sets that it reads beside those that it writes."""

    function: str
    paths: tuple[str, ...]
    options: tuple[tuple[str, object], ...] = ()
    reads: tuple[str, ...] = ()

    def __str__(self):
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        return f"{self.function}({', '.join(map(repr, self.paths))}{options})"

    def __call__(self):
        function, options = getattr(gradtool, self.function), dict(self.options)
        if self.function not in ("recover", "check", "info"):
            options |= {"threads": 1, "backend": "cpu"}
        return function(*self.paths, **options) if self.function == "diff" else function(self.paths, **options)

    @property
    def writes(self):
        return self.function in ("clip", "accumulate", "zero", "layernorm_backward")

    @property
    def targets(self):
        """The sets that it writes."""
        elsewhere = [str(value) for name, value in self.options if name in ("into", "output", "output_dir")]
        return set(elsewhere or self.paths)

    @property
    def changes_in_place(self):
        """Whether it changes every file of its sets in place."""
        is_whole = not self.reads and not any(name == "include" for name, _ in self.options)
        return self.writes and ("write", "inplace") in self.options and is_whole

    def without_patience(self):
        """The same, but it does not wait for locks."""
        return self._replace(options=tuple(option for option in self.options if option != _PATIENCE))


class Run(NamedTuple):
    """A command as a process: its user, and the run after whose end it begins, if not at once."""

    command: Command
    user: str = "root"
    after: int | None = None
    handles_signals: bool = True
    host: str = "here"


class Story(NamedTuple):
    """The seed of all that is left to chance, the system, who shares its folders, the runs, and what befalls them."""

    seed: int
    system: str
    sharing: str
    restless: float
    runs: tuple[Run, ...]
    events: tuple[Event, ...]
    # What run 0 changes in place was written before, and is not safe yet.
    is_unsynced: bool = False
    # The power is cut once all runs have ended.
    ends_with_cut: bool = False

    def __str__(self):
        unsynced = ", unsynced" if self.is_unsynced else ""
        lines = [f"seed {self.seed}, {self.system}, folders: {self.sharing}, restless {self.restless}{unsynced}"]
        for number, run in enumerate(self.runs):
            when = "" if run.after is None else f", after {run.after}"
            signals = "" if run.handles_signals else ", without handlers"
            lines.append(f"  run {number} by {run.user} {run.host}{when}{signals}: {run.command}")
            lines += [
                f"    at {'call' if event.of == 'call' else 'change'} {event.number}: {event.kind} "
                f"{'' if event.what is None else event.what}"
                for event in self.events
                if event.task == number
            ]
        return "\n".join([*lines, *["  then the power is cut"] * self.ends_with_cut])


def to_json(story):
    """Write a story down, so that it can be kept as a test."""
    return json.dumps(story, indent=1)


def from_json(text):
    """Read a story that was written down."""
    seed, system, sharing, restless, runs, events, *more = json.loads(text)
    runs = [
        Run(Command(function, tuple(paths), tuple(map(tuple, options)), tuple(reads)), *rest)
        for (function, paths, options, reads), *rest in runs
    ]
    return Story(seed, system, sharing, restless, tuple(runs), tuple(Event(*event) for event in events), *more)


def _commands():
    """Every command of the stories."""
    for write in ("replace", "inplace"):
        how = (("write", write),)
        for norm in (9.0, 3.0, 1.0):
            yield Command("clip", ("/w/a",), (("max_norm", norm), *how))
        yield Command("clip", ("/w/a", "/w/b"), (("max_norm", 2.0), ("concat", True), *how))
        yield Command("clip", ("/w/one.safetensors",), (("max_norm", 2.0), *how))
        state = ("limit", "percentile=10"), ("max_norm", 4.0), ("state", "/w/states/s.json")
        yield Command("clip", ("/w/a",), (*state, *how))
        yield Command("clip", ("/w/one.safetensors",), (*state[:2], ("state", "/w/s.json"), *how))
        yield Command("accumulate", ("/w/b",), (("into", "/w/a"), *how), ("/w/b",))
        yield Command("accumulate", ("/w/b",), (("into", "/w/a"), ("overwrite", True), *how), ("/w/b",))
        into = (("into", "/w/a"), ("missing", "skip"), *how)
        yield Command("accumulate", ("/w/one.safetensors",), into, ("/w/one.safetensors",))
        weighted = (("into", "/w/a"), ("weight_key", "n"), *how)
        yield Command("accumulate", ("/w/b",), weighted, ("/w/b",))
        yield Command("zero", ("/w/b",), how)
        yield Command("zero", ("/w/a",), (("include", "t0"), *how))
        yield Command("layernorm_backward", ("/w/ln",), how)
    for clobber in ((), (("no_clobber", True),)):
        yield Command("clip", ("/w/a",), (("max_norm", 1.0), ("output_dir", "/w/out"), *clobber), ("/w/a",))
        yield Command("clip", ("/w/a",), (("max_norm", 1.0), ("output_dir", "/w/new/deep"), *clobber), ("/w/a",))
        one = ("/w/one.safetensors",)
        yield Command("clip", one, (("max_norm", 1.0), ("output", "/w/out/one.safetensors"), *clobber), one)
        both = ("/w/a", "/w/b")
        yield Command("accumulate", both, (("output_dir", "/w/new"), *clobber), both)
        yield Command("accumulate", both, (("output_dir", "/w/new"), ("shard_like", "/w/a"), *clobber), both)
        yield Command("accumulate", both, (("output_dir", "/w/new/deep"), ("max_shard_size", "1KB"), *clobber), both)


# For users who cannot list the folder.
_BY_FILE = Command("norm", ("/w/a/m-0.safetensors", "/w/a/m-1.safetensors"), (("concat", True),))


def _readers():
    yield Command("norm", ("/w/a",))
    yield Command("norm", ("/w/b",))
    yield Command("norm", ("/w/a", "/w/b"), (("concat", True),))
    yield Command("norm", ("/w/one.safetensors",))
    yield _BY_FILE
    yield Command("diff", ("/w/a", "/w/b"))
    yield Command("check", ("/w/a",))
    yield Command("info", ("/w/a",))


WRITERS, READERS = tuple(_commands()), tuple(_readers())
RECOVER = Command("recover", FOLDERS)
_RECOVERIES = (RECOVER, RECOVER, *(Command("recover", (path,)) for path in ("/w/a", "/w/b", "/w/ln")))
_PATIENCE = ("lock_timeout", 3.0)
# What befalls runs, by the plot of a story.
_EVENTS = {
    # Another program comes by after a crash, and before it is recovered.
    "visit": ("kill", "kill", "tear", "cut"),
    "simple": ("error", "error", "late", "kill", "tear", "cut", "signal", "short"),
    "crash": ("kill", "kill", "tear", "cut", "cut", "error"),
    "recover": ("kill", "tear", "cut"),
    "race": ("stall",),
    "meet": ("kill", "kill", "kill", "tear", "stall", "cut"),
    "error": ("error", "error", "late", "short", "full", "signal", "kill", "cut"),
    "foreign": ("write", "write", "replace", "chmod", "kill", "cut", "jump", "signal"),
    "hostile": ("swap", "swap", "forge", "plant", "squat", "peek", "kill", "stall"),
    "all": ("kill", "tear", "cut", "error", "full", "signal", "jump", "stall", "write", "replace", "chmod", "swap"),
}
_PLOTS = (
    *("simple", "simple", "simple", "visit", "visit", "crash", "crash", "recover", "recover", "race", "meet", "meet"),
    *("error", "error", "foreign", "foreign", "hostile", "all"),
)
_DETAILS = {
    "error": (
        *[errno.EIO] * 4,
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.EACCES, errno.EROFS, errno.ENOLCK, errno.ESTALE),
    ),
    "late": (errno.EIO, errno.ENOENT, errno.ESTALE),
    "signal": (int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGHUP)),
    "full": (0, 600, 4000, None),
    "jump": tuple(sign * seconds * 10**9 for sign in (-1, 1) for seconds in (1, 3600, 10**8)),
}
_ACT_NUMBERS = range(24)


def story_of(seed):
    """Make a story of a seed."""
    chance = random.Random(seed)
    kind = chance.choice(_PLOTS)
    system = chance.choice(("ext4", "ext4", "ext4", "tmpfs", "nfs", "no links", "macos", "no locks"))
    sharing = chance.choice(("own", "private", "open", "open", "sticky", "unlisted"))
    if kind in ("hostile", "all"):
        sharing = chance.choice(("open", "sticky"))
    elif system == "no links" and sharing == "unlisted":
        sharing = "own"  # Who cannot list a folder finds logs by links; file systems without have no such modes.
    restless = chance.choice((0.01, 0.05, 0.2, 0.5) if kind in ("race", "meet") else (0.0, 0.02, 0.1, 0.3))
    runs = _runs(chance, kind, system, sharing)
    events, more = _events(chance, kind, runs), (chance.random() < 0.2, chance.random() < 0.5)
    return Story(seed, system, sharing, restless, runs, events, *more)


def _runs(chance, kind, system, sharing):
    """Make up the runs: at least one of them writes."""
    hosts = ("here", "there") if system == "nfs" and chance.random() < 0.6 else ("here",)
    is_own = sharing in ("own", "private", "unlisted")
    users = [chance.choice(("alice", "alice", "root"))] if is_own else chance.sample(list(USERS), chance.randint(1, 2))
    # Where two runs at once are not kept apart, as the pages say; and where each is about what the one before has left.
    is_sequence = system == "no locks" or kind in ("recover", "simple", "visit")
    favourite = chance.choice(WRITERS)
    runs = []
    for number in range(chance.randint(1, 2) if kind == "simple" else chance.randint(2, 5)):
        share = chance.random()
        if kind in ("recover", "simple", "visit") and number == 1:
            command = chance.choice(_RECOVERIES)
        elif number == 0 or share < 0.55:
            command = favourite if chance.random() < 0.5 else chance.choice(WRITERS)
            if kind in ("race", "meet") and runs and chance.random() < 0.7:
                targets = runs[0].command.targets
                command = chance.choice([other for other in WRITERS if other.targets & targets])
            if chance.random() < 0.3:
                command = command._replace(options=(*command.options, _PATIENCE))
        else:
            command = chance.choice(READERS if share < (0.7 if kind == "meet" else 0.85) else _RECOVERIES)
        user = chance.choice(users)
        if sharing == "unlisted" and command in READERS and chance.random() < 0.7:
            command, user = _BY_FILE, "bob"
        is_beside = not is_sequence and chance.random() < (0.8 if kind in ("race", "meet") else 0.4)
        after = None if number == 0 or is_beside else number - 1
        runs.append(Run(command, user, after, chance.random() < 0.8, chance.choice(hosts)))
    return tuple(runs)


def _events(chance, kind, runs):
    """Make up what befalls the runs."""
    events = []
    for count in range(1 if kind in ("simple", "visit") else chance.choice((1, 1, 1, 2, 2, 3, 4))):
        task = 0 if kind in ("simple", "visit") else chance.choice((0, 0, 0, chance.randrange(len(runs))))
        if kind == "recover":
            task = min(count, len(runs) - 1)
        of = chance.choice(("call", "change", "change"))
        calls, changes = _size_of(runs[task].command)
        last = calls if of == "call" else changes
        # At the end, more depends on every step.
        number = chance.choice((1 + chance.randrange(last), last - chance.randrange(min(last, 25))))
        what = chance.choice(_EVENTS[kind])
        details = _ACT_NUMBERS if what in ACTS and what not in ("stall", "peek") else _DETAILS.get(what, (None,))
        event = Event(task, of, number, what, chance.choice(details))
        # What fails once may fail again.
        more = chance.randint(1, 3) if what == "error" and chance.random() < 0.3 else 0
        events += [event._replace(number=number + later) for later in range(more + 1)]
        if what == "error" and chance.random() < 0.3:
            # A crash while it clears up.
            events.append(Event(task, of, number + chance.randint(1, 12), "kill"))
    if kind == "visit":
        what = chance.choice(("write", "write", "replace"))
        events.append(Event(1, "call", chance.randint(1, 60), what, chance.choice(_ACT_NUMBERS)))
    return tuple(events)


def _size_of(command):
    """Count the calls of a command when nothing befalls it, and a few more for recovering what was left."""
    if command.function == "recover":
        return 100, 20
    task = _undisturbed(command.without_patience())
    return task.calls + 8, task.changes + 3


def count_of(command, of):
    """Count the calls of a command, or with "change" those that change the disk, when nothing befalls it."""
    task = _undisturbed(command)
    return task.calls if of == "call" else task.changes


@functools.cache
def _undisturbed(command):
    world = world_with(first_files(), sharing="private", owner=USERS["alice"])
    task = world.add(command, USERS["alice"])
    world.run(lambda _: True)
    return task


def candidates(story):
    """Yield stories that have a little less of something."""
    for number in range(len(story.events)):
        yield story._replace(events=story.events[:number] + story.events[number + 1 :])
    for number in range(len(story.runs)):
        if len(story.runs) > 1:
            yield _without(story, number)
    if story.restless:
        yield story._replace(restless=0.0)
    if story.is_unsynced:
        yield story._replace(is_unsynced=False)
    if story.ends_with_cut:
        yield story._replace(ends_with_cut=False)
    for number, run in enumerate(story.runs):
        simpler = run._replace(command=run.command.without_patience())
        if story.system != "no locks":
            simpler = simpler._replace(after=None)
        if simpler != run:
            yield story._replace(runs=(*story.runs[:number], simpler, *story.runs[number + 1 :]))


def _without(story, gone):
    def moved(number):
        return number if number is None or number < gone else number - 1

    runs = [
        run._replace(after=(None if not gone else gone - 1) if run.after == gone else moved(run.after))
        for number, run in enumerate(story.runs)
        if number != gone
    ]
    events = [event._replace(task=moved(event.task)) for event in story.events if event.task != gone]
    return story._replace(runs=tuple(runs), events=tuple(events))
