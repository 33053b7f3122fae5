"""Defects to plant in a copy of the package, so that the stories can show that they find such.

Each is one slip in the store. Runs that nothing disturbs are right with it, and some story ends wrong: `why` says how.
`PLANTED` are slips that could be made, `PAST` are defects that the store once had, with their mends taken out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).parents[2] / "gradtool"

CHANNEL = "store/io/channel.py"
COMMIT = "store/transaction/commit.py"
DESTINATION = "store/io/destination.py"
FS = "store/fs.py"
INPUTS = "store/transaction/inputs.py"
LINKS = "store/links.py"
LOCKS = "store/transaction/locks.py"
LOG = "store/transaction/log.py"
OPEN = "store/transaction/open.py"
RECOVERY = "store/transaction/recovery.py"
REDO_LOG = "store/io/redolog.py"
RUNS = "store/transaction/runs.py"
SIGNALS = "store/signals.py"
SOURCE = "store/source.py"
STAGING = "store/transaction/staging.py"
TARGETS = "store/transaction/targets.py"
TRANSACTION = "store/transaction/transaction.py"


class Edit(NamedTuple):
    """A text of a file of the package, which occurs once, and what takes its place."""

    file: str
    old: str
    new: str


class Mutation(NamedTuple):
    """A defect: its name, what goes wrong and in which story, and the edits that make it."""

    name: str
    why: str
    edits: tuple[Edit, ...]


@contextlib.contextmanager
def planted(mutation: Mutation) -> Iterator[dict[str, str]]:
    """Make a copy of the package with a defect; the environment in which Python imports that one."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(PACKAGE, Path(folder) / "gradtool", ignore=shutil.ignore_patterns("__pycache__"))
        plant(mutation, Path(folder) / "gradtool")
        yield os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}


def plant(mutation: Mutation, package: Path) -> None:
    """Make a defect in a copy of the package; raise `ValueError` if a text does not occur exactly once."""
    for file, old, new in mutation.edits:
        path = package / file
        text = path.read_text()
        if (count := text.count(old)) != 1:
            raise ValueError(f"{mutation.name}: {file} has this text {count} times: {old!r}")
        path.write_text(text.replace(old, new))


def _slip(name: str, why: str, file: str, old: str, new: str = "") -> Mutation:
    """Return a defect of a single edit, by default the removal of a text."""
    return Mutation(name, why, (Edit(file, old, new),))


