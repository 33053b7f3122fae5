"""What keeps readers from files that are half changed, and what a path is about when it cannot be opened for that."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import SystemRefusedError
from gradtool.store.records import files_of_runs, home_of, read_records, records_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradtool.store.records import Record

_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"


class Place(NamedTuple):
    """What a path is about: a file in a folder, or all that is in it."""

    folder: Path
    name: str | None

    @classmethod
    def of(cls, path: str) -> list[Self]:
        """The places of a path, which need not be there: more than one where there are links to elsewhere in a folder.

        An index is about all shards beside it.
        """
        real = Path(os.path.realpath(path))
        # Not Path's own, which raises for names that cannot be and where there is no permission.
        if not (os.path.isdir(real) or path.endswith((os.sep, _INDEX))):  # noqa: PTH112
            return [cls(real.parent, real.name)]
        folder = Path(os.path.abspath(path)).parent if path.endswith(_INDEX) else real  # noqa: PTH100
        places = [cls(Path(os.path.realpath(folder)), None)]
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            links = sorted(entry.path for entry in entries if entry.is_symlink())
            targets = (Path(os.path.realpath(link)) for link in links if link.endswith((_SUFFIX, _INDEX)))
            places += [cls(target.parent, target.name) for target in targets if os.path.lexists(target)]
        return places


def refuse_unfinished(paths: Iterable[Path], own: str | None = None) -> None:
    """Raise `SystemRefusedError` if one of the files may be half changed, by a run that is at it or one that died.

    The run called `own` is no hindrance.
    """
    names: dict[Path, dict[str, Path]] = {}
    for path in paths:
        real = Path(os.path.realpath(path))
        names.setdefault(real.parent, {})[real.name] = path
    for folder, files in names.items():
        try:
            names_there = files_of_runs(folder)
        except SystemRefusedError as error:
            if error.errno == errno.EACCES:
                continue  # A folder that may be passed through, and not be listed.
            raise
        for record in read_records(folder, names_there):
            touched = record.names & files.keys()
            if touched and record.run != own:
                _refuse_if_unfinished(record, files[min(touched)])


def refuse_unfinished_at(place: Place) -> None:
    """As `refuse_unfinished`, for what a path may name before it could be opened."""
    for record in records_in(place.folder) if os.path.isdir(place.folder) else ():  # noqa: PTH112 - as below
        if place.name is None or place.name in record.names:
            _refuse_if_unfinished(record, place.folder if place.name is None else place.folder / place.name)


def _refuse_if_unfinished(record: Record, file: Path) -> None:
    home = home_of(record)
    if home is not None and home.is_unfinished:
        raise SystemRefusedError(
            f"is being changed by a run ({home.who}), or was when it died: wait for it, or see to it with "
            f"gradtool recover; norm --ignore-journal looks anyway",
            file=file,
            code="unfinished",
        )
