"""The options of every operation that writes, and whether they fit together."""

from __future__ import annotations

import os
from typing import NamedTuple

from gradtool.errors import UsageError
from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.format.paths import check_output_path


class OutputOptions(NamedTuple):
    """Where a call writes, to one `file` or into a `folder` or over its inputs, and how."""

    file: str | None = None
    folder: str | None = None
    no_clobber: bool = False
    dry_run: bool = False
    in_place: bool = False
    fsync: bool = True
    lock_timeout: float = 0.0
    # Other processes build new files.
    by_workers: bool = False
    # A small file that is written together with the sets, and says what a later call must know of this one.
    state: str | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether the inputs are left alone."""
        return self.file is not None or self.folder is not None

    @property
    def only_reads(self) -> bool:
        """Whether no input is written."""
        return self.dry_run or self.is_elsewhere

    @property
    def keeps_state(self) -> bool:
        """Whether the call reads a state and writes it anew."""
        return self.state is not None and not self.dry_run

    def check(self) -> None:
        """Check whatever does not depend on the inputs.

        Raises:
            UsageError: the options contradict each other, or cannot be meant.
            BadInputError: an output is a URL, or a path that the shell should have expanded.
        """
        if self.file == "-":
            raise UsageError("--output - is not supported: results are files, not streams. Use ./- for a file named -")
        if self.folder == "-":
            raise UsageError(
                "--output-dir - is not supported: results are files, not streams. Use ./- for a folder named -"
            )
        for path in filter(None, (self.file, self.folder, self.state)):
            check_output_path(path)
        if self.in_place and self.is_elsewhere:
            raise UsageError("--write inplace changes files that are there; leave out --output and --output-dir")
        if self.file is not None and self.folder is not None:
            raise UsageError("--output and --output-dir exclude each other")
        if self.no_clobber and not self.is_elsewhere:
            raise UsageError("--no-clobber is about the files of --output and --output-dir; give one of these")
        if self.file is not None and self.file.endswith((os.sep, INDEX_SUFFIX)):
            raise UsageError(f"--output {self.file} names a folder or an index, and not a file; use --output-dir")
        # Not Path's questions, which raise where there is no permission.
        there, is_folder = os.path.lexists(self.folder or ""), os.path.isdir(self.folder or "")  # noqa: PTH112
        if there and not is_folder:
            raise UsageError(f"--output-dir {self.folder} is no folder")