# What must be on the disk before something else: found by power cuts.
_SYNCS = (
    _slip(
        "temporary-not-synced",
        "A new file is renamed before its content is on the disk: after a power cut, the target has zeros.",
        STAGING,
        """\
            fs.change_mode(fd, mode)
            if fsync:
                fs.sync(fd)
""",
        """\
            fs.change_mode(fd, mode)
""",
    ),
    _slip(
        "redo-log-not-synced",
        "A run in place is ready before its redo log is on the disk: a power cut between the copies and the last line"
        " leaves targets that are half changed and a redo log that is damaged.",
        COMMIT,
        """\
        with os_errors_about(self.log.file.path), fs.closing(self.log.file.open(os.O_RDONLY)) as fd:
            if self._transaction.fsync:
                fs.sync(fd)
""",
    ),
    _slip(
        "ready-not-synced",
        "The renames of several files, or the copies, may reach the disk and the line that says ready may not: after a"
        " power cut between them, recovery calls a mixture untouched.",
        COMMIT,
        "self._transaction.append(ready=[moves, changes, redo])",
        "self._transaction.append(fsync=False, ready=[moves, changes, redo])",
    ),
    _slip(
        "names-not-synced-before-ready",
        "The names of the log and of the temporaries are not on the disk when the renames begin: a power cut that keeps"
        " one rename and loses the log, or another temporary, leaves a mixture.",
        TRANSACTION,
        """\
            fs.sync(self._log)
            self.sync_folders()
""",
        """\
            fs.sync(self._log)
""",
    ),
    _slip(
        "ready-before-names-are-synced",
        "Two steps are swapped: a power cut right after the line that says ready may keep it and lose the name of a"
        " temporary, a redo log or a pointer, and recovery cannot complete the run.",
        COMMIT,
        """\
            if not is_atomic:
                self._transaction.publish()
            self._transaction.append(ready=[moves, changes, redo])
""",
        """\
            self._transaction.append(ready=[moves, changes, redo])
            if not is_atomic:
                self._transaction.publish()
""",
    ),
    _slip(
        "pointer-not-synced",
        "In a call with two folders, a power cut after ready leaves the name of a pointer without its content, and"
        " recovery finds no way into that folder.",
        TRANSACTION,
        """\
            fs.write_all(fd, [encode_step(folder.path, run=self._run_entry(folder))], 0)
            if self.fsync:
                fs.sync(fd)
""",
        """\
            fs.write_all(fd, [encode_step(folder.path, run=self._run_entry(folder))], 0)
""",
    ),
    _slip(
        "log-not-synced-before-pointers",
        "In a call with two folders, a power cut before ready keeps a pointer and loses the log that it leads to: the"
        " second folder is blocked for good.",
        TRANSACTION,
        """\
        if self.fsync and (len(self.targets.names) > 1 or self.targets.missing):
            fs.sync(fd)
            self.log_folder.sync()
""",
    ),
    _slip(
        "made-folders-not-synced",
        "Of two folders that are made one in the other for --output-dir, the inner one has no name on the disk: a power"
        " cut after the run was done loses all that it wrote.",
        TRANSACTION,
        """\
        for folder in self.targets.made if self.fsync else ():
            with os_errors_about(folder.path):
                folder.sync()
""",
    ),
    _slip(
        "renames-not-synced",
        "A run says that it is done, and a power cut afterwards brings back some of the old files.",
        COMMIT,
        "            self._transaction.sync_folders()\n",
    ),
    _slip(
        "ended-before-renames-are-synced",
        "Two steps are swapped: in a call with two folders, a power cut after the line that says finished keeps it and"
        " loses a rename, and recovery leaves the mixture.",
        COMMIT,
        """\
            self._transaction.sync_folders()
            if not is_atomic:
                # A redo log may be removed only when it is certain that no recovery needs it.
                self._transaction.end(always=self._in_place is not None)
""",
        """\
            if not is_atomic:
                # A redo log may be removed only when it is certain that no recovery needs it.
                self._transaction.end(always=self._in_place is not None)
            self._transaction.sync_folders()
""",
    ),
    _slip(
        "ended-not-synced",
        "A power cut during or after the clean-up keeps the removal of a redo log or a pointer, and loses the line that"
        " says finished: recovery asks for what is gone.",
        TRANSACTION,
        "self.append(ended=FINISHED)",
        "self.append(fsync=False, ended=FINISHED)",
    ),
    _slip(
        "copies-not-synced",
        "In place, the redo log is removed before its copies are on the disk: a power cut after the run was done leaves"
        " a mixture that nothing can complete.",
        COMMIT,
        """\
                if self._transaction.fsync:
                    fs.sync(fd)
                if os.fstat(fd).st_size != before.st_size:
""",
        """\
                if os.fstat(fd).st_size != before.st_size:
""",
    ),
    _slip(
        "input-not-synced-first",
        "Bytes that do not change are in no redo log: if the target was written and not synced before the run in place,"
        " a power cut between ready and the end loses them, and recovery takes the zeros for another program's.",
        COMMIT,
        "_require_writable(target, fsync=transaction.fsync)",
        "_require_writable(target, fsync=False)",
    ),
    _slip(
        "recovery-syncs-only-what-it-writes",
        "A run in place is killed when all is copied and not synced: recovery finds nothing to copy, removes the redo"
        " log, and a power cut then leaves a mixture.",
        REDO_LOG,
        """\
                        fs.write_all(fd, [content[start:stop]], entry.begin + start)
        # All are synced: an earlier recovery may have written what is right already, and not synced it.
        for file, _ in targets.values():
            with os_errors_about(file.path), fs.closing(file.open(os.O_RDONLY)) as fd:
                fs.sync(fd)
""",
        """\
                        fs.write_all(fd, [content[start:stop]], entry.begin + start)
                    fs.sync(fd)
""",
    ),
    _slip(
        "recovery-syncs-only-folders-it-renames-in",
        "A run is killed between its last rename and the sync: recovery has nothing to rename, says finished, and a"
        " power cut then brings back some of the old files.",
        RECOVERY,
        """\
        for folder in self._folders.values():
            folder.sync()

""",
        """\
        for number in {move.folder for move in moves}:
            self._folders[number].sync()

""",
    ),
    _slip(
        "recovery-does-not-sync-a-single-rename",
        "A run of one file is killed right after its rename: recovery says finished, and a power cut then brings back"
        " the old file.",
        RECOVERY,
        """\
        for changed in dict.fromkeys([*self._folders.values(), folder]):
            changed.sync()
""",
    ),
    _slip(
        "recovery-does-not-sync-the-log",
        "A run in place is killed between the write and the sync of the line that says finished: recovery believes that"
        " line and removes the redo log, and a power cut then loses the line.",
        RECOVERY,
        """\
        # The log must be on the disk before anything that follows from it.
        fs.sync(self._fd)
""",
    ),
    _slip(
        "removal-of-pointer-not-synced-by-recovery",
        "In a call with two folders, a run is killed between the removal of its pointer and the sync: recovery removes"
        " the log, and a power cut then brings back the pointer, which blocks its folder.",
        RECOVERY,
        """\
                folder.unlink(name)
            folder.sync()
        targets = {""",
        """\
                folder.unlink(name)
        targets = {""",
    ),
    _slip(
        "folder-that-cannot-be-synced-counts-as-unsupported",
        "A sync of a folder that fails with EIO is ignored: the run says done, and a power cut brings back old files.",
        FS,
        "        if error.errno not in UNSUPPORTED:\n",
        "        if error.errno not in (*UNSUPPORTED, errno.EIO):\n",
    ),
)

