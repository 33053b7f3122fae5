"""Where a call writes: over its inputs, into them, to one file, into a folder, or nowhere."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import BadInputError, BugError, Problem, SystemRefusedError, UsageError, ensure, option, say
from gradtool.store.format.gradset import parts_in
from gradtool.store.format.layout import INDEX_NAME, rewritten
from gradtool.store.fs import File
from gradtool.store.io.destination import DISCARD, NewFile, NewFiles, Overwritten
from gradtool.store.source import SmallFile, require_status
from gradtool.store.transaction.commit import Commit
from gradtool.store.transaction.inplace import Target
from gradtool.store.transaction.inputs import require_finished
from gradtool.store.transaction.output_checks import check_collisions, check_not_replaced, check_options, check_state
from gradtool.store.transaction.targets import Targets
from gradtool.store.transaction.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from gradtool.options import Writing
    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.format.tensors import Shard
    from gradtool.store.io.destination import Destination
    from gradtool.store.transaction.inputs import OpenSets, WritePlan
    from gradtool.store.transaction.staging import Source

    # For each file whose metadata change, the entries that get a new text, or none.
    Metadata = Mapping[Shard, Mapping[str, str | None]]


class Output(NamedTuple):
    """The options, checked against the sets that are written; or the files of a set that is `created` elsewhere.

    The `sources` are all files that are read, which decide who may read new files. `folder` is made if it does not
    exist. `transaction` holds the locks, unless there was a `refusal`. `state` is that of the plan.
    """

    options: Writing
    sets: Sequence[GradientSet]
    sources: Sequence[Source]
    created: Sequence[Path] = ()
    folder: Path | None = None
    transaction: Transaction | None = None
    refusal: SystemRefusedError | None = None
    state: Path | None = None

    @classmethod
    def of(cls, options: Writing, opened: OpenSets, plan: WritePlan) -> Self:
        """Return the output of a call to open sets, or to a new one.

        Raises:
            UsageError: the options do not fit the inputs.
            BadInputError: the new set cannot be sharded as asked, or its folder has other files; or an output is a URL,
                or a path that the shell should have expanded.
        """
        check_options(options, plan.state)
        sets, shards, created, output_files = opened.sets, opened.shards, plan.created, plan.output_files
        folder = None if options.output_dir is None else Path(options.output_dir)
        written = sets[: plan.writes] if output_files is None else _sets_with(output_files, sets, options)
        indexes = [one.index for one in sets if one.index]
        output = cls(options, written, (), folder=folder, state=plan.state).made_of(sets)
        if created is not None:
            output = output._replace(created=created.targets(opened.selected))
        if created is not None and created.like is not None:
            check_not_replaced([created.like], "shard_like", output.created)
            output = output.made_of([created.like])
        if options.output is not None and (len(output.shards) > 1 or any(one.index for one in output.sets)):
            what = "{} takes a single input file"
            if output_files is not None:
                what = "{} is one file, but {} files get results"
            hint = say("use {} for several files", option("output_dir"))
            raise UsageError(say(what, option("output"), len(output_files or ())), hint=hint)
        if options.is_elsewhere:
            check_collisions(output.targets, shards, indexes, output.shards)
        else:
            for shard in output.shards:
                require_status(shard.source)
        if plan.state is not None:
            check_state(output.targets, plan.state)
        output.check_existing()
        return output

    @property
    def targets(self) -> list[Path]:
        """Every file that may be written, with the indexes."""
        if self.created:
            return list(self.created)
        indexes = [one.index for one in self.sets if one.index]
        return [self._target(path) for path in (*(shard.name for shard in self.shards), *map(str, indexes))]

    @property
    def states(self) -> list[Path]:
        """The state that is written with the targets, if there is one."""
        return [] if self.state is None else [self.state]

    @property
    def shards(self) -> list[Shard]:
        """Every file of the sets that are written."""
        return [shard for one in self.sets for shard in one.shards]

    @property
    def is_elsewhere(self) -> bool:
        """Whether the inputs are left alone."""
        return self.options.is_elsewhere

    def made_of(self, sets: Sequence[GradientSet]) -> Self:
        """Return the same output with the files of more sets as sources."""
        indexes = [(one.index, None) for one in sets if one.index]
        shards = [(Path(shard.name), shard.source.status) for one in sets for shard in one.shards]
        return self._replace(sources=[*self.sources, *indexes, *shards])

    def files(self, changed: Iterable[Selected], metadata: Metadata | None = None) -> list[NewFile]:
        """The files to be written when those tensors and entries of metadata change; elsewhere, all of them."""
        changes: dict[Shard, int] = {}
        metadata = metadata or {}
        for one in changed:
            for shard, begin, end in one.shard.ranges(one.tensor):
                changes[shard] = changes.get(shard, 0) + end - begin
        return [
            NewFile(shard, shard.size, changes=changes.get(shard, 0), metadata=metadata.get(shard))
            for shard in self.shards
            if self.is_elsewhere or shard in changes or shard in metadata
        ]

    def wrote(self, shards: Collection[Shard]) -> tuple[str, ...]:
        """The paths that were written, as the caller named them, after those files were."""
        if self.is_elsewhere:
            return (str(self.options.output or self.folder),) if shards else ()
        return tuple(one.name for one in self.sets if any(shard in shards for shard in one.shards))

    def check_existing(self) -> None:
        """Raise `BadInputError` where a file would be replaced that is to be kept, or would be mixed with a new set."""
        if self.options.no_clobber:
            there = [Problem("exists", "already exists", str(one)) for one in self.targets if os.path.lexists(one)]
            if there:
                hint = say("leave out {} to replace files that exist", option("no_clobber", True))
                raise BadInputError.from_problems(there, hint)
        if self.created and self.folder is not None and (files := parts_in(self.folder)):
            # With a shard or an index of another set beside it, the new set could not be told from that.
            expected = {path.name for path in self.created}
            others = [one.name for one in files if one.name not in expected]
            if others:
                more = f" and {len(others) - 1:,} more" if others[1:] else ""
                what = f"has {others[0]}{more}, which the new set does not have"
                hint = say("move such files away, or use another {}", option("output_dir"))
                raise BadInputError(what, file=self.folder, code="exists", hint=hint)

    def new_transaction(self) -> Transaction:
        """The transaction that will lock the targets; it does nothing yet."""
        # Of two new sets in one folder, of which neither may see the files of the other, all files differ otherwise.
        common = [self.folder / INDEX_NAME] if self.created and self.folder else []
        targets = dict.fromkeys([*self.targets, *common])
        return Transaction(Targets(targets, self.folder, self.states), fsync=self.options.fsync)

    def check_state_files(self) -> None:
        """Check the state for a call that writes nothing: that its path leads somewhere, and no run changes it."""
        Targets((), self.folder, self.states).close()
        require_finished(state for state in self.states if state.parent.is_dir())

    @contextlib.contextmanager
    def writing(
        self,
        files: Sequence[NewFile],
        indexes: Sequence[SmallFile] | None = None,
        state: SmallFile | None = None,
    ) -> Iterator[Staging | Destination]:
        """Stage files, or have them overwritten; all are put in their places at the end of the block.

        An exception in the block leaves every file as it was. `indexes` are written too; by default a copy of each
        where the output is elsewhere. So is `state`, even where there are no files.

        Raises:
            BadInputError: in place, the header of a file has no room for new metadata.
        """
        files = [_with_metadata(file, in_place=self.options.in_place) for file in files]
        if self.options.dry_run or not (files or (self.is_elsewhere and not self.created) or state):
            yield DISCARD
            return
        transaction = self.transaction
        if transaction is None:
            raise self.refusal or BugError("nothing is locked")
        indexes = self._copied_indexes() if indexes is None else indexes
        small = [*indexes, *([] if state is None else [state])]
        sources = [*self.sources, *((path, stat) for path, stat, _ in small if stat is not None)]
        # Another run may have written them while this one waited for its locks.
        self.check_existing()
        with Commit(transaction, sources) as commit:
            if self.options.in_place and files:
                yield Overwritten(files, commit.overwrite([_changed(transaction, file) for file in files]))
            else:
                yield Staging(self, commit, files)
                ensure(commit.count == len(files), "a new file was not written")
                for path, stat, content in indexes:
                    index = SmallFile(self._target(str(path)), None if self.is_elsewhere else stat, content)
                    commit.stage_content(index, is_new=self.options.no_clobber)
            if state is not None:
                commit.stage_content(state, is_new=state.stat is None)
            commit.put_in_place()

    def _target(self, name: str) -> Path:
        if self.options.output is not None:
            return Path(self.options.output)
        return Path(name) if self.folder is None else self.folder / Path(name).name

    def stage(self, commit: Commit, new: NewFile) -> File:
        """Make a temporary for a new file."""
        original = None if self.is_elsewhere else require_status(new.shard.source)
        target, is_new = self._target(new.shard.name), self.options.no_clobber
        return commit.stage(target, new.size, original, new.ranges, is_new=is_new)

    def _copied_indexes(self) -> list[SmallFile]:
        if not self.is_elsewhere or self.options.output is not None:
            return []
        return [index for one in self.sets if (index := one.read_index()) is not None]


class Staging(NamedTuple):
    """New files to be written, by this process or by others, before they are put in their places."""

    output: Output
    commit: Commit
    files: Sequence[NewFile]

    def write_here(self) -> NewFiles:
        """Stage all files, and return the destination that writes to them."""
        return NewFiles({new.shard: (new, self.stage(new)) for new in self.files})

    def stage(self, new: NewFile) -> File:
        """Make a temporary for a file."""
        return self.output.stage(self.commit, new)


def _with_metadata(file: NewFile, *, in_place: bool) -> NewFile:
    """The file with the header that its new metadata ask for, if there are any."""
    if not file.metadata:
        return file
    new = file.with_header(rewritten(file.shard, file.metadata))
    if in_place and new.shift:
        hint = say("use {} this time, which makes room", option("write", "replace"))
        what = "the header has no room for new metadata in place"
        raise BadInputError(what, file=file.shard.name, code="header", hint=hint)
    return new


def _sets_with(files: Collection[str], sets: Sequence[GradientSet], options: Writing) -> list[GradientSet]:
    """The sets that have one of the files; where the output is elsewhere, only those files of them."""
    found = [one for one in sets if any(shard.name in files for shard in one.shards)]
    if not options.is_elsewhere:
        return found
    own = [tuple(shard for shard in one.shards if shard.name in files) for one in found]
    # A single file needs no index.
    indexes = [one.index if options.output is None else None for one in found]
    return [replace(one, shards=shards, index=index) for one, shards, index in zip(found, own, indexes, strict=True)]


def _changed(transaction: Transaction, file: NewFile) -> Target:
    """Return what is changed in place for a file, which must still be the one that was read."""
    (folder, name), status = transaction.targets.locate(Path(file.shard.name)), require_status(file.shard.source)
    return Target(File(folder, name, status.st_dev, status.st_ino), status, file.changes)
