"""Sets gradients to zero, without writing the zeros where the file system can leave them out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from gradtool.backends.values import NormSpec
from gradtool.declare import operation
from gradtool.engines.choose import requested_engine
from gradtool.engines.passes import Pass
from gradtool.errors import option, say
from gradtool.ops.call import Call
from gradtool.ops.results import OutputSummary, Result
from gradtool.ops.weights import has_values, replace_total
from gradtool.options import ZeroOptions
from gradtool.store.transaction.inputs import WritePlan
from gradtool.store.transaction.once import Once

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradtool.engines.passes import Tally
    from gradtool.errors import Problem
    from gradtool.store.format.tensors import Shard
    from gradtool.store.io.destination import NewFile
    from gradtool.store.transaction.output import Metadata


@dataclass(frozen=True, repr=False)
class ZeroResult(Result):
    """The `tensors`, `elements` and `bytes` that were set to zero.

    `bytes_written` counts the bytes copied into new files or, in place, the zeros. If they are `already_done`, an
    earlier call with the same ID set them to zero.
    """

    headline = ("elements", "bytes")

    output: OutputSummary
    already_done: bool = False


@operation(ZeroOptions)
def zero(options: ZeroOptions) -> ZeroResult:
    """Set every element of all selected tensors to +0, whatever its type and value, in place.

    Only headers and tensors that are not zeroed are copied into the new files. On file systems that support holes, no
    zeros are written, so gigabytes take no longer than kilobytes. This is ONNX Runtime's ZeroGradient for files.
    Nothing is computed, but a requested backend must be available.

    Raises:
        UsageError: an option is invalid, or contradicts another option.
        BadInputError: a file, index or tensor is invalid.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: reading or writing failed; nothing is written, unless the message names `recover`.
    """
    # There is nothing to compute, and next to nothing to copy.
    requested_engine(options.engine)
    options = options.replace(engine="threads")
    call = Call(options.named, options, dtypes=None)
    with call.open_to_write(options, WritePlan(once=Once.from_options(options))):
        if call.output.is_done():
            return ZeroResult(**call.already_done())
        metadata, warnings = _without_totals(call)
        with call.writing(_files(call, metadata)) as destination:
            copying: Pass[Tally] = Pass((), NormSpec())
            call.run(copying, destination)
    return ZeroResult(
        call=call.summary(call.selected, why="nothing to compute", warnings=warnings),
        output=call.output_summary(),
    )


def _without_totals(call: Call) -> tuple[Metadata, list[Problem]]:
    """Remove the total weight of each set in which values are zeroed."""
    metadata: dict[Shard, Mapping[str, str | None]] = {}
    warnings: list[Problem] = []
    for gradients in call.opened.sets:
        if any(has_values(tensor) for _, tensor in call.opened.selected_in(gradients)):
            hint = say("use {} to store the next total", option("overwrite", True))
            changes, warning = replace_total(gradients, None, None, hint)
            metadata |= changes
            warnings += warning
    return metadata, warnings


def _files(call: Call, metadata: Metadata) -> list[NewFile]:
    """Return the files to be written, with the ranges that are zeroed and those that are copied."""
    selected = [entry for entry in call.selected if entry.tensor.nbytes]
    ranges: dict[Shard, list[tuple[int, int]]] = defaultdict(list)
    for shard, tensor in selected:
        # A tensor that is cut over files has a range in each.
        for file_shard, begin, end in shard.ranges(tensor):
            ranges[file_shard].append((begin, end))
    files = []
    for file in call.output.files(selected, metadata):
        zeros = sorted(ranges[file.shard])
        edges = [(0, 0), *zeros, (file.shard.size, file.shard.size)]
        copies = [(end, begin, end) for (_, end), (begin, _) in pairwise(edges) if begin > end]
        files.append(file._replace(zeros=zeros, copies=copies))
    return files