# The lines of the transaction log, and the order of the clean-up: found by kills and by calls that fail.
_STEPS = (
    _slip(
        "ended-not-logged-in-place",
        "A run in place that is killed during its clean-up has removed its redo log and still counts as unfinished.",
        COMMIT,
        "self._transaction.end(always=self._in_place is not None)",
        "self._transaction.end(always=False)",
    ),
    _slip(
        "ended-not-logged-for-two-folders",
        "A run with two folders that is killed during its clean-up, or a power cut after it, leaves a log that counts"
        " as unfinished and whose pointer is gone.",
        TRANSACTION,
        "if always or len(self.targets.names) > 1 or self._has_markers:",
        "if always or self._has_markers:",
    ),
    _slip(
        "ended-not-logged-by-recovery",
        "A recovery of a run in place, or with two folders, that is killed during its clean-up cannot be repeated.",
        RECOVERY,
        """\
            if len(log.folders) > 1 or log.redo is not None:
                self._append(ended=FINISHED)
""",
    ),
    _slip(
        "call-off-not-logged",
        "The first rename is refused, or its target was written to by another program, when all is ready: a kill or a"
        " power cut during the clean-up leaves a log that says ready and whose temporaries are gone.",
        COMMIT,
        """\
        try:
            self._transaction.append(ended=UNTOUCHED)
        except OSError as error:
            self._transaction.needs_recovery = True
            raise from_os_error(error, self._transaction.log_folder.path) from error
""",
    ),
    _slip(
        "a-line-whose-sync-failed-stays",
        "The sync of the line that says ready fails: the run removes its temporaries and says that nothing was changed,"
        " and a kill meanwhile leaves a log that says ready.",
        LOG,
        """\
        try:
            fs.resize(fd, begin)
            if fsync:
                fs.sync(fd)
        except OSError:
            raise InDoubtError(error.errno, error.strerror) from error
        raise
""",
        """\
        raise
""",
    ),
    _slip(
        "torn-line-not-cut",
        "What recovery appends behind a torn line cannot be read: a run in place dies while it writes that it is"
        " finished, and the recovery dies in its clean-up.",
        RECOVERY,
        """\
        # A torn line would hide what is appended, and earlier recoveries no longer matter.
        fs.resize(self._fd, log.size)
""",
    ),
    _slip(
        "checksum-of-a-line-not-compared",
        "A power cut tears a line over two sectors, of several targets: its last sector is on the disk and the one"
        " before is not, and the log cannot be read any more.",
        LOG,
        """if not line.endswith(b"\\n") or checksum != b"%08x" % zlib.crc32(text):""",
        """if not line.endswith(b"\\n"):""",
    ),
    _slip(
        "begun-not-noted",
        "The second rename is refused: the run calls itself off though the first file is new, and removes the others.",
        COMMIT,
        """\
                staged.take_place(sources, fsync=transaction.fsync)
                has_begun = True
""",
        """\
                staged.take_place(sources, fsync=transaction.fsync)
""",
    ),
    _slip(
        "copies-do-not-count-as-begun",
        "In place, a copy is refused after another one was done: the run calls itself off and removes the redo log.",
        COMMIT,
        "        has_begun = self._in_place is not None\n",
        "        has_begun = False\n",
    ),
    _slip(
        "in-place-with-a-state-counts-as-a-single-rename",
        "A run in place with a state is killed during its copies: neither readers nor recovery take it for unfinished,"
        " and the redo log is removed.",
        LOG,
        "return len(self.moves) == 1 and not self.changes",
        "return len(self.moves) == 1",
    ),
    _slip(
        "new-folder-not-in-the-log",
        "A run that makes the folder of --output-dir is killed: its log does not name the folder, so recovery cannot"
        " read it after ready, and before leaves the folder and a pointer without a log.",
        TRANSACTION,
        """\
            paths += [] if self.targets.made else [self.log_folder.path.joinpath(*missing)]
""",
    ),
    _slip(
        "log-removed-before-pointers",
        "In a call with two folders, a kill during the clean-up leaves a pointer to a log that is gone, which blocks"
        " its folder.",
        TRANSACTION,
        """\
    for folder in other_folders:
        folder.unlink(log)
        # In a power cut, no pointer may outlive the log.
        if fsync:
            folder.sync()
    for count in range(len(missing), 0, -1):
        _remove_folder(log_folder, missing[:count])
    log_folder.unlink(log)
    log_folder.unlink(f"{run}.lock")
""",
        """\
    log_folder.unlink(log)
    for folder in other_folders:
        folder.unlink(log)
        if fsync:
            folder.sync()
    for count in range(len(missing), 0, -1):
        _remove_folder(log_folder, missing[:count])
    log_folder.unlink(f"{run}.lock")
""",
    ),
    _slip(
        "lock-removed-before-log",
        "A run is killed between the two removals and its PID is used again: with no lock to tell, it counts as alive."
        " Without a kill, a recovery at that instant leaves a new lock.",
        TRANSACTION,
        """\
    log_folder.unlink(log)
    log_folder.unlink(f"{run}.lock")
""",
        """\
    log_folder.unlink(f"{run}.lock")
    log_folder.unlink(log)
""",
    ),
    _slip(
        "outer-folder-removed-first",
        "A run that makes two folders, one in the other, fails or is killed before ready: the outer one stays.",
        TRANSACTION,
        "for count in range(len(missing), 0, -1):",
        "for count in range(1, len(missing) + 1):",
    ),
    _slip(
        "short-write-counts-as-whole",
        "A write that takes only a part of its bytes is not made again: the rest of the file is zeros, and the run says"
        " done.",
        FS,
        "    while views:\n        fault = step()",
        "    if views:\n        fault = step()",
    ),
    _slip(
        "signal-between-the-renames",
        "Ctrl-C after the first rename ends the run where some files are new and some are old.",
        COMMIT,
        """\
                staged.take_place(sources, fsync=transaction.fsync)
                has_begun = True
""",
        """\
                staged.take_place(sources, fsync=transaction.fsync)
                has_begun = True
                signals.deliver()
""",
    ),
)

