"""What keeps readers from files that are half changed, and what a path is about when it cannot be opened for that."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import SystemRefusedError, from_os_error
from gradtool.store.fs import Folder
from gradtool.store.transaction.log import is_trusted, logs_in, marker_of, read_log
from gradtool.store.transaction.targets import refuse_trap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradtool.store.transaction.log import Log

_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"


class Place(NamedTuple):
    """What a path is about: a file in a folder, or all that is in it."""

    folder: Path
    name: str | None

    @classmethod
    def of(cls, path: str) -> list[Self]:
        """The places of a path, which need not be there: more than one where there are links to elsewhere in a folder.

        An index is about all shards beside it. What is written to by way of a place is not what a link of another user
        leads to, unless that is that one's own.

        Raises:
            SystemRefusedError: the path itself is led there by such a link.
        """
        refuse_trap(path)
        real = Path(os.path.realpath(path))
        # Not Path's own, which raises for names that cannot be and where there is no permission.
        if not (os.path.isdir(real) or path.endswith((os.sep, _INDEX))):  # noqa: PTH112
            return [cls(real.parent, real.name)]
        folder = Path(os.path.abspath(path)).parent if path.endswith(_INDEX) else real  # noqa: PTH100
        places = [cls(Path(os.path.realpath(folder)), None)]
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            links = sorted(entry.path for entry in entries if entry.is_symlink())
            for link in links:
                target = Path(os.path.realpath(link))
                if link.endswith((_SUFFIX, _INDEX)) and os.path.lexists(target):
                    with contextlib.suppress(SystemRefusedError):
                        refuse_trap(link)
                        places.append(cls(target.parent, target.name))
        return places


def refuse_unfinished(paths: Iterable[Path], own: str | None = None) -> None:
    """Raise `SystemRefusedError` if one of the files may be half changed, by a run that is at it or one that crashed.

    The run called `own` is no hindrance.
    """
    names: dict[Path, dict[str, Path]] = {}
    for path in paths:
        real = Path(os.path.realpath(path))
        names.setdefault(real.parent, {})[real.name] = path
    for path, files in names.items():
        with _opened(path) as folder:
            for log in _logs_about(folder, files):
                touched = [name for name in log.names & files.keys() if could_change(log, folder, name)]
                if touched and log.run != own:
                    _refuse_if_unfinished(log, files[min(touched)])


def refuse_unfinished_at(place: Place) -> None:
    """As `refuse_unfinished`, for what a path may name before it could be opened."""
    if not os.path.isdir(place.folder):  # noqa: PTH112 - Path's own raises where there is no permission
        return
    with _opened(place.folder) as folder:
        for log in _logs_about(folder, [] if place.name is None else [place.name]):
            if is_about(log, folder, place.name):
                _refuse_if_unfinished(log, place.folder if place.name is None else place.folder / place.name)


def could_change(log: Log, folder: Folder, name: str) -> bool:
    """Whether the user of a log may change the file that it names; if not, the log is false and ignored.

    Where nobody may remove what others made, only a file's owner may replace it, and root and the folder's owner.
    """
    if is_trusted(log.owner, folder):
        return True
    status = folder.status(name)
    others_may = stat.S_IWGRP | stat.S_IWOTH
    return status is None or status.st_uid == log.owner or bool(status.st_mode & others_may)


def is_about(log: Log, folder: Folder, name: str | None) -> bool:
    """Whether a log is about a file, or about anything in a folder, and its user could change that."""
    names = log.names if name is None else log.names & {name}
    return (name is None and is_trusted(log.owner, folder)) or any(could_change(log, folder, one) for one in names)


def home_of(log: Log) -> Log | None:
    """The log in the run's home, which says how far the run got; None when the run has ended meanwhile.

    Raises:
        SystemRefusedError: it is not there, though the run has not ended.
    """
    if log.path == log.home:
        return log
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), Folder.at(log.home.parent) as folder:
        home = read_log(folder, log.home.name)
        # A pointer to a pointer was not made by us, nor does another user's log speak for this one.
        if home is not None and home.path == home.home and home.owner == log.owner:
            return home
    if not log.path.exists():
        return None
    raise SystemRefusedError(
        f"belongs to an unfinished run whose log {log.home} is missing; bring that back, or delete this file and "
        f"{log.run}-* beside it to keep the data as they are",
        file=log.path,
        code="unfinished",
    )


def _opened(path: Path) -> Folder:
    try:
        return Folder.at(path)
    except OSError as error:
        raise from_os_error(error, path) from error


def _logs_about(folder: Folder, names: Iterable[str]) -> list[Log]:
    """The logs in a folder; where it cannot be listed, those with a second name for one of the files."""
    try:
        return logs_in(folder)
    except SystemRefusedError as error:
        if error.errno != errno.EACCES:
            raise
    marked = [log for name in names if (log := read_log(folder, marker_of(name))) is not None]
    # A log that was deleted by hand counts no more.
    return [log for log in marked if folder.status(log.path.name) is not None]


def _refuse_if_unfinished(log: Log, file: Path) -> None:
    home = home_of(log)
    if home is not None and home.is_unfinished:
        raise SystemRefusedError(
            f"is being changed by a run ({home.who}), or was when that run crashed: wait for it, or use gradtool "
            f"recover; norm --ignore-journal reads it as it is",
            file=file,
            code="unfinished",
        )
