"""The oracle: lets a story happen, and says whether every promise was kept.

- All files of a run are old or new: some order of the runs, one after another, explains what all files hold, what
  every reader read, and what other programs wrote. Runs that said they were done are in it; runs that said that they
  changed nothing are not.
- Nothing is left behind, once it is recovered; and to recover again changes nothing.
- Nobody's private files are touched, copied or opened, and what is made of private files is private.
- No run ends with a bug, and none is refused that met nobody.
"""

import functools
import stat
import traceback
from typing import NamedTuple

from acts import ACTS
from disk import Op
from places import (
    FOLDERS,
    MALLORY,
    SECRET,
    SECRETS,
    USERS,
    Foreign,
    SeenError,
    first_files,
    left_in,
    state_of,
    world_with,
)
from story import Command, candidates
from world import EndlessError, Interrupted, Killed

from gradtool import GradtoolError

# What strikes without anything that a run does failing.
_QUIET = {"stall", "jump", "write", "replace", "chmod"}
_CRASHES = {"kill", "tear", "cut", "stall", "jump"}


class BrokenError(AssertionError):
    """A promise that was not kept."""


def play(story, *, trace=None):
    """Let a story happen, and return its world; raises `BrokenError` if a promise was not kept."""
    world = _world_of(story)
    world.trace = trace
    first = state_of(world)
    tasks = world.tasks[:]

    def may_begin(task):
        after = story.runs[task.number].after
        return after is None or tasks[after].is_dead

    try:
        world.run(may_begin)
    except EndlessError as error:
        raise BrokenError(f"the story does not end: {error}") from error
    for task in tasks:
        _check_end(story, task)
        _check_refusal(story, world, tasks, task)
    if story.ends_with_cut:
        world.cut()
    _check_users(world)
    if not world.is_hostile:
        _check_nothing_left(world, tasks)
    refusals = _recover(story, world)
    _check_users(world)
    if not world.is_hostile:
        _check_recovered(story, world, refusals)
        _check_modes(story, world, refusals)
        if not refusals and not _is_lost(story, world):
            _check_order(story, tasks, world, first)
    return world


def failure_of(story):
    """Return what promise a story breaks, as text; None if it keeps all."""
    try:
        play(story)
    except BrokenError as error:
        return str(error)
    return None


def smaller(story):
    """Make a story that breaks a promise smaller, as long as it breaks one."""
    while True:
        failing = (candidate for candidate in candidates(story) if failure_of(candidate) is not None)
        candidate = next(failing, None)
        if candidate is None:
            return story
        story = candidate


def _world_of(story):
    owner = USERS[story.runs[0].user]
    world = world_with(first_files(), story.seed, story.system, story.sharing, story.restless, owner)
    world.acts = ACTS
    for number, run in enumerate(story.runs):
        world.names[number] = run.user
        # Process IDs are used again.
        is_reused = run.after is not None and (story.seed + number) % 3 == 0
        pid = world.tasks[run.after].pid if is_reused else 100 + number
        world.add(run.command, USERS[run.user], pid, run.host, handles_signals=run.handles_signals)
    if len({run.host for run in story.runs}) > 1:
        world.memory_seconds = 3.0
    if story.is_unsynced and story.runs[0].command.changes_in_place:
        for path in story.runs[0].command.paths:
            for name, inode in world.disk.tree().items():
                if name.startswith(path) and inode.content is not None:
                    inode.pending.append(Op(0, "data", (0, inode.safe), inode.mtime))
                    inode.safe = bytes(len(inode.safe))
    world.plan(story.events)
    return world


# What each run says, and what is left.


def _check_end(story, task):
    error = task.error
    if isinstance(error, SeenError):
        raise BrokenError(str(error)) from error
    if error is not None and not isinstance(error, GradtoolError | Killed | Interrupted | KeyboardInterrupt):
        lines = "".join(traceback.format_exception(error)[-8:])
        raise BrokenError(f"{story.runs[task.number].command} ended with a bug:\n{lines}") from error


def _check_refusal(story, world, tasks, task):
    """Check that a run that met nobody, and no failure, was not refused: what had crashed before was recovered."""
    command, error = story.runs[task.number].command, task.error
    # What is only read is not recovered.
    if not isinstance(error, GradtoolError) or not command.writes or command.reads or story.system == "no locks":
        return
    if story.is_unsynced:
        return  # A power cut may have taken its inputs.
    others = [other for other in tasks if other is not task and other.began is not None]
    is_alone = not any(other.ended > task.began and other.began < task.ended for other in others)
    is_alone = is_alone and not world.strangers and len({(run.user, run.host) for run in story.runs}) == 1
    if is_alone and {event.kind for event in world.struck} <= _CRASHES and error.problems[0].code != "exists":
        raise BrokenError(f"{command} was refused, and met nobody: {error!r} {error.problems}")


