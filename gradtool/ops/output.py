"""Where a result goes: over its inputs, to one file, into a folder, or nowhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

from gradtool.errors import UsageError, from_os_error
from gradtool.ops import arguments
from gradtool.ops.passes import Session, rewrite
from gradtool.store.commit import Replacement, refuse_collisions
from gradtool.store.header import read_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradtool.ops.measurement import Measurement
    from gradtool.ops.passes import Change
    from gradtool.store.gradset import Selected
    from gradtool.store.header import Shard


@dataclass(frozen=True)
class Output:
    """The options that every writing operation has, checked against its inputs."""

    file: str | None
    folder: str | None
    dry_run: bool
    fsync: bool

    @classmethod
    def of(cls, session: Session, file: Any, folder: Any, *, dry_run: bool, fsync: bool) -> Self:
        """The output of a call, or `UsageError` where the options do not fit its inputs; before any work is done."""
        output = cls(
            arguments.optional_path("--output", file), arguments.optional_path("--output-dir", folder), dry_run, fsync
        )
        if output.file is not None and output.folder is not None:
            raise UsageError("--output and --output-dir exclude each other")
        if output.file is not None and output.file.endswith(os.sep):
            raise UsageError(f"--output {output.file} names a folder; use --output-dir")
        if output.file is not None and (len(session.shards) > 1 or session.sets[0].index):
            raise UsageError("--output takes a single input file; use --output-dir for several")
        # Not Path's questions, which raise where there is no permission.
        there, is_folder = os.path.lexists(output.folder or ""), os.path.isdir(output.folder or "")  # noqa: PTH112
        if there and not is_folder:
            raise UsageError(f"--output-dir {output.folder} is no folder")
        if output._is_elsewhere:
            copies = [output._target(shard.path) for shard in session.shards]
            copies += [output._target(one.index) for one in session.sets if one.index]
            refuse_collisions(copies, session.shards)
        return output

    def write(
        self,
        session: Session,
        changed: Sequence[Selected],
        written: Measurement,
        change: Change,
        verify: Callable[[], None],
    ) -> list[Shard]:
        """Change tensors, have the result verified, and put every file in its place; the files that were written.

        `written` collects the sums of the changed tensors. What `verify` raises leaves every file as it was.
        """
        if self.dry_run:
            rewrite(session, changed, written, change, {})
            verify()
            return []
        # Elsewhere every file must arrive; in place, a file that does not change is not touched.
        touched = {one.shard for one in changed}
        shards = [shard for shard in session.shards if self._is_elsewhere or shard in touched]
        with Replacement(fsync=self.fsync) as replacement:
            self._make_folder()
            destinations = {shard: self._stage(replacement, shard) for shard in shards}
            rewrite(session, changed, written, change, destinations)
            verify()
            self._copy_indexes(session, replacement)
            began = perf_counter()
            replacement.commit()
            session.commit_seconds = perf_counter() - began
        return shards

    @property
    def _is_elsewhere(self) -> bool:
        return self.file is not None or self.folder is not None

    def _target(self, path: Path) -> Path:
        if self.file is not None:
            return Path(self.file)
        return path if self.folder is None else Path(self.folder) / path.name

    def _stage(self, replacement: Replacement, shard: Shard) -> Path:
        original = None if self._is_elsewhere else shard
        return replacement.stage(self._target(shard.path), shard.size, original)

    def _make_folder(self) -> None:
        if self.folder is not None:
            try:
                Path(self.folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise from_os_error(error, self.folder) from error

    def _copy_indexes(self, session: Session, replacement: Replacement) -> None:
        for index in (one.index for one in session.sets if one.index and self.folder is not None):
            content = read_regular(index)
            staged = replacement.stage(self._target(index), len(content))
            try:
                staged.write_bytes(content)
            except OSError as error:
                raise from_os_error(error, self._target(index)) from error
