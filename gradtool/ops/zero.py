"""Zeroes gradients, without writing the zeros where the file system can leave them out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Unpack

from gradtool.ops.output import Choices, opened
from gradtool.ops.passes import Inputs, by_shard
from gradtool.ops.results import Call, call_facts
from gradtool.options import Sets, ZeroOptions
from gradtool.signatures import complete, documented
from gradtool.store.io.workers import copying, zeroing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradtool.ops.output import Output
    from gradtool.ops.passes import Session
    from gradtool.store.format.header import Shard
    from gradtool.store.format.tensors import Tensor
    from gradtool.store.fs import File


@dataclass(frozen=True)
class ZeroResult(Call):
    """How much was zeroed: `tensors`, `elements` and `bytes`.

    `bytes_written` are those that were copied into new files, or in place, the zeros.
    """

    dry_run: bool
    files_written: int
    bytes_written: int


@documented
def zero(paths: Sets = (), **options: Unpack[ZeroOptions]) -> ZeroResult:
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
    chosen = complete("zero", ZeroOptions, options)
    inputs, choices = Inputs.of(paths, chosen, dtypes=None), Choices.of(chosen)
    with opened(inputs, choices) as (session, destination):
        session.backend_why = "nothing to compute"
        count = _write(session, destination)
    return ZeroResult(
        **call_facts(session, session.selected),
        dry_run=choices.dry_run,
        files_written=count,
        bytes_written=session.timings.write_bytes,
    )


def _write(session: Session, destination: Output) -> int:
    selected = [one for one in session.selected if one.tensor.nbytes]
    zeroed = {shard: [tensor for _, tensor in wanted] for shard, wanted in by_shard(selected)}
    kept = {file.shard: _kept(file.shard, zeroed.get(file.shard, ())) for file in destination.arriving(selected)}

    def fill(destinations: Mapping[Shard, File]) -> None:
        in_place = session.journal is not None
        tasks = (
            task
            for shard, file in destinations.items()
            for task in (
                zeroing(shard, [(tensor.begin, tensor.end) for tensor in zeroed[shard]], file)
                if in_place
                else copying(shard, [(begin, end, begin) for begin, end in kept[shard]], file)
            )
        )
        copied = sum(end - begin for shard in destinations for begin, end in kept[shard])
        session.stream(tasks, session.nbytes if in_place else copied)

    files = [file._replace(ranges=kept[file.shard]) for file in destination.arriving(selected)]
    return destination.write(session, files, fill)


def _kept(shard: Shard, zeroed: Sequence[Tensor]) -> list[tuple[int, int]]:
    """What lies before, between and behind the tensors that are zeroed."""
    edges = [(0, 0), *((tensor.begin, tensor.end) for tensor in zeroed), (shard.size, shard.size)]
    return [(end, begin) for (_, end), (begin, _) in pairwise(edges) if begin > end]