def _check_users(world):
    """Check that nobody's private files were changed, copied to where others read them, or made readable."""
    tree = world.disk.tree()
    for path, user in SECRETS.items():
        inode = tree.pop(path, None)
        if inode is None or bytes(inode.content) != SECRET or inode.mode & 0o777 != 0o600 or inode.uid != user.uid:
            raise BrokenError(f"{path} was touched")
    for path, inode in tree.items():
        if path.startswith("/home/") and not inode.is_folder:
            raise BrokenError(f"{path} was made")
        if inode.content is not None and SECRET[-64:] in inode.content:
            raise BrokenError(f"{path} has what is in a secret")
        is_private = "/.gradtool-" in path and path.endswith((".redo", ".lock")) and inode.uid != MALLORY.uid
        if is_private and stat.S_ISREG(inode.mode) and inode.mode & 0o077:
            raise BrokenError(f"{path} has the mode {inode.mode & 0o777:o}")


def _check_nothing_left(world, tasks):
    """Check that a story in which nothing crashed and nothing failed leaves nothing behind."""
    if world.boots:
        return  # A power cut may bring back what was removed.
    if {event.kind for event in world.struck} <= _QUIET and not any(map(_needs_recovery, tasks)) and left_in(world):
        raise BrokenError(f"no run crashed, and there are {left_in(world)}")


def _needs_recovery(task):
    return isinstance(task.error, GradtoolError) and any(
        problem.code == "unfinished" for problem in task.error.problems
    )


def _recover(story, world, *, force=False):
    """Recover as each user who wrote anything, and as root, without faults; return what was refused in the end."""
    world.calm()
    users = [*dict.fromkeys(run.user for run in story.runs if run.user != "root" and run.command.writes), "root"]
    refusals = []
    # Twice, because one may have to wait for what another recovers.
    for name in [*users, *users]:
        folders = tuple(sorted({path.rpartition("/")[0] for path in left_in(world)}))
        if not folders:
            return []
        if name == users[0]:
            refusals = []
        task = world.add(Command("recover", folders, (("force", force),)), USERS[name])
        world.names[task.number] = name
        world.run(lambda _: True)
        if isinstance(task.error, GradtoolError):
            # Mallory may write to the files, so a log of hers is hers to recover.
            problems = [one for one in task.error.problems if f"user {MALLORY.uid}" not in one.message]
            refusals += [f"{name}: {problem}" for problem in problems]
        elif task.error is not None:
            raise BrokenError("".join(traceback.format_exception(task.error))) from task.error
    return refusals


def _check_recovered(story, world, refusals):
    """Check that everything can be recovered, if no other program wrote to it since; and that once is enough."""
    if refusals and not world.foreign:
        raise BrokenError(f"cannot be recovered: {refusals}")
    before = _everything(world)
    if left_in(world):
        _recover(story, world, force=bool(refusals))
        if not refusals and _everything(world) != before:
            raise BrokenError("to recover again changes something")
    # Without locks, nobody knows whether a process is about to write its log.
    if left_in(world) and story.system != "no locks":
        raise BrokenError(f"recovery has left {left_in(world)}")
    tree = world.disk.tree()
    empty = [path for path, inode in tree.items() if path.startswith("/w/") and inode.is_folder and not inode.entries]
    # What another process made stays; and a power cut may bring back what was removed.
    is_alone = not world.boots and not _share_a_new_folder(story)
    if is_alone and set(empty).difference(FOLDERS) and not refusals:
        raise BrokenError(f"there are empty folders: {empty}")


def _everything(world):
    return [
        (path, inode.number, inode.mode, inode.uid, inode.mtime, inode.content and bytes(inode.content))
        for path, inode in world.disk.tree().items()
    ]


def _check_modes(story, world, refusals):
    for path, inode in world.disk.tree().items():
        is_wide = path.startswith("/w/") and inode.content is not None and inode.mode & 0o077
        if is_wide and story.sharing == "private" and "/.gradtool-" not in path:
            raise BrokenError(f"{path} has the mode {inode.mode & 0o777:o}, though all that it was made of is private")
        if is_wide and path in world.private and not refusals:
            raise BrokenError(f"{path} was made private, and is not any more")


def _is_lost(story, world):
    """Check whether a power cut took what was there before, and no run says that it has changed it."""
    if world.boots and _share_a_new_folder(story):
        return True  # One of them has made it, and not synced it yet.
    is_new = world.tasks[0].is_done or _told_of(world).get(0) == "finished"
    return story.is_unsynced and world.boots > 0 and not is_new


