"""Simulated processes that share a disk: switched at every call, killed, interrupted, and left without power.

All that happens follows from one source of chance, so the same story is the same calls in the same order.
"""

import contextlib
import errno
import functools
import os
import random
import signal
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from disk import ROOT, SECTOR
from greenlet import getcurrent, greenlet
from kernel import Kernel, Process

from gradtool.engines import worker
from gradtool.store import signals
from gradtool.store.transaction import locks, log, open, recovery, transaction  # noqa: A004 - a module

# Calls that change the disk.
CHANGES = {
    "create", "write", "truncate", "reserve", "sync", "rename", "unlink", "link", "symlink", "mkdir", "rmdir", "chmod",
    "chown", "setxattr", "removexattr",
}  # fmt: skip
_CALL_SECONDS = 20e-6
_MAX_CALLS = 40_000
# On the disk, where it is not full.
_ROOM = 1 << 30
# The variables of modules that each process has of its own.
_OWN = [(signals, name) for name in ("_handlers", "pending", "_is_committed")]
_OWN += [(module, "HOST") for module in (log, locks, recovery, transaction)]


class Killed(BaseException):
    """The process is dead: no call of it does anything any more."""


class Interrupted(KeyboardInterrupt):
    """What the handlers of the command raise."""


class EndlessError(AssertionError):
    """A story that does not end."""


class Event(NamedTuple):
    """What strikes when a task makes its `number`th call or, with `of` "change", the nth that changes the disk.

    `kind`: "kill", "tear" (a part of a write is done), "cut" (the power), "signal", "error", "refuse", "late" (an error
    of a call that was done), "short" (a write), "full" (the disk), "jump" (the clock), or the name of an act of another
    program; `what` belongs to it.
    """

    task: int
    of: str
    number: int
    kind: str
    what: object = None


class Task(Process):
    """A simulated process that runs gradtool."""

    def __init__(self, number, do, user, pid, host, handles_signals):
        super().__init__(user, pid, host)
        self.number, self.do = number, do
        self.greenlet = None
        self.is_dead = False
        self.calls = self.changes = 0
        self.began = self.ended = None
        self.wakes = 0.0
        self.result = self.error = None
        self.handlers = {signal.SIGINT: signal.default_int_handler}
        if handles_signals:
            self.handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), _interrupt)
        self.own = ({}, [], False, *[host] * 4)
        self.random = random.Random(number)

    @property
    def is_alive(self):
        return self.greenlet is not None and not self.is_dead

    @property
    def is_done(self):
        return self.is_dead and self.error is None


def _interrupt(number, _):
    # As the command does: what is done is done.
    if not signals.is_committed():
        raise Interrupted(number)


