"""Zeroes gradients, without writing the zeros where the file system can leave them out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from gradtool.declare import operation
from gradtool.engines.choose import asked_for
from gradtool.ops.passes import NOTHING, by_shard
from gradtool.ops.results import OutputSummary, Result, call_summary, output_summary
from gradtool.ops.session import Call
from gradtool.ops.totals import NewMetadata, changed, checked_key, has, has_values, is_whole, stored_key, without
from gradtool.options import ZeroOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradtool.errors import Problem
    from gradtool.ops.session import Session
    from gradtool.store.format.header import Shard
    from gradtool.store.transaction.destination import NewFile
    from gradtool.store.transaction.output import Metadata, Output


@dataclass(frozen=True, repr=False)
class ZeroResult(Result):
    """How much was zeroed: `tensors`, `elements` and `bytes`.

    `bytes_written` are those that were copied into new files, or in place, the zeros.
    """

    headline = ("elements", "bytes")

    output: OutputSummary


@operation(ZeroOptions)
def zero(options: ZeroOptions) -> ZeroResult:
    """Set every element of all selected tensors to +0, whatever its type and value, in place.

    Only what is not zeroed is copied into the new files; the zeros are holes if the file system has them, so that
    gigabytes take no longer than kilobytes. As ONNX Runtime's ZeroGradient, over files. There is nothing to compute,
    but a backend that is asked for must be available.

    Raises:
        UsageError: an option is invalid, or contradicts another one.
        BadInputError: a file, index or tensor is invalid.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: reading or writing failed; nothing is written.
    """
    key = checked_key(options.weight_key)
    # There is nothing to compute, and next to nothing to copy.
    asked_for(options.engine)
    options = options.replace(engine="threads")
    with Call.of(options.named, options, dtypes=None).open_to_write(options) as (session, output):
        metadata = _new_metadata(session, key)
        files = _files(session, output, metadata.entries)
        with session.writing(output, files) as destination:
            session.run(NOTHING, destination)
    return ZeroResult(
        call=call_summary(session, session.selected, why="nothing to compute", warnings=metadata.warnings),
        output=output_summary(session, output, destination),
    )


def _new_metadata(session: Session, key: str | None) -> NewMetadata:
    """The total weight of what is zeroed is 0: the one that gradtool stored, and the one under a key."""
    entries: dict[Shard, Mapping[str, str | None]] = {}
    warnings: list[Problem] = []
    for one in session.opened.sets:
        keys = [name for name in (key, stored_key(one)) if name is not None and has(one, name)]
        zeroed = session.opened.selected_in(one.shards)
        if not (keys and any(has_values(chosen.tensor) for chosen in zeroed)):
            continue
        if is_whole(one, zeroed):
            new = changed(one, dict.fromkeys(keys, "0"))
        else:
            new = without(one, key, "only some of its tensors were zeroed", "To keep it true, zero all")
        entries |= new.entries
        warnings += new.warnings
    return NewMetadata(entries, warnings)


def _files(session: Session, output: Output, metadata: Metadata) -> list[NewFile]:
    """The files to be written: copies of what is not zeroed, and zeros."""
    selected = [one for one in session.selected if one.tensor.nbytes]
    wanted = by_shard(selected)
    files = []
    for file in output.files(selected, metadata):
        zeros = [(tensor.begin, tensor.end) for _, tensor in wanted.get(file.shard, ())]
        files.append(file._replace(zeros=zeros, copies=_copies(file.shard, zeros)))
    return files


def _copies(shard: Shard, zeros: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """What lies before, between and behind the ranges that are zeroed."""
    edges = [(0, 0), *zeros, (shard.size, shard.size)]
    return [(end, begin, end) for (_, end), (begin, _) in pairwise(edges) if begin > end]
