"""Where a call writes: over its inputs, into them, to one file, into a folder, or nowhere."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import BadInputError, BugError, Problem, SystemRefusedError, UsageError, ensure, option, say
from gradtool.store.format.gradset import parts_in
from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.format.layout import SPARE, rewritten
from gradtool.store.format.paths import check_output_path
from gradtool.store.fs import File
from gradtool.store.io.destination import DISCARD, NewFile, Overwritten
from gradtool.store.source import SmallFile, require_status
from gradtool.store.transaction.commit import Commit, Target

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from gradtool.options import WriteOptions
    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.format.tensors import Shard
    from gradtool.store.io.destination import Destination
    from gradtool.store.transaction.inputs import OpenSets, WritePlan
    from gradtool.store.transaction.once import Once
    from gradtool.store.transaction.staging import Source
    from gradtool.store.transaction.transaction import Transaction

    # For each file whose metadata change, the entries that get a new text, or none.
    Metadata = Mapping[Shard, Mapping[str, str | None]]


class Output(NamedTuple):
    """The destination of a call: the sets that are written, or the files of a set that is `created` elsewhere.

    The `sources` are all files that are read, which decide who may read new files. `folder` is made if it does not
    exist. `transaction` holds the locks, unless there was a `refusal`. A state of the plan is written with the sets.
    All files of the sets record the ID `once`.
    """

    options: WriteOptions
    sets: Sequence[GradientSet]
    sources: Sequence[Source]
    created: Sequence[Path] = ()
    folder: Path | None = None
    transaction: Transaction | None = None
    refusal: SystemRefusedError | None = None
    states: Sequence[Path] = ()
    once: Once | None = None

    @classmethod
    def from_options(cls, options: WriteOptions, opened: OpenSets, plan: WritePlan) -> Self:
        """Return the output of a call to open sets, or to a new set.

        Raises:
            UsageError: the options do not fit the inputs.
            BadInputError: the new set cannot be sharded as asked, or its folder has other files; or an output is a URL,
                or a path that the shell should have expanded.
        """
        check_options(options, plan.state)
        output_files, folder = plan.output_files, None if options.output_dir is None else Path(options.output_dir)
        sets = opened.sets[: plan.writes] if output_files is None else _sets_with(output_files, opened.sets, options)
        output = cls(options, sets, (), folder=folder, states=[plan.state] if plan.state else (), once=plan.once)
        output = output.with_sources(opened.sets)
        if plan.created is not None:
            output = output._replace(created=plan.created.targets(opened.in_file_order))
            if plan.created.like is not None:
                check_not_replaced([plan.created.like], "shard_like", output.created)
                output = output.with_sources([plan.created.like])
        if options.output is not None and (len(output.shards) > 1 or any(gradset.index for gradset in sets)):
            message = "{} takes a single input file"
            if output_files is not None:
                message = "{} is one file, but {} files get results"
            hint = say("use {} for several files", option("output_dir"))
            raise UsageError(say(message, option("output"), len(output_files or ())), hint=hint)
        if options.is_elsewhere:
            indexes = [gradset.index for gradset in opened.sets if gradset.index]
            check_collisions(output.targets, opened.shards, indexes, output.shards)
        else:
            for shard in output.shards:
                require_status(shard.source)
        if plan.state is not None and os.path.realpath(plan.state) in map(os.path.realpath, output.targets):
            message = say("{} is a file that the gradients are written to", option("state", plan.state))
            raise UsageError(message, hint="use another file for the state")
        output.check_existing()
        return output

    @property
    def targets(self) -> list[Path]:
        """Every file that may be written, with the indexes."""
        if self.created:
            return list(self.created)
        indexes = [str(gradset.index) for gradset in self.sets if gradset.index]
        return [self.target_of(path) for path in (*(shard.name for shard in self.shards), *indexes)]

    @property
    def shards(self) -> list[Shard]:
        """Every file of the sets that are written."""
        return [shard for gradset in self.sets for shard in gradset.shards]

    def target_of(self, path: str) -> Path:
        """Return the file that the result for an input is written to."""
        if self.options.output is not None:
            return Path(self.options.output)
        return Path(path) if self.folder is None else self.folder / Path(path).name

    def with_sources(self, sets: Sequence[GradientSet]) -> Self:
        """Return the same output with the files of more sets as sources."""
        indexes = [(gradset.index, None) for gradset in sets if gradset.index]
        shards = [(Path(shard.name), shard.source.status) for gradset in sets for shard in gradset.shards]
        return self._replace(sources=[*self.sources, *indexes, *shards])

    def files(self, changed: Iterable[Selected], metadata: Metadata | None = None) -> list[NewFile]:
        """List the files to be written when those tensors and entries of metadata change; elsewhere, all of them.

        An ID changes the metadata of all files, so that it is found whichever of them a later call names.
        """
        changes: dict[Shard, int] = {}
        metadata = metadata or {}
        if self.once is not None:
            metadata = {shard: {**metadata.get(shard, {}), **self.once.entry(shard)} for shard in self.shards}
        for source, tensor in changed:
            for shard, begin, end in source.ranges(tensor):
                changes[shard] = changes.get(shard, 0) + end - begin
        return [
            NewFile(shard, shard.size, changes=changes.get(shard, 0), metadata=metadata.get(shard))
            for shard in self.shards
            if self.options.is_elsewhere or shard in changes or shard in metadata
        ]

    def is_done(self, state_ids: Sequence[str] | None = None) -> bool:
        """Check whether the files, and the state with those IDs, say that an earlier call did the work of this one.

        Raises:
            BadInputError: only some of them say so.
        """
        if self.once is None:
            return False
        ids = {shard.name: self.once.ids_in(shard) for shard in self.shards}
        return self.once.is_recorded(ids if state_ids is None else {**ids, str(self.states[0]): state_ids})

    def wrote(self, shards: Collection[Shard]) -> tuple[str, ...]:
        """List the paths that were written, as the caller named them, after those files were."""
        if self.options.is_elsewhere:
            return (str(self.options.output or self.folder),) if shards else ()
        return tuple(gradset.name for gradset in self.sets if any(shard in shards for shard in gradset.shards))

    def check_existing(self) -> None:
        """Raise `BadInputError` if `no_clobber` forbids to replace a file, or a new set would be mixed with others."""
        if self.options.no_clobber:
            problems = [
                Problem("exists", "already exists", str(target)) for target in self.targets if os.path.lexists(target)
            ]
            if problems:
                hint = say("leave out {} to replace files that exist", option("no_clobber", True))
                raise BadInputError.from_problems(problems, hint)
        if self.created and self.folder is not None and (files := parts_in(self.folder)):
            # With a shard or an index of another set beside it, the new set could not be told from that.
            expected = {path.name for path in self.created}
            names = [path.name for path in files if path.name not in expected]
            if names:
                more = f" and {len(names) - 1:,} more" if names[1:] else ""
                message = f"has {names[0]}{more}, which the new set does not have"
                hint = say("move such files away, or use another {}", option("output_dir"))
                raise BadInputError(message, file=self.folder, code="exists", hint=hint)

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
        is_elsewhere = self.options.is_elsewhere
        files = [_with_new_header(file, self) if file.metadata else file for file in files]
        if self.options.dry_run or not (files or (is_elsewhere and not self.created) or state):
            yield DISCARD
            return
        transaction = self.transaction
        if transaction is None:
            with self._explained(files):
                raise self.refusal or BugError("nothing is locked")
        if indexes is None:
            sets = self.sets if is_elsewhere and self.options.output is None else ()
            indexes = [index for gradset in sets if (index := gradset.read_index()) is not None]
        small_files = [*indexes, *([] if state is None else [state])]
        sources = [*self.sources, *((path, status) for path, status, _ in small_files if status is not None)]
        # Another run may have written them while this run waited for its locks.
        self.check_existing()
        with Commit(transaction, sources) as commit, self._explained(files, commit):
            if self.options.in_place and files:
                yield Overwritten(files, commit.overwrite([_target(transaction, file) for file in files]))
            else:
                yield Staging(self, commit, files)
                ensure(len(commit.staged) == len(files), "a new file was not written")
                for path, status, content in indexes:
                    index = SmallFile(self.target_of(str(path)), None if is_elsewhere else status, content)
                    commit.stage_content(index, is_new=self.options.no_clobber)
            if state is not None:
                commit.stage_content(state, is_new=state.stat is None)
            commit.put_in_place()

    @contextlib.contextmanager
    def _explained(self, files: Sequence[NewFile], commit: Commit | None = None) -> Iterator[None]:
        """Add to an error of writing files what the system lacks, and what to do."""
        try:
            yield
        except SystemRefusedError as error:
            from gradtool.store.transaction.refusals import explain  # only needed for the error

            explain(error, self, files, [] if commit is None else commit.staged)
            raise


class Staging(NamedTuple):
    """New files to be written, by this process or by others, before they are put in their places."""

    output: Output
    commit: Commit
    files: Sequence[NewFile]

    def stage(self, new: NewFile) -> File:
        """Make a temporary for a file."""
        options, shard = self.output.options, new.shard
        original = None if options.is_elsewhere else require_status(shard.source)
        target = self.output.target_of(shard.name)
        return self.commit.stage(target, new.size, original, new.ranges, is_new=options.no_clobber)


def _with_new_header(file: NewFile, output: Output) -> NewFile:
    spare = SPARE if output.once is None else output.once.spare
    new = file.with_header(rewritten(file.shard, file.metadata or {}, spare=spare))
    if output.options.in_place and new.shift:
        hint = say("use {} this time, which makes room", option("write", "replace"))
        message = "the header has no room for new metadata in place"
        raise BadInputError(message, file=file.shard.name, code="header", hint=hint)
    return new


def _sets_with(files: Collection[str], sets: Sequence[GradientSet], options: WriteOptions) -> list[GradientSet]:
    """Return the sets that have some of the files; where the output is elsewhere, only those files of them."""
    sets = [gradset for gradset in sets if any(shard.name in files for shard in gradset.shards)]
    if not options.is_elsewhere:
        return sets
    return [
        replace(
            gradset,
            shards=tuple(shard for shard in gradset.shards if shard.name in files),
            # A single file needs no index.
            index=gradset.index if options.output is None else None,
        )
        for gradset in sets
    ]


def _target(transaction: Transaction, file: NewFile) -> Target:
    """Return what is changed in place for a file, which must still be the file that was read."""
    (folder, name), status = transaction.targets.locate(Path(file.shard.name)), require_status(file.shard.source)
    return Target(File(folder, name, status.st_dev, status.st_ino), status, file.changes)


def check_options(options: WriteOptions, state: Path | None) -> None:
    """Check what does not depend on the inputs.

    Raises:
        UsageError: the options contradict each other, or make no sense.
        BadInputError: an output is a URL, or a path that the shell should have expanded.
    """
    output, output_dir = options.output, options.output_dir
    names = option("output"), option("output_dir")
    for name in ("output", "output_dir"):
        if getattr(options, name) == "-":
            message = say("{} is not supported: results are files, not streams", option(name, "-"))
            raise UsageError(message, hint="use ./- for a file or folder named -")
    for path in (output, output_dir, state):
        if path is not None:
            check_output_path(os.fspath(path))
    if options.in_place and options.is_elsewhere:
        raise UsageError(say("{} cannot be combined with {} or {}", option("write", "inplace"), *names))
    if output is not None and output_dir is not None:
        raise UsageError(say("{} and {} cannot be combined", *names))
    if options.no_clobber and not options.is_elsewhere:
        raise UsageError(say("{} requires {} or {}", option("no_clobber", True), *names))
    if output is not None and os.fspath(output).endswith((os.sep, INDEX_SUFFIX)):
        message = say("{} is a folder or an index, not a file", option("output", output))
        raise UsageError(message, hint=say("use {}", names[1]))
    # Not Path's questions, which raise where there is no permission.
    if output_dir is not None and os.path.lexists(output_dir) and not os.path.isdir(output_dir):  # noqa: PTH112
        raise UsageError(say("{} is not a folder", option("output_dir", output_dir)))


def check_collisions(
    targets: Sequence[Path], shards: Sequence[Shard], indexes: Iterable[Path] = (), originals: Iterable[Shard] = ()
) -> None:
    """Raise `UsageError` if two files would be written to the same target, or a target is an input or no regular file.

    `originals` are the inputs that would be replaced without an output.
    """
    inputs, replaceable = ({shard.source.identity for shard in each} for each in (shards, originals))
    for index in indexes:
        with contextlib.suppress(OSError):
            inputs.add((index.stat().st_dev, index.stat().st_ino))
    seen: set[str] = set()
    for target in targets:
        real = os.path.realpath(target)
        if real in seen:
            message, hint = "two inputs would be written to this file", say("use one {} for each", option("output_dir"))
            raise UsageError(message, file=target, hint=hint)
        seen.add(real)
        try:
            status = target.stat()
        except OSError:
            continue  # It does not exist, or writing will fail with the reason.
        identity = status.st_dev, status.st_ino
        if identity in inputs:
            advice = "leave out the output option to replace it" if identity in replaceable else "use another output"
            raise UsageError("is an input", file=target, hint=advice)
        if stat.S_ISDIR(status.st_mode):
            raise UsageError("is a folder", file=target, hint=say("use {} to write into it", option("output_dir")))
        if not stat.S_ISREG(status.st_mode):
            hint = say("use {} to write nothing", option("dry_run", True))
            raise UsageError("is not a regular file", file=target, hint=hint)


def check_not_replaced(sets: Sequence[GradientSet], name: str, targets: Sequence[Path]) -> None:
    """Raise `UsageError` for a target that is a file of sets that are only read, and that an option names."""
    names = [shard.name for gradset in sets for shard in gradset.shards]
    indexes = [str(gradset.index) for gradset in sets if gradset.index]
    paths = {os.path.realpath(path) for path in (*names, *indexes)}
    for target in targets:
        if os.path.realpath(target) in paths:
            message = say("is a file of {}, which would be replaced", option(name))
            raise UsageError(message, file=target, hint="write to another file")
