"""Tells which files may be half changed, and finds the folders that a path is about."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import SystemRefusedError, os_errors_about, unfinished
from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.fs import Folder
from gradtool.store.transaction.files import marker_of
from gradtool.store.transaction.logfiles import is_trusted, logs_in, read_log
from gradtool.store.transaction.targets import check_links_of
from gradtool.wording import call, say

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gradtool.store.transaction.log import Log


class Scope(NamedTuple):
    """What a path is about: one file of a folder or, without a name, all of them."""

    folder: Path
    name: str | None

    @classmethod
    def of(cls, path: str) -> list[Self]:
        """The scopes of a path, which need not exist: its own, and those that links in a folder lead to.

        An index is about all shards beside it. Links of other users count only if they lead to files of theirs; if such
        a link leads the path itself elsewhere, that is a `SystemRefusedError`.
        """
        check_links_of(path)
        real = Path(os.path.realpath(path))
        # Path's own methods raise for impossible names and without permission.
        if not (os.path.isdir(real) or path.endswith((os.sep, INDEX_SUFFIX))):  # noqa: PTH112
            return [cls(real.parent, real.name)]
        folder = Path(path).parent if path.endswith(INDEX_SUFFIX) else real
        scopes = [cls(Path(os.path.realpath(folder)), None)]
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            links = sorted(entry.path for entry in entries if entry.is_symlink())
            for link in links:
                target = Path(os.path.realpath(link))
                if link.endswith((".safetensors", INDEX_SUFFIX)) and os.path.lexists(target):
                    with contextlib.suppress(SystemRefusedError):
                        check_links_of(link)
                        scopes.append(cls(target.parent, target.name))
        return scopes


def require_finished_in(folder: Folder, files: Mapping[str, Path], own: str | None) -> None:
    """Raise `SystemRefusedError` if a file of the folder may be half changed; `files` are by name, as they were given.

    Those of the run `own` do not count.
    """
    for log in logs_about(folder, files):
        touched = [name for name in log.names & files.keys() if could_change(log, folder, name)]
        if touched and log.run != own:
            _require_finished(log, files[min(touched)])


def require_finished_at(scope: Scope) -> None:
    """As `require_finished_in`, for a path that could not be opened."""
    if not os.path.isdir(scope.folder):  # noqa: PTH112 - Path's own raises without permission
        return
    with os_errors_about(scope.folder), Folder.at(scope.folder) as folder:
        for log in logs_about(folder, [] if scope.name is None else [scope.name]):
            if is_about(log, folder, scope.name):
                _require_finished(log, scope.folder if scope.name is None else scope.folder / scope.name)


def could_change(log: Log, folder: Folder, name: str) -> bool:
    """Whether the user of a log may change a file that it names; if not, the log is forged and ignored.

    In a sticky folder, only a file's owner, root and the folder's owner may replace it.
    """
    if is_trusted(log.owner, folder):
        return True
    status = folder.status(name)
    return status is None or status.st_uid == log.owner or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def is_about(log: Log, folder: Folder, name: str | None) -> bool:
    """Whether a log is about a file, or any file of the folder, that its user may change."""
    names = log.names if name is None else log.names & {name}
    return (name is None and is_trusted(log.owner, folder)) or any(could_change(log, folder, one) for one in names)


def home_of(log: Log) -> Log | None:
    """The log in the run's home, which says how far the run got; None if it has ended."""
    if log.path == log.home:
        return log
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), Folder.at(log.home.parent) as folder:
        home = read_log(folder, log.home.name)
        # A pointer to a pointer is forged, and another user's log is another run's.
        if home is not None and home.path == home.home and home.owner == log.owner:
            return home
    if not log.path.exists():
        return None
    what = f"belongs to an unfinished run whose log {log.home} is missing"
    hint = f"restore that log, or delete this file and {log.run}-* beside it to keep the data as it is"
    raise unfinished(what, log.path, hint)


def logs_about(folder: Folder, names: Iterable[str]) -> list[Log]:
    """The logs in a folder; if it cannot be listed, those that have a marker for one of the names."""
    try:
        return logs_in(folder)
    except SystemRefusedError as error:
        if error.errno != errno.EACCES:
            raise
    marked = [log for name in names if (log := read_log(folder, marker_of(name))) is not None]
    # A user may have deleted the log itself.
    return [log for log in marked if folder.status(log.path.name) is not None]


def _require_finished(log: Log, file: Path) -> None:
    home = home_of(log)
    if home is not None and home.is_unfinished:
        what = f"may be half changed by a run ({home.who}) that is still writing, or crashed"
        hint = say(
            "wait for it, run {}, or use {} to read the file as it is",
            call("recover", str(file)),
            call("norm", ignore_journal=True),
        )
        raise unfinished(what, file, hint)
