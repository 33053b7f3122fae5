"""What is wrong with the headers and indexes of a set: all of it, and not only what comes first."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtool.errors import GradtoolError, Problem, SystemRefusedError
from gradtool.store.format.gradset import MissingTensorError, SetReader, UnmappedTensorError, only, parts_in, quoted
from gradtool.store.format.header import FileTypeError, read_shard, read_text
from gradtool.store.source import Source

if TYPE_CHECKING:
    from gradtool.store.format.tensors import Shard

# A file that is replaced while its header is read is read again so often.
_TRIES = 20
_PAUSE_SECONDS = 0.01


class Examined:
    """One set as far as it could be read, and what is wrong with the rest.

    `faults` are those of safetensors files and indexes, and `notes` files that an index does not name.
    `not_safetensors` are other files, or missing. `unreadable` is what the system refused.
    """

    def __init__(self, path: str) -> None:
        self.faults: list[Problem] = []
        self.notes: list[Problem] = []
        self.not_safetensors: list[Problem] = []
        self.unreadable: list[Problem] = []
        self._reader = reader = SetReader(path, _read_patiently)
        # Not `reader.errors()`: of a file with several names in a folder without an index, one is enough.
        for error in chain(reader.list_files(), reader.drop_repeated_files(), reader.read_files(), reader.compare()):
            self._sort(error)
        self.gradset = self._reader.gradset
        for shard in self.gradset.shards:
            self.faults += _repeated_names(shard)
        index, weight_map = self.gradset.index, self._reader.weight_map
        if index is not None and weight_map is not None:
            message = f"the index {index.name} does not name it, so it is not read"
            hint = "add its tensors to the index, or move it away"
            for file in sorted(
                set(parts_in(index.parent) or ()) - {index.parent / name for name in weight_map.values()}
            ):
                if file.suffix == ".safetensors":
                    self.notes.append(Problem("unmapped-file", message, str(file), hint=hint))

    def _sort(self, error: GradtoolError) -> None:
        """Add the problem of an error to the list where it belongs."""
        (problem,) = error.problems
        file, is_mapped = problem.file or "", self._reader.weight_map is not None
        if isinstance(error, (MissingTensorError, UnmappedTensorError)):
            self.faults.append(replace(problem, code=error.finding))
        elif problem.code == "link":
            self.faults.append(problem)
        elif isinstance(error, SystemRefusedError):
            self.unreadable.append(problem)
        elif self._is_other_type(error, file):
            self.not_safetensors.append(problem)
        # What was listed and is gone was removed meanwhile; what an index names should be there.
        elif problem.code != "missing-file" or is_mapped or os.path.lexists(file):
            self.faults.append(problem)

    def _is_other_type(self, error: GradtoolError, file: str) -> bool:
        """Check whether what was named is missing, or is not even a damaged safetensors file or index."""
        if error.problems[0].code == "missing-file":
            return self._reader.weight_map is None and Path(file) == Path(self._reader.path)
        return isinstance(error, FileTypeError) or not Source.kind_of(Path(file)).is_there(Path(file))


def _read_patiently(path: Path, *, is_named: bool) -> Shard:
    for _ in range(_TRIES):
        try:
            return read_shard(path, is_named=is_named)
        except SystemRefusedError as error:
            if error.problems[0].code != "changed":
                raise
        time.sleep(_PAUSE_SECONDS)
    return read_shard(path, is_named=is_named)


def _repeated_names(shard: Shard) -> list[Problem]:
    """Find names that a header has twice: the library takes the last of them, and others may not."""
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
    what = f"the header has {quoted(repeated)} more than once"
    hint = "write the file again with one tensor of each name"
    return [Problem("duplicate-name", what, shard.name, only(repeated), hint)]
