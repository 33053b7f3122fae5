"""Checks the headers and indexes of a set, to the end and not only to the first problem, and what runs have left."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradtool.errors import GradtoolError, Problem, SystemRefusedError, call, number_of, say
from gradtool.store.format.gradset import MissingTensorError, SetReader, UnmappedTensorError, only, parts_in, quoted
from gradtool.store.format.header import FileTypeError, read_shard, read_text
from gradtool.store.format.tensors import BITS
from gradtool.store.source import Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.store.format.tensors import Shard
    from gradtool.store.transaction.runs import Leftover

    Severity = Literal["fault", "note"]

# How often a header is read if the file is replaced meanwhile.
_TRIES = 20
_PAUSE_SECONDS = 0.01
# The data begins at a multiple of this, if the library wrote the file.
_ALIGNMENT = 8


class SetCheck:
    """A set, read as far as possible, and what is wrong with it.

    `findings` are about safetensors files and indexes. `not_safetensors` are other files, and paths that are missing.
    `unreadable` are files that the system refused to read.
    """

    def __init__(self, path: str) -> None:
        self.findings: list[tuple[Severity, Problem]] = []
        self.not_safetensors: list[Problem] = []
        self.unreadable: list[Problem] = []
        self._reader = reader = SetReader(path, _read_patiently)
        # `reader.errors()` would report a file with several names in a folder without an index once for each name.
        for error in chain(reader.list_files(), reader.drop_repeated_files(), reader.read_files(), reader.compare()):
            self._sort(error)
        self.gradset = reader.gradset
        for problem in chain.from_iterable(map(_repeated_names, self.gradset.shards)):
            self._add_fault(problem)
        index, weight_map = self.gradset.index, reader.weight_map
        if index is not None and weight_map is not None:
            message = f"the index {index.name} does not name it, so it is not read"
            hint = "add its tensors to the index, or move it away"
            named = {index.parent / name for name in weight_map.values()}
            for file in sorted(set(parts_in(index.parent) or ()) - named):
                if file.suffix == ".safetensors":
                    self.findings.append(("note", Problem("unmapped-file", message, str(file), hint=hint)))

    @property
    def is_incomplete(self) -> bool:
        """Whether a file or an index is damaged or could not be read."""
        has_fault = any(severity == "fault" for severity, _ in self.findings)
        return has_fault or bool(self.not_safetensors or self.unreadable)

    def blame_runs(self, leftovers: Sequence[Leftover]) -> None:
        """Count files as damaged that a run may have half changed, so that they are no safetensors files any more."""
        folders = {leftover.folder for leftover in leftovers if leftover.kind in ("writing", "unfinished")}
        for problem in self.not_safetensors[:]:
            if problem.code != "missing-file" and Path(os.path.realpath(problem.file or ".")).parent in folders:
                self.not_safetensors.remove(problem)
                self._add_fault(problem)

    def _add_fault(self, problem: Problem) -> None:
        hint = problem.hint or "copy or write the file again"
        self.findings.append(("fault", replace(problem, hint=hint)))

    def _sort(self, error: GradtoolError) -> None:
        (problem,) = error.problems
        file, is_mapped = problem.file or "", self._reader.weight_map is not None
        is_missing = problem.code == "missing-file"
        if is_missing:
            is_other_type = not is_mapped and Path(file) == Path(self._reader.path)
        else:
            is_other_type = isinstance(error, FileTypeError) or not Source.kind_of(Path(file)).is_there(Path(file))
        if isinstance(error, (MissingTensorError, UnmappedTensorError)):
            self._add_fault(replace(problem, code=error.finding))
        elif problem.code == "link":
            self._add_fault(problem)
        elif isinstance(error, SystemRefusedError):
            self.unreadable.append(problem)
        elif is_other_type:
            self.not_safetensors.append(problem)
        # A file that was listed and is missing was removed meanwhile; a file that an index names should exist.
        elif not is_missing or is_mapped or os.path.lexists(file):
            self._add_fault(problem)


def _read_patiently(path: Path, *, is_named: bool) -> Shard:
    for _ in range(_TRIES):
        try:
            return read_shard(path, is_named=is_named)
        except SystemRefusedError as error:
            if error.problems[0].code != "changed":
                raise
        time.sleep(_PAUSE_SECONDS)
    return read_shard(path, is_named=is_named)


def _repeated_names(shard: Shard) -> Sequence[Problem]:
    """Find names that a header has twice: the library takes the last of them, and other readers may not."""
    repeated: list[str] = []

    def count(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # The outermost object is the last.
        repeated[:] = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
        return dict(pairs)

    try:
        json.loads(read_text(shard), object_pairs_hook=count)
    except GradtoolError as error:
        return error.problems
    if not repeated:
        return ()
    message = f"the header contains {quoted(repeated)} more than once"
    hint = "write the file again with one tensor of each name"
    return (Problem("duplicate-name", message, shard.name, only(repeated), hint),)


def unaligned_note(shard: Shard) -> Problem | None:
    """Return a note on a file whose data is not aligned; None if it is."""
    # A tensor that the library writes never begins within an element; types of less than a byte have no alignment.
    sizes = {dtype: max(1, bits // 8) for dtype, bits in BITS.items()}
    unaligned = [tensor.name for tensor in shard.tensors if tensor.nbytes and tensor.begin % sizes.get(tensor.dtype, 1)]
    if shard.data_start % _ALIGNMENT:
        message = f"the data begins at byte {shard.data_start:,}, which is not a multiple of {_ALIGNMENT}"
    elif unaligned:
        verb = "begins" if len(unaligned) == 1 else "begin"
        message = f"{number_of(len(unaligned), 'tensor')} {verb} within an element's size: {quoted(unaligned)}"
    else:
        return None
    message += "; programs that map the file must copy what is not aligned"
    return Problem("unaligned", message, shard.name, hint="save it again with the safetensors library")


def leftover_finding(leftover: Leftover, named: Sequence[str]) -> tuple[Severity, Problem]:
    """Return the finding on what a run has left; the hint spells the folder as the caller did, if it is `named`."""
    folders = [path if os.path.isdir(path) else os.path.dirname(path) or "." for path in named]  # noqa: PTH112, PTH120
    folder = next((path for path in folders if os.path.realpath(path) == str(leftover.folder)), str(leftover.folder))
    files = f"{number_of(leftover.files, 'file')} of {leftover.nbytes:,} bytes"
    code, message = {
        "writing": ("in-use", f"a run ({leftover.process}) is changing files right now, or has crashed"),
        "unfinished": ("unfinished", f"a run ({leftover.process}) has crashed and left files half changed"),
        "crashed": ("leftover", f"a run ({leftover.process}) has crashed and left {files}; no other file is damaged"),
        "orphan": ("leftover", f"a run without a log has left {files}"),
    }[leftover.kind]
    hint = say("wait for it, or run {}" if code == "in-use" else "run {}", call("recover", folder))
    return "note" if code == "leftover" else "fault", Problem(code, message, str(leftover.path), hint=hint)