# Runs beside each other: found by switching between processes at every call.
_MEETINGS = (
    _slip(
        "log-not-read-again",
        "A recovery, or a second writer, reads a log before it says ready; the run then renames its first file and is"
        " killed: it is taken for untouched, and its temporaries are removed.",
        RECOVERY,
        """\
        newest = read_log(folder, log.path.name)
        if newest is None:
            return None
        file = File(""",
        """\
        newest = log
        if folder.status(log.path.name) is None:
            return None
        file = File(""",
    ),
    _slip(
        "lock-dropped-early",
        "The lock goes with the descriptor that is closed: a recovery or a second writer takes a live run for crashed,"
        " and removes what it is building.",
        TRANSACTION,
        """\
                self._lock = lock
                break
""",
        """\
                os.close(lock)
                self._lock = self.log_folder.open(f"{self.id}.lock", os.O_RDWR)
                break
""",
    ),
    _slip(
        "pid-believed-over-lock",
        "A run is killed and its PID is used again, or it was left to recovery by a process that lives on: it counts as"
        " in use though nothing holds its lock.",
        LOCKS,
        "if not is_locked and (is_locked is False or is_alive):",
        "if is_locked is False or is_alive:",
    ),
    _slip(
        "boot-not-compared",
        "On a file system without locks, a power cut ends a run and its PID is used again after it: the run counts as"
        " alive.",
        LOCKS,
        """\
    if log.boot != boot_id():
        return False
""",
    ),
    _slip(
        "rival-that-has-not-decided-is-passed-over",
        "Two runs register at once for one file in place, or one output folder, and look: both go on and say done.",
        OPEN,
        """\
        transaction.may_be_stale = True
        _pause()
    return None
""",
        """\
        return None
    return None
""",
    ),
    _slip(
        "rivals-sought-in-the-home-only",
        "Two runs share their second folder, or one's second is the other's first: neither sees the other, or a crashed"
        " run there.",
        OPEN,
        "for folder, names in transaction.targets.names.items():",
        "for folder, names in list(transaction.targets.names.items())[:1]:",
    ),
    _slip(
        "pointer-not-looked-at-again",
        "A recovery in the second folder takes a pointer that is not locked yet for an orphan and removes it; the run"
        " goes on without one, and is killed after ready.",
        LOCKS,
        "if lock(fd) is not False and is_file_at(fd, folder, name):",
        "if lock(fd) is not False:",
    ),
    _slip(
        "orphans-removed-without-a-lock",
        "A recovery takes the lock and the empty log of a run that is just beginning for orphans: the run goes on where"
        " no other sees it, and is killed after ready.",
        RECOVERY,
        "if not stat.S_ISREG(os.fstat(fd).st_mode) or lock(fd) is not True:",
        "if not stat.S_ISREG(os.fstat(fd).st_mode):",
    ),
    _slip(
        "orphan-not-looked-at-again",
        "A recovery finds a log that is still empty; the run becomes ready, renames its first file and is killed: its"
        " log is removed as an orphan.",
        RECOVERY,
        """\
        if read_log(folder, f"{run}.run") is not None:
            return 0
        return sum(""",
        """\
        return sum(""",
    ),
    _slip(
        "files-of-another-run-removed",
        "Of two runs that write different files in one folder, the first to end removes the temporaries of the other.",
        TRANSACTION,
        "for name in files_by_run(folder).get(run, ()):",
        "for name in sum(files_by_run(folder).values(), []):",
    ),
    _slip(
        "markers-of-another-run-removed",
        "In a folder that not every user may list, a second writer withdraws and removes the markers of the first,"
        " which is between two renames: a reader of another user gets a mixture.",
        TRANSACTION,
        "if status is not None and marked is not None and os.path.samestat(status, marked):",
        "if marked is not None:",
    ),
    _slip(
        "reader-not-kept-away",
        "A reader meets a run between two renames or copies, or one that was killed there, and reads a mixture.",
        INPUTS,
        """\
    require_finished(opened.local_paths)
    return opened
""",
        """\
    return opened
""",
    ),
    _slip(
        "writer-not-kept-away-from-its-inputs",
        "A run that writes elsewhere reads inputs that a killed run left half changed, or that one is changing.",
        OPEN,
        """\
        require_finished([*opened.local_paths, *output.states], transaction.id)
""",
    ),
    _slip(
        "file-not-compared-while-it-is-read",
        "A reader reads its first file, a run replaces both, and the reader goes on with the second.",
        CHANNEL,
        "        if not reader.is_unchanged:\n            raise changed_meanwhile(reader.source.name)\n",
        "        del reader\n",
    ),
    _slip(
        "log-not-public",
        "A run is killed between two renames: a reader of another user cannot open its log, and reads a mixture.",
        TRANSACTION,
        """\
        # Other users must be able to read it; but not while it is empty, or they could lock it.
        fs.change_mode(fd, 0o644)
""",
    ),
)

