"""Where a call writes: over its inputs, into them, to one file, into a folder, or nowhere."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import BadInputError, GradtoolError, Problem, SystemRefusedError, UsageError, from_os_error
from gradtool.store import fs, signals
from gradtool.store.format.header import read_regular
from gradtool.store.fs import File
from gradtool.store.transaction.acquire import acquire
from gradtool.store.transaction.destination import DISCARD, NewFile, NewFiles, Overwritten
from gradtool.store.transaction.inplace import InPlace, Target
from gradtool.store.transaction.orders import Ordered
from gradtool.store.transaction.replace import Replacement
from gradtool.store.transaction.staging import new_mode
from gradtool.store.transaction.targets import Targets, refuse_collisions
from gradtool.store.transaction.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.format.header import Shard
    from gradtool.store.transaction.destination import Destination

_REMEDY = "gradtool recover, or the next run, makes the files all old or all new"


class OutputOptions(NamedTuple):
    """The options of every operation that writes."""

    file: str | None = None
    folder: str | None = None
    no_clobber: bool = False
    dry_run: bool = False
    in_place: bool = False
    fsync: bool = True
    lock_timeout: float = 0.0
    # Other processes build new files.
    by_workers: bool = False

    @property
    def is_elsewhere(self) -> bool:
        """Whether the inputs are left alone."""
        return self.file is not None or self.folder is not None

    @property
    def only_reads(self) -> bool:
        """Whether no input is written."""
        return self.dry_run or self.is_elsewhere


class NewIndex(NamedTuple):
    """An index to be written: the one that it comes from, as it was when it was read, and the new content."""

    path: Path
    stat: os.stat_result
    content: bytes


class Output(NamedTuple):
    """The options, checked against the sets that are written; or the one file that is `created` instead.

    `mode` is that of new files. `transaction` holds the locks, if they have been taken.
    """

    options: OutputOptions
    sets: Sequence[GradientSet]
    mode: int
    created: Path | None = None
    transaction: Transaction | None = None

    @classmethod
    def of(cls, options: OutputOptions, sets: Sequence[GradientSet], writes: int | None, created: Path | None) -> Self:
        """The output of a call that reads the sets, and writes the first of them or all.

        Raises:
            UsageError: the options do not fit the inputs.
        """
        shards = [shard for one in sets for shard in one.shards]
        output = cls(options, sets[:writes], new_mode(shard.stat for shard in shards), created)
        if options.in_place and (options.is_elsewhere or created is not None):
            raise UsageError("--write inplace changes files that are there; leave out --output, --output-dir, --create")
        if options.file is not None and options.folder is not None:
            raise UsageError("--output and --output-dir exclude each other")
        if options.no_clobber and not options.is_elsewhere:
            raise UsageError("--no-clobber is about the files of --output and --output-dir; give one of these")
        if options.file == "-":
            raise UsageError("--output - is not supported: results are files, not streams. Use ./- for a file named -")
        if options.file is not None and options.file.endswith(os.sep):
            raise UsageError(f"--output {options.file} names a folder; use --output-dir")
        if options.file is not None and (len(output.shards) > 1 or output.sets[0].index):
            raise UsageError("--output takes a single input file; use --output-dir for several")
        # Not Path's questions, which raise where there is no permission.
        there, is_folder = os.path.lexists(options.folder or ""), os.path.isdir(options.folder or "")  # noqa: PTH112
        if there and not is_folder:
            raise UsageError(f"--output-dir {options.folder} is no folder")
        if options.is_elsewhere:
            refuse_collisions(output.targets, shards, [one.index for one in sets if one.index])
        output.refuse_existing()
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
        return self.options.is_elsewhere

    def files(self, changed: Iterable[Selected]) -> list[NewFile]:
        """The files to be written when those tensors change: theirs, or all of them where the output is elsewhere."""
        changes: dict[Shard, int] = {}
        for one in changed:
            changes[one.shard] = changes.get(one.shard, 0) + one.tensor.nbytes
        return [
            NewFile(shard, shard.size, changes=changes.get(shard, 0))
            for shard in self.shards
            if self.is_elsewhere or shard in changes
        ]

    def wrote(self, shards: Collection[Shard]) -> tuple[str, ...]:
        """The paths that were written, as the caller named them, after those files were."""
        elsewhere = self.options.file or self.options.folder or self.created
        if elsewhere is not None:
            return (str(elsewhere),) if shards else ()
        return tuple(str(one.path) for one in self.sets if any(shard in shards for shard in one.shards))

    def refuse_existing(self) -> None:
        """Raise `BadInputError` where a file would be replaced that is to be kept."""
        if self.options.no_clobber:
            there = [Problem("exists", "already exists", str(one)) for one in self.targets if os.path.lexists(one)]
            if there:
                raise BadInputError.of(there, "nothing written. Leave out --no-clobber to replace files that exist")

    def new_transaction(self) -> Transaction:
        """The transaction that will lock the targets; it does nothing yet."""
        folder = self.options.folder
        return Transaction(Targets(self.targets, None if folder is None else Path(folder)), fsync=self.options.fsync)

    def held_by(self, transaction: Transaction) -> Self:
        """The same, with the locks that a transaction has taken."""
        return self._replace(transaction=transaction)

    @contextlib.contextmanager
    def writing(self, files: Sequence[NewFile], indexes: Sequence[NewIndex] | None = None) -> Iterator[Destination]:
        """A destination for the files, which are all put in their places at the end of the block.

        An exception in the block leaves every file as it was. `indexes` are written too; by default a copy of each
        where the output is elsewhere.
        """
        if self.options.dry_run or not (files or self.is_elsewhere):
            yield DISCARD
            return
        with self._locked() as transaction:
            # Another run may have written them while this one waited for its locks.
            self.refuse_existing()
            if self.options.in_place:
                targets = [_target_of(transaction, file) for file in files]
                with InPlace(transaction, targets) as in_place:
                    yield Overwritten(_by_shard(files, [target.file for target in targets]), in_place)
                    in_place.commit()
            else:
                with Replacement(transaction) as replacement:
                    yield self._built(replacement, files)
                    self._write_indexes(replacement, self._copied_indexes() if indexes is None else indexes)
                    replacement.commit()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Transaction]:
        """The transaction that has locked the files: for the whole call, or only to write."""
        if self.transaction is not None:
            yield self.transaction
            return
        with signals.deferred(), self.new_transaction() as transaction, explained(transaction):
            acquire(transaction, timeout=self.options.lock_timeout)
            yield transaction

    def _target(self, path: Path) -> Path:
        if self.options.file is not None:
            return Path(self.options.file)
        return path if self.options.folder is None else Path(self.options.folder) / path.name

    def _built(self, replacement: Replacement, files: Sequence[NewFile]) -> Destination:
        """The destination that builds the files: here, or by other processes."""
        if not self.options.by_workers:
            return NewFiles(_by_shard(files, [self._stage(replacement, file) for file in files]))
        orders = {}
        for file in files:
            keeps = file.replaces and not self.is_elsewhere
            target = self._target(file.shard.path)
            orders[file.shard] = replacement.orders.add(target, file, keeps_attributes=keeps, mode=self.mode)
        return Ordered(orders, replacement)

    def _stage(self, replacement: Replacement, file: NewFile) -> File:
        original = None if self.is_elsewhere or not file.replaces else file.shard.stat
        target = self._target(file.shard.path)
        return replacement.stage(target, file.size, original, file.ranges, mode=self.mode, is_new=not file.replaces)

    def _copied_indexes(self) -> list[NewIndex]:
        if not self.is_elsewhere or self.options.file is not None:
            return []
        return [NewIndex(one.index, *read_regular(one.index)) for one in self.sets if one.index]

    def _write_indexes(self, replacement: Replacement, indexes: Sequence[NewIndex]) -> None:
        for path, stat, content in indexes:
            target = self._target(path)
            staged = replacement.stage(target, len(content), None if self.is_elsewhere else stat, mode=self.mode)
            try:
                fd = staged.open(os.O_WRONLY)
                try:
                    fs.write_all(fd, [content], 0)
                finally:
                    os.close(fd)
            except OSError as error:
                raise from_os_error(error, target) from error


@contextlib.contextmanager
def explained(transaction: Transaction) -> Iterator[None]:
    """Add the remedy to an error that leaves files for `gradtool recover`."""
    try:
        yield
    except BaseException as error:
        if transaction.leaves_files:
            error.add_note(_REMEDY)
        if transaction.needs_recovery and isinstance(error, GradtoolError) and "gradtool recover" not in str(error):
            problem = error.problems[0]
            raise SystemRefusedError(
                f"{problem.message}; {_REMEDY}", file=problem.file, tensor=problem.tensor, code="unfinished"
            ) from error
        raise


def _by_shard(files: Sequence[NewFile], written: Sequence[File]) -> dict[Shard, tuple[NewFile, File]]:
    return {file.shard: (file, one) for file, one in zip(files, written, strict=True)}


def _target_of(transaction: Transaction, file: NewFile) -> Target:
    """What is changed in place for a file, which must still be the one that was read."""
    folder, name = transaction.locate(file.shard.path)
    return Target(File(folder, name, *file.shard.identity), file.shard.stat, file.changes)
