"""Where a result goes: over its inputs, or into them, to one file, into a folder, or nowhere."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gradtool.errors import BadInputError, GradtoolError, SystemRefusedError, UsageError, from_os_error
from gradtool.ops import arguments
from gradtool.ops.passes import open_to_read
from gradtool.store import fs, signals
from gradtool.store.format.header import is_unchanged, read_regular
from gradtool.store.fs import File
from gradtool.store.transaction.guard import refuse_unfinished
from gradtool.store.transaction.inplace import InPlace, Target
from gradtool.store.transaction.locks import InUse
from gradtool.store.transaction.open import acquire
from gradtool.store.transaction.recovery import Recovered, recover_at
from gradtool.store.transaction.replace import Replacement
from gradtool.store.transaction.staging import new_mode
from gradtool.store.transaction.targets import Targets, refuse_collisions
from gradtool.store.transaction.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from gradtool.ops.passes import Inputs, Session
    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.format.header import Shard
    from gradtool.store.transaction.guard import Scope

    # Fills the new files, of which it is given the temporaries; given none, does all the work and writes nothing.
    Fill = Callable[[Mapping[Shard, File]], None]
    # The content of an index, as the new files want it.
    Reindex = Callable[[GradientSet, bytes], bytes]


_NOTHING_CAN_BE_WRITTEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
# A file is replaced while its header is read only if one run after the other comes to just that point.
_TRIES = 100
_PAUSE_SECONDS = 0.01
_REMEDY = "gradtool recover, or the next run, makes the files all old or all new"


class NewFile(NamedTuple):
    """A file that takes a shard's place, and the ranges of it that will be written: all, unless there are to be holes.

    In place, `changes` bytes of the shard are overwritten instead. `replaces` says that the shard is there already.
    """

    shard: Shard
    size: int
    ranges: Sequence[tuple[int, int]] | None = None
    changes: int = 0
    replaces: bool = True


@dataclass(frozen=True)
class Choices:
    """The options that every writing operation has, as they were given."""

    output: Any
    output_dir: Any
    dry_run: bool
    write: Any
    fsync: bool
    lock_timeout: Any

    def check(self) -> None:
        """Raise `UsageError` where they make no sense, whatever the files hold."""
        arguments.one_of("--write", self.write, ("replace", "inplace"))
        if not 0 <= arguments.number("--lock-timeout", self.lock_timeout) < math.inf:
            raise UsageError(f"--lock-timeout must be 0 or more and finite, not {self.lock_timeout!r}")


@dataclass(frozen=True)
class Output:
    """The options that every writing operation has, checked against its inputs; `sets` are those it writes.

    `created` is a new file that is written instead of any set, and `run` what keeps others from the files.
    """

    sets: Sequence[GradientSet]
    file: str | None
    folder: str | None
    dry_run: bool
    fsync: bool
    in_place: bool
    lock_timeout: float
    created: Path | None = None
    run: Transaction | None = None

    @classmethod
    def of(cls, session: Session, choices: Choices, sets: Sequence[GradientSet], created: Path | None = None) -> Self:
        """The output of a call, or `UsageError` where the options do not fit its inputs; before any work is done."""
        output = cls(
            sets,
            arguments.optional_path("--output", choices.output),
            arguments.optional_path("--output-dir", choices.output_dir),
            choices.dry_run,
            choices.fsync,
            choices.write == "inplace",
            arguments.number("--lock-timeout", choices.lock_timeout),
            created,
        )
        if output.in_place and (output.is_elsewhere or created is not None):
            raise UsageError("--write inplace changes files that are there; leave out --output, --output-dir, --create")
        if output.file is not None and output.folder is not None:
            raise UsageError("--output and --output-dir exclude each other")
        if output.file is not None and output.file.endswith(os.sep):
            raise UsageError(f"--output {output.file} names a folder; use --output-dir")
        if output.file is not None and (len(output.shards) > 1 or output.sets[0].index):
            raise UsageError("--output takes a single input file; use --output-dir for several")
        # Not Path's questions, which raise where there is no permission.
        there, is_folder = os.path.lexists(output.folder or ""), os.path.isdir(output.folder or "")  # noqa: PTH112
        if there and not is_folder:
            raise UsageError(f"--output-dir {output.folder} is no folder")
        if output.is_elsewhere:
            refuse_collisions(output.targets, session.shards, [one.index for one in session.sets if one.index])
        return output

    @property
    def targets(self) -> list[Path]:
        """Every file that may be written, with the indexes."""
        if self.created is not None:
            return [self.created]
        indexes = [one.index for one in self.sets if one.index]
        return [self._target(path) for path in (*(shard.path for shard in self.shards), *indexes)]

    @property
    def shards(self) -> list[Shard]:
        """Every file of the sets that are written."""
        return [shard for one in self.sets for shard in one.shards]

    @property
    def is_elsewhere(self) -> bool:
        """Whether the inputs are left alone."""
        return self.file is not None or self.folder is not None

    def arriving(self, changed: Iterable[Selected]) -> list[NewFile]:
        """New files for those of the tensors that change; elsewhere for all, which must arrive there."""
        changes: dict[Shard, int] = {}
        for one in changed:
            changes[one.shard] = changes.get(one.shard, 0) + one.tensor.nbytes
        return [
            NewFile(shard, shard.size, changes=changes.get(shard, 0))
            for shard in self.shards
            if self.is_elsewhere or shard in changes
        ]

    def write(
        self,
        session: Session,
        files: Sequence[NewFile],
        fill: Fill,
        verify: Callable[[], None] = lambda: None,
        reindex: Reindex | None = None,
    ) -> int:
        """Have new files filled and verified, and put each in its place; the number of files that were written.

        In place, the files themselves are filled. What `fill` and `verify` raise leaves every file as it was.
        """
        if self.dry_run or not (files or self.is_elsewhere):
            fill({})
            verify()
            return 0
        with self._registered() as run:
            if self.in_place:
                self._change(session, run, files, fill, verify)
            else:
                self._replace(session, run, files, (fill, verify, reindex))
        return len(files)

    def _replace(
        self,
        session: Session,
        run: Transaction,
        files: Sequence[NewFile],
        work: tuple[Fill, Callable[[], None], Reindex | None],
    ) -> None:
        fill, verify, reindex = work
        mode = new_mode(shard.stat for shard in session.shards)
        with Replacement(run) as replacement:
            fill({file.shard: self._stage(replacement, file, mode) for file in files})
            verify()
            self._write_indexes(replacement, reindex, mode)
            began = perf_counter()
            replacement.commit()
        session.commit_seconds = perf_counter() - began

    def _change(
        self, session: Session, run: Transaction, files: Sequence[NewFile], fill: Fill, verify: Callable[[], None]
    ) -> None:
        targets = {file.shard: _target_of(run, file) for file in files}
        with InPlace(run, list(targets.values())) as journal:
            session.journal = journal
            try:
                fill({shard: target.file for shard, target in targets.items()})
                verify()
            finally:
                session.journal = None
            began = perf_counter()
            journal.commit()
        session.commit_seconds = perf_counter() - began

    @contextlib.contextmanager
    def _registered(self) -> Iterator[Transaction]:
        """What keeps others from the files, of this call or just for writing."""
        if self.run is not None:
            yield self.run
            return
        with signals.deferred(), self.new_run() as run, _explained(run):
            acquire(run, timeout=self.lock_timeout)
            yield run

    def new_run(self) -> Transaction:
        """What will keep others from the files; it does nothing yet."""
        return Transaction(Targets(self.targets, None if self.folder is None else Path(self.folder)), fsync=self.fsync)

    def _target(self, path: Path) -> Path:
        if self.file is not None:
            return Path(self.file)
        return path if self.folder is None else Path(self.folder) / path.name

    def _stage(self, replacement: Replacement, file: NewFile, mode: int) -> File:
        original = None if self.is_elsewhere or not file.replaces else file.shard.stat
        target = self._target(file.shard.path)
        return replacement.stage(target, file.size, original, file.ranges, mode=mode, is_new=not file.replaces)

    def _write_indexes(self, replacement: Replacement, reindex: Reindex | None, mode: int) -> None:
        for one in self.sets:
            if one.index is None or (self.file is not None) or not (self.is_elsewhere or reindex):
                continue
            status, content = read_regular(one.index)
            new = content if reindex is None else reindex(one, content)
            if new == content and not self.is_elsewhere:
                continue
            target = self._target(one.index)
            staged = replacement.stage(target, len(new), None if self.is_elsewhere else status, mode=mode)
            try:
                fd = staged.open(os.O_WRONLY)
                try:
                    fs.write_all(fd, [new], 0)
                finally:
                    os.close(fd)
            except OSError as error:
                raise from_os_error(error, target) from error


@contextlib.contextmanager
def opened(
    inputs: Inputs,
    choices: Choices,
    *,
    owned: Callable[[Sequence[GradientSet]], Sequence[GradientSet]] = lambda sets: sets,
    created: Path | None = None,
) -> Iterator[tuple[Session, Output]]:
    """Open inputs of which the `owned` sets are written, and keep others from these until the end.

    What a run that died left unfinished in them is brought to its end first.

    Raises:
        UsageError: the options do not fit.
        SystemRefusedError: another run has one of the files, or one that died left an input half changed.
    """
    choices.check()
    only_reads = choices.dry_run or choices.output is not None or choices.output_dir is not None
    if only_reads:
        session = open_to_read(inputs)
        yield session, Output.of(session, choices, owned(session.sets), created)
        return
    session = _open_to_write(inputs, time.monotonic() + float(choices.lock_timeout))
    output = Output.of(session, choices, owned(session.sets), created)
    with signals.deferred(), output.new_run() as run, _explained(run):
        is_held = _try_to_acquire(run, output)
        if run.may_be_stale or not all(is_unchanged(shard.path, shard.stat) for shard in output.shards):
            session = inputs.open()
            output = Output.of(session, choices, owned(session.sets), created)
        for target in output.targets:
            run.locate(target)
        refuse_unfinished((shard.path for shard in session.shards), own=run.id)
        yield session, replace(output, run=run if is_held else None)


@contextlib.contextmanager
def _explained(run: Transaction) -> Iterator[None]:
    """What becomes of an error that leaves something to recover: it says so."""
    try:
        yield
    except BaseException as error:
        if run.leaves_files:
            error.add_note(_REMEDY)
        if run.needs_recovery and isinstance(error, GradtoolError) and "gradtool recover" not in str(error):
            problem = error.problems[0]
            raise SystemRefusedError(
                f"{problem.message}; {_REMEDY}", file=problem.file, tensor=problem.tensor, code="unfinished"
            ) from error
        raise


def _target_of(run: Transaction, file: NewFile) -> Target:
    """What is changed in place for a file, which must still be the one that was read."""
    folder, name = run.locate(file.shard.path)
    return Target(File(folder, name, *file.shard.identity), file.shard.stat, file.changes)


def _open_to_write(inputs: Inputs, deadline: float) -> Session:
    """Open inputs, though another run may be replacing them, or one that died have left them half changed."""
    tries = 0
    while True:
        tries += 1
        try:
            return inputs.open()
        except SystemRefusedError as error:
            if error.problems[0].code != "changed" or (tries > _TRIES and time.monotonic() > deadline):
                raise
        except BadInputError as error:
            found = [one for place in inputs.places(error) for one in _found_at(place)]
            alive = [one for one in found if isinstance(one, InUse) and one.log.is_unfinished]
            if alive and time.monotonic() > deadline:
                raise alive[0].error(alive[0].log.home.parent) from None
            if not alive and not any(isinstance(one, Recovered) for one in found):
                raise
        time.sleep(_PAUSE_SECONDS)


def _found_at(place: Scope) -> Sequence[Recovered | InUse]:
    """The runs at a place, those that died brought to their end."""
    found = recover_at(place)[0] if os.path.isdir(place.folder) else []  # noqa: PTH112 - Path's own may raise
    for one in found:
        if isinstance(one, GradtoolError):
            raise one
    return [one for one in found if not isinstance(one, GradtoolError)]


def _try_to_acquire(run: Transaction, output: Output) -> bool:
    """Keep others from the files; False where nothing can be written, and perhaps nothing needs to be.

    If something does, it will be refused then.
    """
    try:
        acquire(run, timeout=output.lock_timeout)
    except SystemRefusedError as error:
        if error.errno not in _NOTHING_CAN_BE_WRITTEN:
            raise
        # What it has registered of several folders must not be in the way of the next try.
        run.withdraw()
        return False
    return True
