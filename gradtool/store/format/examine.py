"""One gradient set looked at file by file: everything that is wrong with it, and not only what comes first.

Elsewhere (`gradset`), the first thing that is wrong ends the call.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtool.errors import BadInputError, GradtoolError, Problem, SystemRefusedError, shortened
from gradtool.store.format.filetypes import HEAD, not_an_index_error, not_safetensors_error
from gradtool.store.format.gradset import read_mapped
from gradtool.store.format.header import Shard, read_shard, read_text
from gradtool.store.format.index import INDEX_SUFFIX, read_weight_map
from gradtool.store.format.listing import files_in, listing_of
from gradtool.store.format.tensors import BITS
from gradtool.store.source import open_source, read_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gradtool.store.format.listing import Listing
    from gradtool.store.format.tensors import Tensor

# A file that is replaced while its header is read is read again so often.
_TRIES = 20
_PAUSE_SECONDS = 0.01
# As many tensors are named in one message.
_MAX_NAMED = 3
# Where the data begins is a multiple of that, if the file was written by the library.
_ALIGNMENT = 8
_LEAST_BYTES = 8


@dataclass
class Examined:
    """What one path names, as far as it could be read, and what is wrong with the rest.

    `faults` are those of safetensors files and indexes. `strangers` are no such files, or missing. `refused` is what
    the system refused. `unmapped` are files beside an index that it does not name.
    """

    path: str
    shards: list[Shard] = field(default_factory=list)
    index: Path | None = None
    faults: list[Problem] = field(default_factory=list)
    strangers: list[Problem] = field(default_factory=list)
    refused: list[Problem] = field(default_factory=list)
    unmapped: list[Path] = field(default_factory=list)

    def note(self, error: GradtoolError, *, in_set: bool = False) -> None:
        """Note why a file, an index or a folder could not be read; in a set, a missing file is a fault of the set."""
        (one,) = error.problems
        is_missing = one.code == "missing-file"
        if one.code == "link":
            self.faults.append(one)
        elif isinstance(error, SystemRefusedError):
            self.refused.append(one)
        elif (is_missing and not in_set) or (not is_missing and _is_stranger(Path(one.file or self.path))):
            self.strangers.append(one)
        else:
            self.faults.append(one)


def examine(path: str) -> Examined:
    """Read the headers of what a path names, and compare an index with its shards in both directions."""
    found = Examined(path)
    try:
        listing = listing_of(path)
    except GradtoolError as error:
        found.note(error)
        return found
    found.index = listing.index
    weight_map = _read_index(found, listing)
    if weight_map is not None and listing.index is not None:
        names = dict.fromkeys(weight_map.values())
        files = [listing.index.parent / name for name in names]
        found.unmapped = [file for file in files_in(listing.index.parent) if file.name not in names]
    else:
        files = list(listing.files)
    _read_files(found, files, is_mapped=weight_map is not None, is_listed=listing.path.is_dir())
    for shard in found.shards:
        found.faults += _repeated_in(shard)
    repeated = _repeated_between(found)
    if weight_map is not None and listing.index is not None:
        _compare(found, listing.index, weight_map, repeated)
    return found


def unaligned_in(shard: Shard) -> list[Tensor]:
    """The tensors that do not begin at a multiple of the size of their elements, which no file of the library has."""
    sizes = {dtype: bits // 8 for dtype, bits in BITS.items() if bits >= _LEAST_BYTES}
    return [one for one in shard.tensors if one.nbytes and one.begin % sizes.get(one.dtype, 1)]


def is_aligned(shard: Shard) -> bool:
    """Whether the data begins where the library lets it begin."""
    return shard.data_start % _ALIGNMENT == 0


def listed(names: Sequence[str]) -> str:
    """Some names of tensors, and how many more there are."""
    shown = ", ".join(repr(shortened(name)) for name in names[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED:,} more"


def _read_index(found: Examined, listing: Listing) -> Mapping[str, str] | None:
    try:
        return None if listing.index is None else read_weight_map(listing.index, is_named=listing.is_named)
    except GradtoolError as error:
        found.note(error)
        return None


def _read_files(found: Examined, files: Iterable[Path], *, is_mapped: bool, is_listed: bool) -> None:
    """Read the headers of the files; each once, if it has several names."""
    first: dict[tuple[int, int], Path] = {}
    for file in files:
        same = file
        with suppress(OSError):
            status = file.stat()
            same = first.setdefault((status.st_dev, status.st_ino), file)
        if same is not file:
            if is_mapped:
                what = f"is the same file as {same.name}, and the index names both"
                found.faults.append(Problem("duplicate-file", what, str(file), hint="correct the index"))
            continue
        read = partial(read_shard, file, is_named=file == Path(found.path))
        if is_mapped and found.index is not None:
            read = partial(read_mapped, found.index, file.name, read_shard)
        try:
            found.shards.append(_read_patiently(read))
        except GradtoolError as error:
            is_missing = error.problems[0].code == "missing-file"
            # What was listed and is gone was removed meanwhile.
            if is_mapped or not (is_missing and is_listed and not os.path.lexists(file)):
                found.note(error, in_set=is_mapped or is_listed)


def _read_patiently(read: Callable[[], Shard]) -> Shard:
    for _ in range(_TRIES):
        try:
            return read()
        except SystemRefusedError as error:
            if error.problems[0].code != "changed":
                raise
        time.sleep(_PAUSE_SECONDS)
    return read()


def _repeated_in(shard: Shard) -> list[Problem]:
    """A fault for the names that a header has twice: the library takes the last of them, and others may not."""
    repeated: list[str] = []

    def count(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # The outermost object is the last.
        repeated[:] = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
        return dict(pairs)

    try:
        json.loads(read_text(shard), object_pairs_hook=count)
    except GradtoolError as error:
        return list(error.problems)
    if not repeated:
        return []
    what = f"the header has {listed(repeated)} more than once"
    hint = "write the file again with one tensor of each name"
    return [Problem("duplicate-name", what, shard.name, _only(repeated), hint)]


def _repeated_between(found: Examined) -> set[str]:
    """The names that are in several files; a fault for each two files that share some."""
    home: dict[str, Shard] = {}
    shared: dict[tuple[Shard, Shard], list[str]] = defaultdict(list)
    for shard in found.shards:
        for tensor in shard.tensors:
            first = home.setdefault(tensor.name, shard)
            if first is not shard:
                shared[shard, first].append(tensor.name)
    for (shard, first), names in shared.items():
        first_name = first.file_name
        what = f"is also in {first_name}" if len(names) == 1 else f"has {listed(names)}, and so has {first_name}"
        hint = "if they are not shards of one set, name the files one by one"
        found.faults.append(Problem("duplicate-name", what, shard.name, _only(names), hint))
    return {name for names in shared.values() for name in names}


def _compare(found: Examined, index: Path, weight_map: Mapping[str, str], repeated: set[str]) -> None:
    """A fault for each shard that lacks what the index maps to it, or has what the index does not."""
    mapped: dict[str, list[str]] = defaultdict(list)
    for name, file in weight_map.items():
        mapped[file].append(name)
    hint = "correct the index, or copy the set again"
    for shard in found.shards:
        file, names = shard.file_name, {tensor.name for tensor in shard.tensors}
        missing = [name for name in mapped[file] if name not in names]
        if missing:
            what = f"the index maps {listed(missing)} to {file}, which does not contain {_them(missing)}"
            found.faults.append(Problem("missing-tensor", what, str(index), _only(missing), hint))
        extra = [one.name for one in shard.tensors if one.name not in repeated and weight_map.get(one.name) != file]
        if extra:
            what = f"{file} contains {listed(extra)}, which the index does not map to it"
            found.faults.append(Problem("extra-tensor", what, str(index), _only(extra), hint))


def _only(names: Sequence[str]) -> str | None:
    """The name, if there is but one: a message that names several is about none of them alone."""
    return names[0] if len(names) == 1 else None


def _them(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _is_stranger(file: Path) -> bool:
    """Whether a refused file is not even a damaged safetensors file, or index."""
    try:
        with closing(open_source(file)) as reader:
            head, size = read_range(reader, 0, HEAD), reader.source.size
    except OSError:
        return True
    except BadInputError:
        return not os.path.isdir(file)  # noqa: PTH112 - Path's own raises without permission
    if file.name.endswith(INDEX_SUFFIX):
        return not_an_index_error(file, head, size) is not None
    return size < _LEAST_BYTES or not_safetensors_error(file, head, size) is not None
