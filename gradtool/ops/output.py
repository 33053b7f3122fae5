"""Where a result goes: over its inputs, to one file, into a folder, or nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradtool.errors import UsageError, from_os_error
from gradtool.ops.passes import Measurement, Session, rewrite
from gradtool.store.commit import Replacement, refuse_collisions

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from gradtool.ops.passes import Change
    from gradtool.store.gradset import Selected
    from gradtool.store.header import Shard


@dataclass(frozen=True)
class Output:
    """The options that every writing operation has."""

    file: str | os.PathLike[str] | None = None
    folder: str | os.PathLike[str] | None = None
    dry_run: bool = False
    fsync: bool = True

    def check(self, session: Session) -> None:
        """Raise `UsageError` where the options do not fit the inputs, before any work is done."""
        if self.file is not None and self.folder is not None:
            raise UsageError("--output and --output-dir exclude each other")
        if self.file is not None and (len(session.shards) > 1 or session.sets[0].index):
            raise UsageError("--output takes a single input file; use --output-dir for several")
        if self.file is not None and Path(self.file).is_dir():
            raise UsageError(f"--output {self.file} is a folder; use --output-dir")
        if self.folder is not None and Path(self.folder).exists() and not Path(self.folder).is_dir():
            raise UsageError(f"--output-dir {self.folder} is no folder")
        if self._is_elsewhere:
            copies = [self._target(shard.path) for shard in session.shards]
            copies += [self._target(one.index) for one in session.sets if one.index]
            refuse_collisions(copies, session.shards)

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
            replacement.commit()
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
            try:
                content = index.read_bytes()
                replacement.stage(self._target(index), len(content)).write_bytes(content)
            except OSError as error:
                raise from_os_error(error, index) from error