# Other programs, other users, and disks that lie.
_STRANGERS = (
    _slip(
        "foreign-write-after-a-crash-overwritten",
        "A run is killed after ready, another program writes to a file that is still to be replaced, and recovery"
        " renames over it.",
        STAGING,
        """\
    if (now.st_size, now.st_mtime_ns) != (move.size, move.mtime_ns):
        return False
    return now.st_ctime_ns == move.ctime_ns or attributes_of(now) != move.attributes
""",
        """\
    return True
""",
    ),
    _slip(
        "foreign-write-before-ready-overwritten-in-place",
        "Another program writes to a target after it was read and before ready, and the copies go over that.",
        COMMIT,
        """\
    if not is_same(now, before):
        raise changed_meanwhile(file.path)
    limit, _""",
        """\
    if now.st_size != before.st_size:
        raise changed_meanwhile(file.path)
    limit, _""",
    ),
    _slip(
        "torn-copy-taken-for-foreign",
        "A power cut, or a kill in the middle of a write, leaves some sectors of a copy: recovery compares the whole"
        " entry instead of each sector, and takes it for another program's.",
        REDO_LOG,
        "return bool(((sums != old) & (sums != new)).any())",
        "return bool((sums != old).any() and (sums != new).any())",
    ),
    _slip(
        "checksum-of-a-redo-log-not-compared",
        "A sector of the redo log is lost or damaged on the disk after ready, and recovery copies what is there.",
        REDO_LOG,
        """\
                if _checksum(self._run, entry.head[_CHECKSUM.size :], content) != entry.head[: _CHECKSUM.size]:
                    raise self._damaged()
""",
    ),
    _slip(
        "inode-not-compared",
        "Another program renames a file of its own over a target when all is ready, and the copies go into that; or a"
        " neighbour renames another file of the user over a temporary, and the new content goes into that.",
        FS,
        """\
        if not self.matches(os.fstat(fd)):
            os.close(fd)
            raise changed_meanwhile(self.path)
        return fd
""",
        """\
        return fd
""",
    ),
    _slip(
        "temporary-may-exist",
        "A neighbour sees the lock of a run and puts a link, or a file of their own, under the name of its next"
        " temporary: the run truncates and fills that.",
        FS,
        "os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600",
        "os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600",
    ),
    _slip(
        "files-of-a-run-readable-by-all",
        "A neighbour opens a temporary, a redo log or a lock when it is made: they read what a private input becomes,"
        " or lock out the recovery.",
        FS,
        "os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600",
        "os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666",
    ),
    _slip(
        "new-file-wider-than-its-inputs",
        "A new file, by --output or --output-dir, of inputs that only their owner may read can be read by all.",
        STAGING,
        "mode &= classes | _OWNER_MAY\n",
        "mode &= classes | _OWNER_MAY | stat.S_IRGRP | stat.S_IROTH\n",
    ),
    _slip(
        "swapped-temporary-not-noticed",
        "A neighbour puts another file under the name of a temporary between the last look and the rename: the run says"
        " done, and the target is that file.",
        COMMIT,
        "swapped += [] if staged.is_in_place else [staged.target]",
        "pass",
    ),
)

PLANTED: tuple[Mutation, ...] = (*_SYNCS, *_STEPS, *_MEETINGS, *_STRANGERS)

