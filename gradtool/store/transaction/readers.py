"""Keeps readers away from files that may be half changed; imports what knows logs only where there are any."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from gradtool.errors import SystemRefusedError, os_errors_about
from gradtool.store.fs import Folder
from gradtool.store.transaction.files import files_of_runs

if TYPE_CHECKING:
    from collections.abc import Iterable


def require_finished(paths: Iterable[Path], run: str | None = None) -> None:
    """Raise `SystemRefusedError` if one of the files may be half changed, by a run other than `run`."""
    names: dict[Path, dict[str, Path]] = {}
    parents: dict[Path, Path] = {}
    for path in paths:
        parent, name = _real(path, parents)
        names.setdefault(parent, {})[name] = path
    for parent, files in names.items():
        with os_errors_about(parent), Folder.at(parent) as folder:
            if _may_have_logs(folder):
                from gradtool.store.transaction.runs import require_finished_in

                require_finished_in(folder, files, run)


def _real(path: Path, parents: dict[Path, Path]) -> tuple[Path, str]:
    """The folder and the name of a file, links followed; `parents` are the folders that were looked up already."""
    if os.path.islink(path):  # noqa: PTH114 - Path's own may raise
        real = Path(os.path.realpath(path))
        return real.parent, real.name
    parent = path.parent
    if parent not in parents:
        parents[parent] = Path(os.path.realpath(parent))
    return parents[parent], path.name


def _may_have_logs(folder: Folder) -> bool:
    """Whether a folder has files of runs, or cannot be listed."""
    try:
        return bool(files_of_runs(folder))
    except SystemRefusedError as error:
        if error.errno != errno.EACCES:
            raise
        return True
