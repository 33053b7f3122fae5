"""Zeroes gradients, without writing the zeros where the file system can leave them out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from gradtool.ops.passes import Nothing, by_shard
from gradtool.ops.results import CallFacts, call_facts
from gradtool.ops.session import Call, output_options

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from gradtool.engines.threads import Progress
    from gradtool.ops.session import Session
    from gradtool.store.format.header import Shard
    from gradtool.store.transaction.destination import NewFile
    from gradtool.store.transaction.output import Output


@dataclass(frozen=True)
class ZeroResult(CallFacts):
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
    call = Call.of(
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
    options = output_options(output, output_dir, dry_run, write, fsync, lock_timeout)
    with call.open_to_write(options) as (session, output_):
        files = _files(session, output_)
        with session.writing(output_, files) as destination:
            session.run(Nothing(), destination)
    return ZeroResult(
        **call_facts(session, session.selected, why="nothing to compute"),
        dry_run=dry_run,
        files_written=destination.count,
        bytes_written=session.timings.write_bytes,
    )


def _files(session: Session, output: Output) -> list[NewFile]:
    """The files to be written: copies of what is not zeroed, and zeros."""
    selected = [one for one in session.selected if one.tensor.nbytes]
    wanted = by_shard(selected)
    files = []
    for file in output.files(selected):
        zeros = [(tensor.begin, tensor.end) for _, tensor in wanted.get(file.shard, ())]
        files.append(file._replace(zeros=zeros, copies=_copies(file.shard, zeros)))
    return files


def _copies(shard: Shard, zeros: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """What lies before, between and behind the ranges that are zeroed."""
    edges = [(0, 0), *zeros, (shard.size, shard.size)]
    return [(end, begin, end) for (_, end), (begin, _) in pairwise(edges) if begin > end]