PAST: tuple[Mutation, ...] = (
    _slip(
        "date-set-back",
        "Another program writes to a file between reading and ready, with the same size, and sets back its date: what"
        " it wrote is overwritten.",
        SOURCE,
        "    return now.st_ctime_ns == before.st_ctime_ns or links_and_rights(now) != links_and_rights(before)\n",
        "    return True\n",
    ),
    _slip(
        "date-set-back-after-a-crash",
        "Another program writes to a file after a run was killed, sets back its date, and recovery renames over it.",
        STAGING,
        "    return now.st_ctime_ns == move.ctime_ns or attributes_of(now) != move.attributes\n",
        "    return True\n",
    ),
    _slip(
        "no-look-right-before-ready",
        "Of several files, another program writes to the second between the moment when its attributes were taken and"
        " ready: the log has the file as it is then, and recovery renames over it.",
        COMMIT,
        """\
            staged.finish(sources, fsync=self._transaction.fsync)
            staged.require_replaceable()
""",
        """\
            staged.require_replaceable()
""",
    ),
    _slip(
        "no-look-right-before-the-rename",
        "Another program writes to a file between ready and its rename, and the run renames over it.",
        STAGING,
        """\
        self.finish(sources, fsync=fsync)
        with os_errors_about(self.target):
            if not self.temporary.is_there:
""",
        """\
        with os_errors_about(self.target):
            if not self.temporary.is_there:
""",
    ),
    _slip(
        "attributes-taken-once",
        "The owner closes a file to others (chmod) after its attributes were taken and before its rename, and the new"
        " file is open to them.",
        STAGING,
        """\
                if changed == self._copied_ns:
                    self._status = now
                    return
""",
        """\
                if self._copied_ns >= 0:
                    self._status = now
                    return
""",
    ),
    _slip(
        "creation-found-too-late",
        "With --no-clobber and several files, another program creates the second target before ready: it is found after"
        " the first was put in place, and recovery renames over it.",
        STAGING,
        """\
                if self.is_new and now is not None:
                    raise self._created()
                changed =""",
        """\
                changed =""",
    ),
    _slip(
        "link-taken-for-durable",
        "Of several files under --no-clobber, a temporary is removed as soon as its target is linked: a power cut keeps"
        " the removal and loses the link, and recovery has neither.",
        STAGING,
        """\
                raise self._created() from error
            return False
        return True
""",
        """\
                raise self._created() from error
            return False
        self.temporary.folder.unlink(self.temporary.name)
        return True
""",
    ),
    _slip(
        "lost-answer-of-a-rename",
        "A server does the first rename and reports it as failed: the run calls itself off though the file is new.",
        STAGING,
        """\
                # A server may lose its answer, and fail when it is asked again.
                if not self.is_in_place:
                    raise
""",
        """\
                raise
""",
    ),
    _slip(
        "log-in-doubt",
        "The sync of the line that says ready fails, and so does its removal: the run goes on as if it were not in the"
        " log, and removes temporaries that recovery will need.",
        LOG,
        "            raise InDoubtError(error.errno, error.strerror) from error\n",
        "            pass\n",
    ),
    _slip(
        "log-removed-though-the-folder-could-not-be-synced",
        "The sync after the renames fails, and the log is removed all the same: a power cut then leaves a mixture.",
        COMMIT,
        """\
            # The log must stay while a rename may not be on the disk.
            if not is_atomic:
                self._transaction.needs_recovery = True
""",
    ),
    _slip(
        "removal-of-pointer-not-synced",
        "In a call with two folders, a power cut after the clean-up brings back the pointer and not the log, and the"
        " second folder is blocked.",
        TRANSACTION,
        """\
        # In a power cut, no pointer may outlive the log.
        if fsync:
            folder.sync()
""",
    ),
    _slip(
        "folder-that-cannot-be-opened-counts-as-gone",
        "A run with two folders was killed before ready, and the second cannot be opened at the moment (EACCES, EIO):"
        " recovery removes the log, and the pointer there blocks that folder.",
        RECOVERY,
        """\
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                opened =""",
        """\
            with contextlib.suppress(OSError):
                opened =""",
    ),
    _slip(
        "recovery-does-not-look-again",
        "Another program writes to a target in place between the check of the redo log and the copy of that entry by"
        " recovery, and what it wrote is overwritten.",
        REDO_LOG,
        """\
            if not force and _is_foreign(now, entry, content):
                raise changed_since(file.path)
            if now != content:
""",
        """\
            if now != content:
""",
    ),
    _slip(
        "file-put-back-from-a-copy",
        "A run in place is killed after ready, a copy of the old file is renamed over the target, and recovery changes"
        " that.",
        RECOVERY,
        "if not self._force and (status is None or status.st_ino != change.inode):",
        "if not self._force and status is None:",
    ),
    _slip(
        "redo-log-of-another-run",
        "Two runs in place were killed, the redo log of one is renamed to the name of the other's, and recover --force"
        " copies it into the wrong files.",
        REDO_LOG,
        "start = zlib.crc32(head, zlib.crc32(run.encode()))",
        "start = zlib.crc32(head)",
    ),
    _slip(
        "redo-log-of-another-user",
        "A neighbour puts a redo log of their own in the place of that of a killed run, and recover --force copies it.",
        RECOVERY,
        "if status is None or not stat.S_ISREG(status.st_mode) or status.st_uid != log.owner:",
        "if status is None or not stat.S_ISREG(status.st_mode):",
    ),
    _slip(
        "redo-log-cut-off-in-a-table",
        "A redo log is cut off in the middle of a table, by damage to the disk, and recovery ends with a traceback.",
        REDO_LOG,
        """\
            if len(tables) < nbytes:
                raise self._damaged()
""",
    ),
    _slip(
        "damage-found-after-the-first-copy",
        "The second entry of a redo log is damaged, and recover --force copies the first before it finds out.",
        RECOVERY,
        """\
        if redo is not None:
            # Whether it is damaged must be known before the first byte is written; `force` ignores only foreign bytes.
            redo.check({} if self._force else targets)
""",
        """\
        if redo is not None and not self._force:
            redo.check(targets)
""",
    ),
    _slip(
        "piece-covered-by-a-block",
        "A tensor lies in pieces in files whose other tensors are blocks around them: a run in place is killed during"
        " its copies, and recovery takes its own bytes for another program's.",
        DESTINATION,
        "                if shard in pieces:\n",
        "                if shard in pieces and is_whole:\n",
    ),
    _slip(
        "more-files-open-than-there-may-be",
        "The threads that copy a large redo log open more files than ulimit -n lets them, and leave the targets half"
        " changed.",
        REDO_LOG,
        """\
            budget = system.descriptors_left()
""",
        """\
            budget = 1 << 16
""",
    ),
    _slip(
        "larger-than-a-file-may-be",
        "A target in place is larger than ulimit -f lets the process write: the copies are refused after ready, and so"
        " are those of recovery.",
        COMMIT,
        "if limit not in (resource.RLIM_INFINITY, -1) and now.st_size > limit:",
        "if limit == 0 and now.st_size > limit:",
    ),
    _slip(
        "immutable-file-among-several",
        "The second of two files cannot be changed (chattr +i): its rename is refused when the first is new, and so is"
        " that of recovery.",
        STAGING,
        """\
            try:
                os.close(self.temporary.folder.open(self.name, os.O_WRONLY))
            except OSError as error:
                # A file that just may not be written to can be replaced.
                if error.errno == errno.EPERM:
                    raise
""",
    ),
    _slip(
        "file-of-another-user-in-a-sticky-folder",
        "In a sticky folder, the second of two files is another user's: its rename is refused when the first is new,"
        " and so is that of recovery.",
        STAGING,
        "if is_sticky and os.geteuid() not in (0, now.st_uid, self.temporary.folder.owner):",
        "if is_sticky and now.st_uid < 0:",
    ),
    _slip(
        "writer-in-a-folder-that-it-cannot-list",
        "A run in a folder that its user may write to and not list sees no other run there, and cannot remove what it"
        " has made.",
        TRANSACTION,
        """\
        for folder in self.targets.names:
            # Otherwise, this run could not see others, nor remove what it has made.
            with os_errors_about(folder.path):
                folder.names()
""",
    ),
    _slip(
        "reader-in-a-folder-that-it-cannot-list",
        "A run of the owner is killed between two renames in a folder of mode 0711: a reader of another user is not"
        " told, and reads a mixture.",
        RUNS,
        "        return _runs_of(folder, logs, {}, names)\n",
        "        return _runs_of(folder, logs, {}, [])\n",
    ),
    _slip(
        "log-that-is-not-public-yet",
        "Two users write different files in one folder: the second looks between the creation of the first one's log"
        " and its change of mode, and is refused.",
        LOG,
        "if status is not None and status.st_uid != os.geteuid():",
        "if False:",
    ),
    _slip(
        "foreign-link-read",
        "A neighbour leaves a link to a private file in a folder that is read: its content becomes part of a norm or a"
        " sum.",
        LINKS,
        "return os.open(path, _TO_READ if is_named else _TO_READ | os.O_NOFOLLOW)",
        "return os.open(path, _TO_READ)",
    ),
    _slip(
        "foreign-folder-link-followed",
        "A link of the user in a folder that is read leads through a link of a neighbour to a private file.",
        LINKS,
        """\
        self.links += foreign_links(self.path_of(name), status)
        return target
""",
        """\
        return target
""",
    ),
    _slip(
        "foreign-link-written-through",
        "A neighbour leaves a link to a private file of the user under the name of an output: the private file is"
        " replaced.",
        TARGETS,
        "            links += foreign_links(str(place), status)\n",
    ),
    _slip(
        "new-folder-behind-a-link-and-two-dots",
        "A folder to be made behind link/.. is made beside the link, and not where the system would find it.",
        TARGETS,
        """\
        above = new_folder
        while not""",
        """\
        above = new_folder = Path(os.path.abspath(new_folder))
        while not""",
    ),
    _slip(
        "forged-pointer",
        "A neighbour leaves a pointer to a killed run in a private folder of the user: who recovers the shared folder"
        " changes the private one.",
        RUNS,
        "if pointed is not None and pointed.path == pointed.log_path and pointed.owner == log.owner:",
        "if pointed is not None and pointed.path == pointed.log_path:",
    ),
    _slip(
        "forged-log-in-a-sticky-folder",
        "In a sticky folder, a neighbour leaves a log that names a file of the user as half changed: neither readers"
        " nor writers get to it any more.",
        RUNS,
        """\
    status = folder.status(name)
    return status is None or status.st_uid == log.owner or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
""",
        """\
    return True
""",
    ),
    _slip(
        "malformed-log-in-a-sticky-folder",
        "In a sticky folder, a neighbour leaves a log with right checksums that cannot be understood: no run writes"
        " there any more.",
        LOG,
        """\
        if not is_trusted(status.st_uid, folder):
            return None
""",
    ),
    _slip(
        "log-of-another-user-obeyed-by-root",
        "Root runs in a folder where a neighbour left a log: what that says is done with the rights of root.",
        LOCKS,
        "if log.owner != os.geteuid():",
        "if os.geteuid() not in (0, log.owner):",
    ),
    _slip(
        "temporary-of-a-crashed-run-replaced",
        "A run is killed after ready, a neighbour puts another file in the place of a temporary, and recovery renames"
        " it and says finished.",
        RECOVERY,
        "if built is None or (built.st_ino != move.inode and not self._force):",
        "if built is None:",
    ),
    _slip(
        "files-of-another-user-beside-a-crashed-run",
        "In a sticky folder, a neighbour makes files named as those of a killed run: recovery fails, because it may not"
        " remove them.",
        TRANSACTION,
        """\
        except PermissionError:
            if status.st_uid == os.geteuid():
                raise
""",
        """\
        except PermissionError:
            raise
""",
    ),
    _slip(
        "folder-beside-a-crashed-run",
        "A neighbour makes a folder named as a temporary of a killed run: recovery fails, because it cannot unlink it.",
        TRANSACTION,
        "if status is None or stat.S_ISDIR(status.st_mode):",
        "if status is None:",
    ),
    _slip(
        "output-named-as-a-file-of-a-run",
        "An output is named .gradtool-0123456789ab-1.tmp: the next recovery removes it.",
        TARGETS,
        "        if name.startswith(PREFIX):\n",
        "        if name == PREFIX:\n",
    ),
    _slip(
        "status-read-after-the-last-look",
        "Another program writes to the second of two files between the last look at it and the ready line: the log has"
        " the status of that write, and recovery overwrites it and says finished.",
        STAGING,
        "        now = self._status\n",
        "        now = self.temporary.folder.status(self.name)\n",
    ),
    _slip(
        "signal-hides-what-became-of-the-files",
        "A signal is pending when a rename fails after the first: the exception of its handler has no word of it, and"
        " the command says that no file was changed.",
        SIGNALS,
        'for note in getattr(error.__context__, "__notes__", [WRITTEN] * _is_committed):',
        "for note in [WRITTEN] * _is_committed:",
    ),
    _slip(
        "signal-after-all-is-new",
        "A program without handlers of its own is interrupted once all files are new: the KeyboardInterrupt does not"
        " say that they are.",
        SIGNALS,
        'for note in getattr(error.__context__, "__notes__", [WRITTEN] * _is_committed):',
        'for note in getattr(error.__context__, "__notes__", ()):',
    ),
    _slip(
        "private-file-made-public-by-recovery",
        "A run is killed when it is ready, and its target is then made private: recovery renames a file with the old"
        " mode over it.",
        RECOVERY,
        "            self._narrow(move)\n",
        "",
    ),
    _slip(
        "folder-above-a-new-one-not-synced",
        "A run makes a folder and a file in it, and is killed after the rename: recovery syncs the folder but not the"
        " one above it, and a power cut then loses both.",
        RECOVERY,
        "for changed in dict.fromkeys([*self._folders.values(), folder]):",
        "for changed in [folder]:",
    ),
    _slip(
        "folders-of-another-user",
        "A run is killed before it makes the folders of its output, another user makes them: its recovery fails for"
        " good, because it may not remove them.",
        FS,
        "errno.ENAMETOOLONG, errno.EACCES, errno.EPERM,\n",
        "errno.ENAMETOOLONG,\n",
    ),
    _slip(
        "answer-lost-though-the-link-was-made",
        "With --no-clobber, a server fails to answer that the first link was made: the run is called off, and the file"
        " stays.",
        STAGING,
        """\
            if self.is_in_place:
                return True
            if error.errno not in (errno.EEXIST, errno.EPERM, *system.UNSUPPORTED):
                raise
""",
        """\
            if error.errno not in (errno.EEXIST, errno.EPERM, *system.UNSUPPORTED):
                raise
            if self.is_in_place:
                return True
""",
    ),
    _slip(
        "pointer-gone-counts-as-old",
        "The power is cut after a single file was renamed in a new folder and its pointer removed: recovery says that"
        " the run had changed nothing.",
        RECOVERY,
        "folder = self._folders.get(move.folder) or self._unpointed.get(move.folder)",
        "folder = self._folders.get(move.folder)",
    ),
    _slip(
        "a-swap-ends-the-run-without-a-word-in-the-log",
        "A neighbour swaps a file right after its rename, the run clears up without a line that it has ended, and the"
        " power is cut: the log is back, its pointers are not, and not even --force can recover it.",
        COMMIT,
        """\
                swapped += [] if staged.is_in_place else [staged.target]
        try:
""",
        """\
                swapped += [] if staged.is_in_place else [staged.target]
        if swapped:
            raise changed_meanwhile(swapped[0])
        try:
""",
    ),
    _slip(
        "bare-error-of-a-status",
        "The system refuses the status of a log: the error is taken for a bug of gradtool.",
        RUNS,
        "    with os_errors_about(folder.path):\n        logs = _logs_in",
        "    with contextlib.nullcontext():\n        logs = _logs_in",
    ),
)
