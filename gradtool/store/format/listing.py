"""What a path names: a file, an index or a folder; told from names alone, before anything is opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradtool.errors import NO_SUCH_FOLDER, BadInputError, os_errors_about
from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.format.paths import is_there
from gradtool.store.source import names_in

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Listing:
    """What a path names: an `index`, or else `files`: one, or those of a folder in name order."""

    path: Path
    files: tuple[Path, ...]
    index: Path | None = None

    @property
    def is_named(self) -> bool:
        """Whether the path is that of the file or the index itself, and not of a folder that has them."""
        return self.path == (self.index or self.files[0])


def listing_of(path: str) -> Listing:
    """What a path names. A file need not exist.

    Raises:
        BadInputError: there is no such folder, it has no safetensors file, or it has several indexes.
        SystemRefusedError: the folder cannot be listed.
    """
    one = Path(path)
    names = _names_in(one)
    # A Path drops the slash, and with it that a folder is meant.
    if path.endswith(os.sep) and not (is_there(path) and names is not None):
        raise BadInputError(NO_SUCH_FOLDER, file=path, code="missing-file")
    if names is not None:
        return _listing_of_folder(one, names)
    return Listing(one, (), one) if one.name.endswith(INDEX_SUFFIX) else Listing(one, (one,))


def files_in(folder: Path) -> tuple[Path, ...]:
    """The safetensors files in a folder, in name order; hidden ones left out."""
    return tuple(path for path in parts_in(folder) if path.name.endswith(".safetensors"))


def parts_in(folder: Path) -> tuple[Path, ...]:
    """The safetensors files and indexes in a folder, in name order; hidden ones left out."""
    return tuple(folder / name for name in _names_in(folder) or () if name.endswith((".safetensors", INDEX_SUFFIX)))


def _listing_of_folder(folder: Path, names: Sequence[str]) -> Listing:
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        what = f"has {len(indexes)} indexes ({', '.join(indexes)})"
        raise BadInputError(what, file=folder, hint="name the one to use")
    files = tuple(folder / name for name in names if name.endswith(".safetensors"))
    if not indexes and not files:
        from gradtool.store.format.filetypes import no_safetensors_error  # only needed for the error

        raise no_safetensors_error(folder)
    return Listing(folder, files, folder / indexes[0] if indexes else None)


def _names_in(folder: Path) -> list[str] | None:
    with os_errors_about(folder):
        names = names_in(folder)
    return None if names is None else sorted(name for name in names if not name.startswith("."))
