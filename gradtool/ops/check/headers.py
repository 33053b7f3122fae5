"""Checks the headers and indexes of a set, to the end and not only to the first problem, and what runs have left."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradtool.errors import GradtoolError, Problem, SystemRefusedError, call, number_of, say
from gradtool.store.format.gradset import MissingTensorError, SetReader, UnmappedTensorError, only, parts_in, quoted
from gradtool.store.format.header import FileTypeError, read_text
from gradtool.store.format.tensors import BITS
from gradtool.store.source import Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.format.tensors import Shard
    from gradtool.store.transaction.runs import Leftover

    # Files that are "not-safetensors" may be missing; the system refused to read those that are "unreadable".
    Kind = Literal["fault", "note", "not-safetensors", "unreadable"]
    Findings = list[tuple[Kind, Problem]]

# The data begins at a multiple of this, if the library wrote the file.
_ALIGNMENT = 8


def read_set(path: str) -> tuple[GradientSet, Findings]:
    """Read the headers of one set as far as possible, and return what is wrong with them."""
    reader = SetReader(path)
    findings: Findings = []
    # `reader.errors()` would report a file with several names in a folder without an index once for each name.
    steps = reader.list_files, reader.drop_repeated_files, reader.read_files, reader.join_pieces, reader.compare
    for error in chain.from_iterable(step() for step in steps):
        findings += _findings_of(error, reader)
    for problem in chain.from_iterable(map(_repeated_names, reader.shards)):
        findings.append(("fault", problem))
    if reader.index is not None and reader.weight_map is not None:
        message = f"the index {reader.index.name} does not name it, so it is not read"
        hint, folder = "add its tensors to the index, or move it away", reader.index.parent
        for file in sorted(set(parts_in(folder) or ()) - {folder / name for name in reader.weight_map.values()}):
            if file.suffix == ".safetensors":
                findings.append(("note", Problem("unmapped-file", message, str(file), hint=hint)))
    return reader.gradset, findings


def _findings_of(error: GradtoolError, reader: SetReader) -> Findings:
    (problem,) = error.problems
    file, is_mapped = problem.file or "", reader.weight_map is not None
    if isinstance(error, (MissingTensorError, UnmappedTensorError)):
        return [("fault", replace(problem, code=error.finding))]
    if problem.code == "link":
        return [("fault", problem)]
    if isinstance(error, SystemRefusedError):
        return [("unreadable", problem)]
    if problem.code == "missing-file" and not is_mapped:
        if Path(file) == Path(reader.path):
            from gradtool.store.format.hints import path_error  # only needed for the error

            return [("not-safetensors", path_error(error, reader.path, "", None).problems[0])]
        # A file that was listed and is missing was removed meanwhile.
        return [("fault", problem)] if os.path.lexists(file) else []
    # A damaged safetensors file, or a file that an index names and that is missing.
    is_safetensors = problem.code == "missing-file" or (
        not isinstance(error, FileTypeError) and Source.kind_of(Path(file)).is_there(Path(file))
    )
    return [("fault" if is_safetensors else "not-safetensors", problem)]


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


def leftover_finding(leftover: Leftover, named: Sequence[str]) -> tuple[Kind, Problem]:
    """Return the finding on what a run has left; the hint spells the folder as the caller did, if it is `named`."""
    folders = [path if os.path.isdir(path) else os.path.dirname(path) or "." for path in named]  # noqa: PTH112, PTH120
    folder = next((path for path in folders if os.path.realpath(path) == str(leftover.folder)), str(leftover.folder))
    files = f"{number_of(leftover.files, 'file')} of {leftover.nbytes:,} bytes"
    left = f" and left {files}" if leftover.files else ""
    code, message = {
        "writing": ("in-use", f"a run ({leftover.process}) is changing files right now, or has crashed"),
        "unfinished": ("unfinished", f"a run ({leftover.process}) has crashed and left files half changed"),
        "crashed": ("leftover", f"a run ({leftover.process}) has crashed{left}; the data files are whole"),
        "orphan": ("leftover", f"a run without a log has left {files}"),
    }[leftover.kind]
    hint = say("wait for it, or run {}" if code == "in-use" else "run {}", call("recover", folder))
    return "note" if code == "leftover" else "fault", Problem(code, message, str(leftover.path), hint=hint)
