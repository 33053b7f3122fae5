"""Zeroes gradients, without writing the zeros where the file system can leave them out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from gradtool.ops.output import Choices, opened
from gradtool.ops.passes import Inputs, by_shard
from gradtool.ops.results import Call, call_facts
from gradtool.store.io.workers import copying, zeroing

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from gradtool.ops.output import Output
    from gradtool.ops.passes import Progress, Session
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


def zero(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    files_from: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    write: str = "replace",
    fsync: bool = True,
    lock_timeout: float = 0.0,
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
        write: "replace" builds new files that take the place of the old ones; "inplace" overwrites what changes in the
            files that are there, and saves it to a journal first.
        fsync: have what is written on the disk before what was there goes.
        lock_timeout: seconds to wait for other runs that are about to write the same files.
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
    inputs = Inputs.of(
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
    choices = Choices(output, output_dir, dry_run, write, fsync, lock_timeout)
    with opened(inputs, choices) as (session, destination):
        session.backend_why = "nothing to compute"
        count = _write(session, destination)
    return ZeroResult(
        **call_facts(session, session.selected),
        dry_run=dry_run,
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
