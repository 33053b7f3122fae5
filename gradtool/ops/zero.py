"""Zeroes gradients, without writing the zeros where the file system can leave them out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from gradtool.ops.output import NewFile, Output
from gradtool.ops.passes import by_shard, open_session
from gradtool.ops.results import Call, call_facts
from gradtool.store.stream import copying

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from gradtool.ops.passes import Progress
    from gradtool.store.header import Shard, Tensor


@dataclass(frozen=True)
class ZeroResult(Call):
    """How much was zeroed: `tensors`, `elements` and `bytes`; `bytes_written` are those that had to be copied."""

    dry_run: bool
    files_written: int
    bytes_written: int


def zero(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    files_from: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    fsync: bool = True,
    backend: str | None = None,
    device: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> ZeroResult:
    """Make every element of all selected tensors +0, whatever its type and whatever was there; in place.

    Only what is not zeroed is copied into the new files; the zeros are holes where the file system has such, so that it
    takes no longer to zero gigabytes than kilobytes. As ONNX Runtime's ZeroGradient, over files.

    Args:
        paths: files, folders or index files.
        include: regular expressions; only tensors whose name one of them finds.
        exclude: regular expressions; no tensor whose name one of them finds.
        files_from: a file of further paths, separated by newline or NUL; "-" is standard input.
        output: write the one input file here, and leave it alone.
        output_dir: write all files, changed or not, into this folder, and leave the inputs alone.
        dry_run: do everything but write.
        fsync: have the new files on the disk before the old ones go.
        backend: "auto", "cpu" or "cuda", which must be there; but there is nothing to compute.
        device: the number of the GPU, from 0; only with "cuda".
        threads: worker threads; by default one for each core, at most 16.
        progress: called with the bytes done and the bytes in all.

    Raises:
        UsageError: an argument makes no sense.
        BadInputError: a file, an index or a tensor that cannot be worked with.
        BackendUnavailableError: the backend is not there.
        SystemRefusedError: reading or writing failed; nothing was written.
    """
    session = open_session(
        paths,
        include=include,
        exclude=exclude,
        files_from=files_from,
        backend=backend,
        device=device,
        threads=threads,
        progress=progress,
        dtypes=None,
    )
    session.backend_why = "nothing to compute"
    destination = Output.of(session, output, output_dir, dry_run=dry_run, fsync=fsync)
    zeroed = {shard: [tensor for _, tensor in wanted if tensor.nbytes] for shard, wanted in by_shard(session.selected)}
    shards = [file.shard for file in destination.arriving(shard for shard, tensors in zeroed.items() if tensors)]
    kept = {shard: _kept(shard, zeroed.get(shard, ())) for shard in shards}

    def fill(destinations: Mapping[Shard, Path]) -> None:
        tasks = (
            task
            for shard, path in destinations.items()
            for task in copying(shard, [(begin, end, begin) for begin, end in kept[shard]], path)
        )
        session.stream(tasks, sum(end - begin for shard in destinations for begin, end in kept[shard]))

    files = [NewFile(shard, shard.size, kept[shard]) for shard in shards]
    count = destination.write(session, files, fill)
    return ZeroResult(
        **call_facts(session, session.selected),
        dry_run=dry_run,
        files_written=count,
        bytes_written=session.timings.write_bytes,
    )


def _kept(shard: Shard, zeroed: Sequence[Tensor]) -> list[tuple[int, int]]:
    """What lies before, between and behind the tensors that are zeroed."""
    edges = [(0, 0), *((tensor.begin, tensor.end) for tensor in zeroed), (shard.size, shard.size)]
    return [(end, begin) for (_, end), (begin, _) in pairwise(edges) if begin > end]
