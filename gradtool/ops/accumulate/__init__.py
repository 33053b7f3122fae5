"""Adds gradients to a buffer: any number of sets, weighted, in one pass, with one rounding."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtool.errors import BadInputError, Problem, UsageError
from gradtool.ops import arguments
from gradtool.ops.accumulate.match import match, weights_of
from gradtool.ops.accumulate.policy import Policy
from gradtool.ops.accumulate.steps import GradientRow, add, leave, tensors_of
from gradtool.ops.output import Choices, opened
from gradtool.ops.passes import Inputs
from gradtool.ops.results import Facts, facts
from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.format.layout import Layout, lay_out, new_tensor
from gradtool.store.format.paths import checked_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradtool.ops.passes import Progress, Session
    from gradtool.store.format.gradset import GradientSet


@dataclass(frozen=True)
class AccumulateResult(Facts):
    """What was added and what came of it. The facts are those of the buffer as it is now; `norm` is `norm_after`.

    `norm_before` is None where the old content was not read. `sum_norm` is the norm of the float64 sums that were
    clipped, and `coef` what they were multiplied by; None without `max_norm`.
    """

    norm_before: float | None
    norm_after: float
    max_norm: float | None
    sum_norm: float | None
    coef: float | None
    clipped: bool
    taken: int
    skipped: int
    weight_sum: float
    updated: bool
    dry_run: bool
    files_written: int
    bytes_written: int
    per_gradient: tuple[GradientRow, ...]
    warnings: tuple[Problem, ...]


def accumulate(
    buffer: str | os.PathLike[str],
    gradients: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
    *,
    overwrite: bool = False,
    update: bool = True,
    weight: Sequence[float] = (),
    weight_key: str | None = None,
    mean: bool = False,
    missing: str = "error",
    create: bool = False,
    dtype: str | None = None,
    max_norm: float | None = None,
    clip_each: float | None = None,
    norm_type: float = 2.0,
    eps: float = 1e-6,
    nonfinite: str = "error",
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
) -> AccumulateResult:
    """Add gradients to a buffer, tensor by tensor of the same name: buffer ← round(buffer + Σ w · g); in place.

    Sums are float64, in the order given, and rounded once to the type of the buffer. A gradient may be of any type that
    carries values, and of any shape that broadcasts to the buffer's. These are ONNX Runtime's InPlaceAccumulator (with
    `overwrite` and `update` as in V2) over files.

    Args:
        buffer: the gradient set that is added to.
        gradients: files, folders or index files; each is a gradient set of its own.
        overwrite: drop the buffer's old content, even NaN: buffer ← round(Σ w · g).
        update: without it nothing is added and nothing written; all that the headers show is still checked.
        weight: one weight for each gradient, in order; each is 1 if none is given.
        weight_key: take the weights from the `__metadata__` of the gradients' files, under this key.
        mean: divide the sum of the gradients by the sum of the weights.
        missing: "error" refuses a tensor that is missing on either side; "skip" adds what there is.
        create: make the buffer, a single new file, from the names and shapes of the first gradient.
        dtype: the type of a buffer that is created, F32 unless given.
        max_norm: clip the sum to this norm, before it is rounded.
        clip_each: limit each gradient's own norm to this before it is added.
        norm_type: the order p of all norms, above 0; `math.inf` for the largest magnitude.
        eps: added to a norm before dividing by it.
        nonfinite: "error" writes nothing when there is a NaN or Inf, or a sum beyond its type; "propagate" goes on;
            "skip" leaves out every gradient that holds one.
        include: regular expressions; only tensors whose name one of them finds.
        exclude: regular expressions; no tensor whose name one of them finds.
        files_from: a file of further gradients, separated by newline or NUL; "-" is standard input.
        output: write the buffer, a single file, here, and leave it alone.
        output_dir: write all files of the buffer into this folder, and leave them alone.
        dry_run: do everything but write.
        write: "replace" builds new files that take the place of the old ones; "inplace" overwrites what changes in the
            files that are there, and saves it to a journal first.
        fsync: have what is written on the disk before what was there goes.
        lock_timeout: seconds to wait for other runs that are about to write the same files.
        backend: "auto", "cpu" or "cuda"; by default what GRADTOOL_BACKEND says, or else "auto".
        device: the number of the GPU, from 0; only with "cuda".
        threads: worker threads; by default one for each core, at most 16.
        progress: called with the bytes done and the bytes in all.

    Raises:
        NonFiniteError: there are NaN or Inf values, or sums that their type cannot hold; nothing was written.
        UsageError: an argument makes no sense.
        BadInputError: a file, an index, a tensor or a weight that cannot be worked with.
        BackendUnavailableError: the backend is not there.
        SystemRefusedError: reading or writing failed; nothing was written.
    """
    policy = Policy(
        overwrite=overwrite,
        weights=arguments.numbers("--weight", weight) or None,
        weight_key=arguments.optional_word("--weight-key", weight_key),
        mean=mean,
        missing=missing,
        create=create,
        dtype=dtype,
        max_norm=arguments.optional_number("--max-norm", max_norm),
        clip_each=arguments.optional_number("--clip-each", clip_each),
        norm_type=arguments.norm_order(norm_type),
        eps=arguments.number("--eps", eps),
        nonfinite=nonfinite,
    )
    policy.check()
    if policy.create and (output is not None or output_dir is not None):
        raise UsageError("--create writes BUFFER itself; leave out --output and --output-dir")
    path = _checked_buffer(buffer, create=policy.create)
    inputs = Inputs.of(
        [*([] if policy.create else [path]), *arguments.paths(gradients)],
        include=include,
        exclude=exclude,
        files_from=files_from,
        backend=backend,
        device=device,
        threads=threads,
        progress=progress,
    )
    owned = 0 if policy.create else 1
    choices = Choices(output, output_dir, dry_run, write, fsync, lock_timeout)
    made = Path(path) if policy.create else None
    with opened(inputs, choices, owned=lambda sets: sets[:owned], created=made) as (session, destination):
        offered = session.sets[owned:]
        if not offered:
            raise UsageError("no gradient is given; name one after the buffer, or use --files-from")
        created = _created(session, policy, made, offered[0]) if made else None
        targets = tensors_of(created) if created else session.selected_in(destination.shards)
        weights = weights_of(offered, policy.weights, policy.weight_key)
        gradients_in = [(one, session.selected_in(one.shards)) for one in offered]
        contributions = match(targets, gradients_in, weights, skip=policy.missing == "skip")
        if created and not update:
            targets = []
        done = (add if update else leave)(session, policy, targets, contributions, output=destination, created=created)
    return AccumulateResult(
        **facts(session, done.found, done.norm_after, selected=targets),
        norm_before=done.norm_before,
        norm_after=done.norm_after,
        max_norm=policy.max_norm,
        sum_norm=done.sum_norm,
        coef=done.coef,
        clipped=done.coef is not None and done.coef != 1,
        taken=sum(row.taken for row in done.rows),
        skipped=sum(not row.taken for row in done.rows),
        weight_sum=done.weight_sum,
        updated=update,
        dry_run=dry_run,
        files_written=done.files_written,
        bytes_written=session.timings.write_bytes,
        per_gradient=tuple(done.rows),
        warnings=tuple(done.warnings),
    )


def _checked_buffer(buffer: Any, *, create: bool) -> str:
    path = checked_path("BUFFER", buffer)
    there = os.path.lexists(path)
    if create and there:
        raise BadInputError("is there already; leave out --create to add to it", file=path, code="exists")
    if create and path.endswith((os.sep, INDEX_SUFFIX)):
        raise UsageError(f"--create makes a single file, which {path} does not name")
    if not create and not there:
        raise BadInputError("no such file; --create makes it from the first gradient", file=path, code="missing-file")
    return path


def _created(session: Session, policy: Policy, path: Path, first: GradientSet) -> Layout:
    """The buffer that is to be made: the names and shapes of the first gradient."""
    selected = session.selected_in(first.shards)
    tensors = [new_tensor(one.tensor.name, policy.dtype or "F32", one.tensor.shape) for one in selected]
    metadata = first.shards[0].metadata
    # What kind of framework wrote it, which readers ask for; all else is about that gradient alone.
    return lay_out(path, tensors, {key: metadata[key] for key in ("format",) if key in metadata})
