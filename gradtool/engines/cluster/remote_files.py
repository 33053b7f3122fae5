"""New files that workers write.

The command makes a temporary for each attempt, because a task may run twice, and a worker that was taken for dead may
go on: so no attempt touches what another has written. What is given up is removed, and a worker makes no files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import UsageError, changed_meanwhile, option, os_errors_about, say
from gradtool.store import fs
from gradtool.store.fs import File, Folder
from gradtool.store.io.destination import NewFile, WrittenFiles
from gradtool.store.source import Source, require_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gradtool.store.format.tensors import Shard
    from gradtool.store.transaction.output import Staging

# Seconds. A shared file system may show late what another machine has made or replaced.
PAUSES = (0.05, 0.2, 0.5, 1.0)
_LATE = (errno.ENOENT, errno.ESTALE)
# Pauses of this process for files that were late, until it tells the command.
waits: list[float] = []


class BuildRequest(NamedTuple):
    """A new file, and the temporary that a worker is to write it to."""

    new: NewFile
    path: Path
    inode: int
    fsync: bool

    @contextlib.contextmanager
    def opened(self) -> Iterator[File]:
        """Open the folder of the temporary, and sync the temporary at the end.

        Raises:
            SystemRefusedError: the run has ended, or has given up this attempt.
        """
        with os_errors_about(self.path):
            try:
                source = retry_until_visible(self.path, lambda source: source.inode == self.inode)
            except (FileNotFoundError, NotADirectoryError):
                source = None
            if source is None:
                raise changed_meanwhile(self.path)
            with Folder.at(self.path.parent) as folder:
                # Devices have other numbers on other machines.
                yield (file := File(folder, self.path.name, require_status(source).st_dev, self.inode))
                with fs.closing(file.open(os.O_RDONLY)) as fd:
                    if self.fsync:
                        fs.sync(fd)


class RemoteFiles(WrittenFiles):
    """New files that workers write; the last attempt at each becomes the file when the run is committed."""

    def __init__(self, staging: Staging) -> None:
        if any(gradset.split for gradset in staging.output.sets):
            hint = say("use {}", option("engine", "threads"))
            raise UsageError("workers cannot write tensors that are split over files", hint=hint)
        super().__init__(staging.files)
        self._staging = staging
        self._attempts: dict[Shard, File] = {}

    def request(self, shard: Shard) -> BuildRequest:
        """Make a temporary for an attempt at a file, and give up an earlier attempt."""
        if shard in self._attempts:
            self._staging.commit.give_up(self._attempts[shard])
        new = self.files[shard]
        file = self._attempts[shard] = self._staging.stage(new)
        return BuildRequest(new, file.path, file.inode, self._staging.output.options.fsync)


def retry_until_visible(path: Path, is_expected: Callable[[Source], bool]) -> Source | None:
    """Look at a path until it is the expected file; return its source, or None if it stays another file.

    Raises:
        OSError: it cannot be opened, or is still missing after all pauses.
    """
    for pause in (*PAUSES, None):
        try:
            with contextlib.closing(Source.kind_of(path).at(path)) as reader:
                if is_expected(reader.source):
                    return reader.source
        except OSError as error:
            if error.errno not in _LATE or pause is None:
                raise
        if pause is not None:
            waits.append(pause)
            time.sleep(pause)
    return None