def _share_a_new_folder(story):
    return sum("/w/new" in str(run.command) for run in story.runs) > 1


# In which order it may have happened.


class Step(NamedTuple):
    """A run, or what another program did, between two calls: whether it must have been, and what a reader read."""

    began: float
    ended: float
    must: bool
    command: Command | None = None
    figure: object = None
    foreign: Foreign | None = None


def _check_order(story, tasks, world, first):
    """Find an order in which the runs, one after another, make the files what they are now, and read what they read."""
    told = _told_of(world)
    steps = [_step_of(story.runs[task.number].command, task, told.get(task.number)) for task in tasks]
    steps = [step for step in steps if step is not None]
    steps += [Step(done.call, done.call, done not in world.excused, foreign=done) for done in world.foreign]
    last = state_of(world)
    if not _is_possible(steps, (first,), last):
        before, after = dict(first), dict(last)
        lines = [
            f"  run {task.number}: {task.error!r}" if task.error else f"  run {task.number}: done" for task in tasks
        ]
        lines += [f"  {path}: new" for path in sorted(after) if path not in before]
        lines += [f"  {path}: changed" for path in sorted(before) if after.get(path) != before[path]]
        raise BrokenError("no order of the runs explains the files:\n" + "\n".join(lines))


def _told_of(world):
    """Return what became of crashed runs, by the numbers of their tasks, as those that recovered them have told."""
    rows = [row for task in world.tasks if task.is_done for row in getattr(task.result, "per_run", ())]
    told = {}
    # What was finished once stays so, even if a log of it comes back.
    for row in sorted(rows, key=lambda row: row.outcome == "finished"):
        told[world.runs[row.file.rpartition("-")[2].removesuffix(".run")]] = row.outcome
    return told


def _step_of(command, task, told):
    """Return what a run is in the order; None if it changed nothing, or read nothing that can be compared.

    `told` is what became of it, if somebody has recovered it and said so.
    """
    if not command.writes:
        figure = _figure(command, task.result) if task.is_done else None
        return None if figure is None else Step(task.began, task.ended, must=True, command=command, figure=figure)
    error = task.error
    if error is None:
        return Step(task.began, task.ended, must=True, command=command)
    said = " ".join([str(error), *getattr(error, "__notes__", ())])
    is_open = "all files were written" in said or "makes the files all old or all new" in said
    if is_open or isinstance(error, Killed) or _needs_recovery(task):
        began = -1 if task.began is None else task.began
        return None if told == "untouched" else Step(began, float("inf"), must=told == "finished", command=command)
    return None


def _is_possible(steps, history, last):
    if history[-1] == last and not any(step.must for step in steps):
        return True
    for step in steps:
        earlier = [other for other in steps if other.ended < step.began]
        if any(other.must for other in earlier):
            continue
        rest = [other for other in steps if other is not step and other not in earlier]
        if any(_is_possible(rest, (*history, state), last) for state in _after(step, history)):
            return True
    return False


def _after(step, history):
    """Yield the states that a step may lead to."""
    now = history[-1]
    if step.foreign is not None:
        yield _with_foreign(now, step.foreign)
        return
    # Inputs that are only read may be those of an earlier time.
    reads = step.command.reads
    for inputs in dict.fromkeys(_mixed(now, earlier, reads) for earlier in (history if reads else [now])):
        applied = _applied(step.command, inputs)
        if applied is None:
            continue
        figure, after = applied
        if step.figure is None:
            before = dict(inputs)
            changed = {path: content for path, content in after if before.get(path) != content}
            yield tuple(sorted((dict(now) | changed).items()))
        elif figure == step.figure:
            yield now


def _with_foreign(state, foreign):
    files = dict(state)
    if isinstance(foreign.what, bytes):
        files[foreign.path] = foreign.what
    elif foreign.path in files:
        at, byte = foreign.what
        content = files[foreign.path]
        files[foreign.path] = content[:at] + byte + content[at + 1 :]
    return tuple(sorted(files.items()))


def _mixed(now, earlier, paths):
    return tuple(
        sorted((dict(now) | {path: data for path, data in earlier if paths and path.startswith(paths)}).items())
    )


@functools.cache
def _applied(command, state):
    """What a command reports on those files when nothing befalls it, and the files then; None if it is refused."""
    world = world_with(dict(state))
    task = world.add(command)
    world.run(lambda _: True)
    if isinstance(task.error, GradtoolError):
        return None
    if task.error is not None:
        raise task.error
    return _figure(command, task.result), state_of(world)


def _figure(command, result):
    """What a reader reports, to be compared."""
    if command.function == "norm":
        return repr(result.norm), result.call.files
    return repr(result.rel_l2) if command.function == "diff" else None