class World(Kernel):
    """The processes of a story; `restless` is how often another one goes on at a call."""

    def __init__(self, seed=0, disk=None, restless=0.0):
        super().__init__(disk)
        self.random = random.Random(seed)
        self.restless = restless
        # What other programs do, by the kind of an event.
        self.acts = {}
        self.calls = 0
        self.boot = "boot 0"
        self.boots = 0
        # Processes that happen to have the ID of one that has ended.
        self.strangers = set()
        self.tasks = []
        self.events = {}
        self.trace = None
        # What a host remembers of a name for so many seconds, though another host may have changed it since.
        self.memory_seconds = 0.0
        self._remembered = {}
        # What came of events, for the oracle.
        self.struck = []
        self._hub = None
        self._slept = 0.0
        self.is_quiet = False
        # The error of a call that is done all the same.
        self._late = None

    # A story.

    def add(self, do, user=ROOT, pid=None, host="here", *, handles_signals=True):
        """Add a process that calls a function; it does not begin yet."""
        number = len(self.tasks)
        task = Task(number, do, user, 100 + number if pid is None else pid, host, handles_signals)
        self.tasks.append(task)
        return task

    def plan(self, events):
        """Have events strike."""
        for event in events:
            self.events.setdefault((event.task, event.of, event.number), []).append(event)

    def run(self, starts):
        """Run all tasks to their ends; `starts(task)` says whether it may begin."""
        self._hub = getcurrent()
        waiting = [task for task in self.tasks if task.ended is None]
        with _patched(self):
            while True:
                for task in [task for task in waiting if starts(task)]:
                    waiting.remove(task)
                    self._begin(task)
                alive = [task for task in self.tasks if task.is_alive]
                if not alive:
                    if not waiting:
                        return
                    raise EndlessError("nothing can begin")
                ready = [task for task in alive if task.wakes <= self.seconds]
                if not ready:
                    self._slept += min(task.wakes for task in alive) - self.seconds
                    continue
                self._switch_to(ready[0] if len(ready) == 1 else self.random.choice(ready))

    def _begin(self, task):
        task.began = self.calls
        self.strangers.discard(task.pid)
        task.greenlet = greenlet(functools.partial(self._body, task))

    def _switch_to(self, task):
        self.current = task
        for (module, name), value in zip(_OWN, task.own, strict=True):
            setattr(module, name, value)
        try:
            task.greenlet.switch()
        finally:
            task.own = tuple(getattr(module, name) for module, name in _OWN)
            self.current = None

    def _body(self, task):
        try:
            task.result = task.do()
        except BaseException as error:  # noqa: BLE001 - it is told to the oracle
            task.error = error
        finally:
            self._end(task)

    def _end(self, task):
        task.is_dead = True
        task.ended = self.calls
        self.close_all(task)
        if self.trace is not None:
            self.trace.append((task.number, "ends", repr(task.error) if task.error else "done"))

    def kill(self, task):
        """Kill a process now; what it had open is closed."""
        task.is_dead = True
        task.error = Killed()
        self.close_all(task)
        if self.random.random() < 0.3:
            self.strangers.add(task.pid)

    def cut(self):
        """Cut the power, and start the machine again."""
        for task in self.tasks:
            if task.is_alive:
                self.kill(task)
                task.ended = self.calls
        self.disk.cut(self.random)
        self.files.clear()
        self.strangers.clear()
        self.boots += 1
        # A virtual machine that is set back has the same one again.
        if self.random.random() < 0.9:
            self.boot = f"boot {self.boots}"

    def calm(self):
        """Let nothing strike any more, and nobody come between."""
        self.events.clear()
        self.strangers.clear()
        self.restless, self.memory_seconds, self.disk.size = 0.0, 0.0, _ROOM

    @contextlib.contextmanager
    def as_process(self, process):
        """Make calls as another process, which nothing strikes and no other process comes between."""
        before, self.current, self.is_quiet = (self.current, self.is_quiet), process, True
        try:
            yield
        finally:
            self.close_all(process)
            self.current, self.is_quiet = before

    @contextlib.contextmanager
    def room(self):
        """Let there be room on the disk for a while."""
        before, self.disk.size = self.disk.size, 1 << 40
        try:
            yield
        finally:
            self.disk.size = before

    @property
    def seconds(self):
        """The time that processes measure."""
        return self.calls * _CALL_SECONDS + self._slept

    def sleep(self, seconds):
        """Let other processes go on."""
        task = self.current
        task.wakes = self.seconds + seconds
        if not self.is_quiet:
            self._pass_on(task)

    # Every call comes through here.

    def enter(self, call, at=None, *detail):
        task = self.current
        if self.is_quiet:
            return None
        if task.is_dead:
            raise Killed
        self.calls += 1
        task.calls += 1
        if self.restless and self.random.random() < self.restless:
            self._pass_on(task)
        if self.trace is not None:
            self.trace.append((task.number, call, self._describe(at, detail)))
        if self.calls > _MAX_CALLS:
            raise EndlessError(f"more than {_MAX_CALLS} calls")
        events = self.events.get((task.number, "call", task.calls), ())
        if call in CHANGES:
            task.changes += 1
            events = [*events, *self.events.get((task.number, "change", task.changes), ())]
            if self.memory_seconds:
                # A host knows what it has done itself.
                self._remembered[task.host] = {}
        how = None
        for event in events:
            how = self._strike(event, call, at) or how
        return how

    def _pass_on(self, task):
        self._hub.switch()
        if task.is_dead:
            raise Killed

    def _strike(self, event, call, at):
        """Let an event strike at a call; return how much of a write is done, or what a sync that fails asks."""
        if self.trace is not None:
            self.trace.append((event.task, "event", str(event)))
        self.struck.append(event)
        if event.kind in self.acts:
            self.acts[event.kind](self, event)
            return None
        return getattr(self, f"_on_{event.kind}")(event, call, at)

    def _on_kill(self, _event, _call, _at):
        self.kill(self.current)
        raise Killed

    def _on_tear(self, event, call, at):
        if call != "write":
            self._on_kill(event, call, at)
        self._strike_next("kill")
        return self._torn

    def _on_cut(self, _event, _call, _at):
        self.cut()
        raise Killed

    def _on_signal(self, event, call, at):
        handler = self.current.handlers.get(event.what)
        if handler is None:
            self._on_kill(event, call, at)
        handler(event.what, None)

    def _on_jump(self, event, _call, _at):
        self.disk.now += event.what

    def _on_full(self, event, _call, _at):
        # Without a number, there is room again.
        self.disk.size = _ROOM if event.what is None else _ROOM - self.disk.free + event.what

    def _on_error(self, event, call, at):
        number = event.what
        if call == "sync" and number == errno.EIO:
            return self.random
        if call == "write" and number in (errno.ENOSPC, errno.EDQUOT):
            self._strike_next("refuse", number)
            return functools.partial(self._shortened, at)
        if call == "sync":
            return None
        raise OSError(number, os.strerror(number))

    def _on_refuse(self, event, _call, _at):
        raise OSError(event.what, os.strerror(event.what))

    def _on_late(self, event, call, _at):
        self._late = event.what if call in ("rename", "link", "unlink") else None

    def _on_short(self, _event, call, at):
        return functools.partial(self._shortened, at) if call == "write" else None

    def _strike_next(self, kind, what=None):
        """Have something strike at the next call of this task."""
        event = Event(self.current.number, "call", self.current.calls + 1, kind, what)
        self.events.setdefault(event[:3], []).append(event)

    def _shortened(self, fd, begin, count):
        """How much of a write is done: of what is overwritten, whole sectors, because the system copies pages."""
        end = begin + self.random.randrange(count + 1)
        is_overwritten = end < len(self.files[fd].inode.content)
        # None at all would be an error.
        return max(0, end - end % SECTOR - begin) or count if is_overwritten else max(1, end - begin)

    def _torn(self, begin, count):
        """How much of a write is done before a crash, in whole sectors."""
        end = begin + self.random.randrange(count + 1)
        return max(0, end - end % SECTOR - begin) or count

    def _describe(self, at, detail):
        names = [str(part) for part in detail]
        if at in self.files:
            names.insert(0, str(self.files[at].path) + ("" if not detail else " "))
        return "".join(names)

    def os_stat(self, path, *, dir_fd=None, follow_symlinks=True):
        status = super().os_stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        if not self.memory_seconds or self.is_quiet:
            return status
        known, name = self._remembered.setdefault(self.current.host, {}), (path, dir_fd and self.files[dir_fd].inode)
        since, before = known.get(name, (self.seconds, status))
        if self.seconds - since > self.memory_seconds:
            since, before = self.seconds, status
        known[name] = since, before
        return before

    def os_open(self, path, flags, mode=0o777, *, dir_fd=None):
        if self.memory_seconds:
            # To open a file is to ask the server for it.
            self._remembered[self.current.host] = {}
        return super().os_open(path, flags, mode, dir_fd=dir_fd)

    def os_replace(self, *args, **named):
        super().os_replace(*args, **named)
        self._fail_late()

    os_rename = os_replace

    def os_link(self, *args, **named):
        super().os_link(*args, **named)
        self._fail_late()

    def os_unlink(self, *args, **named):
        super().os_unlink(*args, **named)
        self._fail_late()

    def _fail_late(self):
        """Fail though the call was done, as where a server's answer was lost."""
        if self._late is not None:
            number, self._late = self._late, None
            raise OSError(number, os.strerror(number))

    def os_access(self, *args, **named):
        try:
            return super().os_access(*args, **named)
        except OSError:
            return False

    def os_close(self, fd):
        # What a dead process closes on its way out is closed already.
        if not self.current.is_dead:
            super().os_close(fd)

    # Calls that are about processes.

    def os_kill(self, pid, number):
        self.enter("signal 0", None, pid)
        if number or not any(
            task.pid == pid and task.is_alive and task.host == self.current.host for task in self.tasks
        ):
            if pid in self.strangers:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    def getsignal(self, number):
        return self.current.handlers.get(number, signal.SIG_DFL)

    def signal(self, number, handler):
        self.current.handlers[number] = handler

    def boot_id(self):
        return self.boot

    def os_urandom(self, count):
        return self.current.random.randbytes(count)


@contextlib.contextmanager
def _patched(world):
    """Let gradtool run on the simulated system: its calls, its clock, its signals, its boot."""
    clock = SimpleNamespace(monotonic=lambda: world.seconds, sleep=world.sleep)
    handlers = SimpleNamespace(getsignal=world.getsignal, signal=world.signal)
    own = [getattr(module, name) for module, name in _OWN]
    with contextlib.ExitStack() as stack:
        stack.enter_context(world.installed())
        stack.enter_context(mock.patch.object(open, "time", clock))
        stack.enter_context(mock.patch.object(signals, "signal", handlers))
        for module in (locks, transaction):
            stack.enter_context(mock.patch.object(module, "boot_id", world.boot_id))
        # Compiled kernels read files by themselves.
        stack.enter_context(mock.patch.object(worker, "reads_files", return_value=False))
        try:
            yield
        finally:
            for (module, name), value in zip(_OWN, own, strict=True):
                setattr(module, name, value)
