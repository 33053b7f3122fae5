"""Where a call writes: over its inputs, into them, to one file, into a folder, or nowhere."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import BadInputError, GradtoolError, Problem, SystemRefusedError, UsageError
from gradtool.store import signals
from gradtool.store.format.metadata import rewritten
from gradtool.store.fs import File
from gradtool.store.transaction.acquire import acquire
from gradtool.store.transaction.destination import DISCARD, NewFile, NewFiles, Overwritten
from gradtool.store.transaction.inplace import InPlace, Target
from gradtool.store.transaction.orders import Ordered
from gradtool.store.transaction.readers import refuse_unfinished
from gradtool.store.transaction.replace import Replacement
from gradtool.store.transaction.small import NewIndex, fill, refuse_among
from gradtool.store.transaction.staging import new_mode
from gradtool.store.transaction.targets import Targets, refuse_collisions
from gradtool.store.transaction.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.format.header import Shard
    from gradtool.store.format.newset import NewSet
    from gradtool.store.transaction.destination import Destination
    from gradtool.store.transaction.inputs import OpenSets
    from gradtool.store.transaction.output_options import OutputOptions
    from gradtool.store.transaction.small import NewState

    # For each file whose metadata change, the entries that get a new text, or none.
    Metadata = Mapping[Shard, Mapping[str, str | None]]

_REMEDY = "gradtool recover, or the next run, makes the files all old or all new"


class Output(NamedTuple):
    """The options, checked against the sets that are written; or the files that are `created` instead.

    `mode` is that of new files. `folder` is made if it does not exist. `transaction` holds the locks, if they have been
    taken.
    """

    options: OutputOptions
    sets: Sequence[GradientSet]
    mode: int
    created: Sequence[Path] = ()
    folder: Path | None = None
    transaction: Transaction | None = None

    @classmethod
    def of(
        cls,
        options: OutputOptions,
        opened: OpenSets,
        writes: int | None = None,
        created: NewSet | None = None,
        homes: Collection[Path] | None = None,
    ) -> Self:
        """The output of a call that writes the first of the open sets, or those with a file of `homes`, or a new one.

        Raises:
            UsageError: the options do not fit the inputs.
            BadInputError: the new set cannot be like the first; or an output is a URL, or a path that the shell should
                have expanded.
        """
        sets, shards = opened.sets, opened.shards
        folder = None if options.folder is None else Path(options.folder)
        written = sets[:writes] if homes is None else _sets_with(homes, sets, options)
        output = cls(options, written, new_mode(shard.stat for shard in shards), folder=folder)
        if created is not None:
            first = opened.selected_in(sets[0].shards)
            output = output._replace(created=created.targets(first), folder=created.folder)
        options.check(creates=created is not None)
        if options.file is not None and (len(output.shards) > 1 or output.sets[0].index):
            what = "takes a single input file" if homes is None else f"is one file, but {len(homes)} files get results"
            raise UsageError(f"--output {what}; use --output-dir for several files")
        if options.is_elsewhere:
            refuse_collisions(output.targets, shards, [one.index for one in sets if one.index])
        refuse_among(output.targets, output.states)
        output.refuse_existing()
        return output

    @property
    def targets(self) -> list[Path]:
        """Every file that may be written, with the indexes."""
        if self.created:
            return list(self.created)
        indexes = [one.index for one in self.sets if one.index]
        return [self._target(path) for path in (*(shard.path for shard in self.shards), *indexes)]

    @property
    def states(self) -> list[Path]:
        """The state that is written with the targets, if there is one."""
        return [] if self.options.state is None else [Path(self.options.state)]

    @property
    def shards(self) -> list[Shard]:
        """Every file of the sets that are written."""
        return [shard for one in self.sets for shard in one.shards]

    @property
    def is_elsewhere(self) -> bool:
        """Whether the inputs are left alone."""
        return self.options.is_elsewhere

    def files(self, changed: Iterable[Selected], metadata: Metadata | None = None) -> list[NewFile]:
        """The files to be written when those tensors and entries of metadata change; elsewhere, all of them."""
        changes: dict[Shard, int] = {}
        metadata = metadata or {}
        for one in changed:
            changes[one.shard] = changes.get(one.shard, 0) + one.tensor.nbytes
        return [
            NewFile(shard, shard.size, changes=changes.get(shard, 0), metadata=metadata.get(shard))
            for shard in self.shards
            if self.is_elsewhere or shard in changes or shard in metadata
        ]

    def wrote(self, shards: Collection[Shard]) -> tuple[str, ...]:
        """The paths that were written, as the caller named them, after those files were."""
        elsewhere = [self.options.file] if self.options.file else [self.folder] if self.folder else self.created
        if elsewhere:
            return (str(elsewhere[0]),) if shards else ()
        return tuple(str(one.path) for one in self.sets if any(shard in shards for shard in one.shards))

    def refuse_existing(self) -> None:
        """Raise `BadInputError` where a file would be replaced that is to be kept."""
        if self.options.no_clobber:
            there = [Problem("exists", "already exists", str(one)) for one in self.targets if os.path.lexists(one)]
            if there:
                raise BadInputError.of(there, "nothing written. Leave out --no-clobber to replace files that exist")

    def new_transaction(self) -> Transaction:
        """The transaction that will lock the targets; it does nothing yet."""
        return Transaction(Targets(self.targets, self.folder, self.states), fsync=self.options.fsync)

    def held_by(self, transaction: Transaction) -> Self:
        """The same, with the locks that a transaction has taken."""
        return self._replace(transaction=transaction)

    @contextlib.contextmanager
    def locked_for_state(self) -> Iterator[Self]:
        """The same, where no input is written; locked if there is a state, which no other run may write meanwhile."""
        if not self.options.keeps_state:
            if self.states:
                # What a path that leads nowhere is refused by, in a dry run too.
                Targets((), self.folder, self.states).close()
            refuse_unfinished(one for one in self.states if one.parent.is_dir())
            yield self
            return
        with self._locked() as transaction:
            yield self.held_by(transaction)

    @contextlib.contextmanager
    def writing(
        self,
        files: Sequence[NewFile],
        indexes: Sequence[NewIndex] | None = None,
        state: NewState | None = None,
    ) -> Iterator[Destination]:
        """A destination for the files, which are all put in their places at the end of the block.

        An exception in the block leaves every file as it was. `indexes` are written too; by default a copy of each
        where the output is elsewhere. So is `state`, even where there are no files.

        Raises:
            BadInputError: in place, the header of a file has no room for new metadata.
        """
        files = [_with_metadata(file, in_place=self.options.in_place) for file in files]
        if self.options.dry_run or not (files or self.is_elsewhere or state):
            yield DISCARD
            return
        with self._locked() as transaction:
            # Another run may have written them while this one waited for its locks.
            self.refuse_existing()
            if self.options.in_place and files:
                targets = [_target_of(transaction, file) for file in files]
                with InPlace(transaction, targets) as in_place:
                    yield Overwritten(_by_shard(files, [target.file for target in targets]), in_place)
                    self._write_state(in_place.last, state)
                    in_place.commit()
            else:
                with Replacement(transaction) as replacement:
                    yield self._built(replacement, files)
                    self._write_indexes(replacement, self._copied_indexes() if indexes is None else indexes)
                    self._write_state(replacement, state)
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
        return [NewIndex(one.index, *one.read_index()) for one in self.sets if one.index]

    def _write_indexes(self, replacement: Replacement, indexes: Sequence[NewIndex]) -> None:
        for path, stat, content in indexes:
            target, original = self._target(path), None if self.is_elsewhere else stat
            staged = replacement.stage(target, len(content), original, mode=self.mode, is_new=stat is None)
            fill(staged, target, content)

    def _write_state(self, replacement: Replacement, state: NewState | None) -> None:
        if state is not None:
            size, is_new = len(state.content), state.stat is None
            staged = replacement.stage(state.path, size, state.stat, mode=self.mode, is_new=is_new)
            fill(staged, state.path, state.content)


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


def _with_metadata(file: NewFile, *, in_place: bool) -> NewFile:
    """The file with the header that its new metadata ask for, if there are any."""
    if not file.metadata:
        return file
    new = file.with_header(rewritten(file.shard, file.metadata))
    if in_place and new.shift:
        message = "its header has no room for new metadata in place; use --write replace this time, which makes room"
        raise BadInputError(message, file=file.shard.path, code="header")
    return new


def _sets_with(homes: Collection[Path], sets: Sequence[GradientSet], options: OutputOptions) -> list[GradientSet]:
    """The sets that have one of the files; where the output is elsewhere, only those files of them."""
    found = [one for one in sets if any(shard.path in homes for shard in one.shards)]
    if not options.is_elsewhere:
        return found
    own = [tuple(shard for shard in one.shards if shard.path in homes) for one in found]
    # A single file needs no index.
    indexes = [one.index if options.file is None else None for one in found]
    return [replace(one, shards=shards, index=index) for one, shards, index in zip(found, own, indexes, strict=True)]


def _by_shard(files: Sequence[NewFile], written: Sequence[File]) -> dict[Shard, tuple[NewFile, File]]:
    return {file.shard: (file, one) for file, one in zip(files, written, strict=True)}


def _target_of(transaction: Transaction, file: NewFile) -> Target:
    """What is changed in place for a file, which must still be the one that was read."""
    folder, name = transaction.locate(file.shard.path)
    return Target(File(folder, name, *file.shard.identity), file.shard.stat, file.changes)
