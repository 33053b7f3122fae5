"""Where a result goes: over its inputs, to one file, into a folder, or nowhere."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gradtool.errors import UsageError, from_os_error
from gradtool.ops import arguments
from gradtool.store.commit import Replacement, refuse_collisions
from gradtool.store.header import read_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from gradtool.ops.passes import Session
    from gradtool.store.gradset import GradientSet
    from gradtool.store.header import Shard

    # Fills the new files, of which it is given the temporaries; given none, does all the work and writes nothing.
    Fill = Callable[[Mapping[Shard, Path]], None]
    # The content of an index, as the new files want it.
    Reindex = Callable[[GradientSet, bytes], bytes]


class NewFile(NamedTuple):
    """A file that takes a shard's place, and the ranges of it that will be written: all, unless there are to be holes.

    `replaces` says that the shard is there already.
    """

    shard: Shard
    size: int
    ranges: Sequence[tuple[int, int]] | None = None
    replaces: bool = True


@dataclass(frozen=True)
class Output:
    """The options that every writing operation has, checked against its inputs; `sets` are those it writes."""

    sets: Sequence[GradientSet]
    file: str | None
    folder: str | None
    dry_run: bool
    fsync: bool

    @classmethod
    def of(
        cls,
        session: Session,
        file: Any,
        folder: Any,
        *,
        dry_run: bool,
        fsync: bool,
        sets: Sequence[GradientSet] | None = None,
    ) -> Self:
        """The output of a call, or `UsageError` where the options do not fit its inputs; before any work is done."""
        output = cls(
            session.sets if sets is None else sets,
            arguments.optional_path("--output", file),
            arguments.optional_path("--output-dir", folder),
            dry_run,
            fsync,
        )
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
            copies = [output._target(shard.path) for shard in output.shards]
            copies += [output._target(one.index) for one in output.sets if one.index]
            refuse_collisions(copies, session.shards, [one.index for one in session.sets if one.index])
        return output

    @property
    def shards(self) -> list[Shard]:
        """Every file of the sets that are written."""
        return [shard for one in self.sets for shard in one.shards]

    @property
    def is_elsewhere(self) -> bool:
        """Whether the inputs are left alone."""
        return self.file is not None or self.folder is not None

    def arriving(self, changed: Iterable[Shard]) -> list[NewFile]:
        """New files for the changed shards; elsewhere for all, which must arrive there."""
        touched = set(changed)
        return [NewFile(shard, shard.size) for shard in self.shards if self.is_elsewhere or shard in touched]

    def write(
        self,
        session: Session,
        files: Sequence[NewFile],
        fill: Fill,
        verify: Callable[[], None] = lambda: None,
        reindex: Reindex | None = None,
    ) -> int:
        """Have new files filled and verified, and put each in its place; the number of files that were written.

        What `fill` and `verify` raise leaves every file as it was.
        """
        if self.dry_run:
            fill({})
            verify()
            return 0
        with self._folder_made(), Replacement(fsync=self.fsync) as replacement:
            fill({file.shard: self._stage(replacement, file) for file in files})
            verify()
            self._write_indexes(replacement, reindex)
            began = perf_counter()
            replacement.commit()
            session.commit_seconds = perf_counter() - began
        return len(files)

    def _target(self, path: Path) -> Path:
        if self.file is not None:
            return Path(self.file)
        return path if self.folder is None else Path(self.folder) / path.name

    def _stage(self, replacement: Replacement, file: NewFile) -> Path:
        original = None if self.is_elsewhere or not file.replaces else file.shard.stat
        target = self._target(file.shard.path)
        return replacement.stage(target, file.size, original, file.ranges, is_new=not file.replaces)

    @contextlib.contextmanager
    def _folder_made(self) -> Iterator[None]:
        """Make the folder that is written to; where that fails in the end, what was made goes again."""
        made: list[Path] = []
        try:
            if self.folder is not None:
                folder = Path(self.folder)
                missing = [one for one in (*reversed(folder.parents), folder) if not os.path.lexists(one)]
                try:
                    for one in missing:
                        one.mkdir(exist_ok=True)
                        made.append(one)
                except OSError as error:
                    raise from_os_error(error, self.folder) from error
            yield
        except BaseException:
            for one in reversed(made):
                with contextlib.suppress(OSError):
                    one.rmdir()
            raise

    def _write_indexes(self, replacement: Replacement, reindex: Reindex | None) -> None:
        for one in self.sets:
            if one.index is None or (self.file is not None) or not (self.is_elsewhere or reindex):
                continue
            status, content = read_regular(one.index)
            new = content if reindex is None else reindex(one, content)
            if new == content and not self.is_elsewhere:
                continue
            target = self._target(one.index)
            staged = replacement.stage(target, len(new), None if self.is_elsewhere else status)
            try:
                staged.write_bytes(new)
            except OSError as error:
                raise from_os_error(error, target) from error
