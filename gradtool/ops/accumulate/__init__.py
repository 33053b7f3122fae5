"""Adds gradients to a buffer: any number of sets, weighted, in one pass, with one rounding."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from gradtool import checks
from gradtool.errors import BadInputError, Problem, UsageError
from gradtool.ops.accumulate.match import match, weights_of
from gradtool.ops.accumulate.policy import Policy
from gradtool.ops.accumulate.steps import GradientRow, add, leave, tensors_of
from gradtool.ops.output import Choices, opened
from gradtool.ops.passes import Inputs
from gradtool.ops.results import Facts, facts
from gradtool.options import AccumulateOptions, Buffer, Gradients
from gradtool.signatures import complete, documented
from gradtool.store.format.gradset import INDEX_SUFFIX
from gradtool.store.format.layout import Layout, lay_out, new_tensor

if TYPE_CHECKING:
    from gradtool.ops.passes import Session
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


@documented
def accumulate(buffer: Buffer, gradients: Gradients = (), **options: Unpack[AccumulateOptions]) -> AccumulateResult:
    """Add gradients to a buffer, tensor by tensor of the same name: buffer ← round(buffer + Σ w · g), in place.

    Sums are float64, in the order given, and rounded once to the type of the buffer. A gradient may have any type that
    carries values, and any shape that broadcasts to the buffer's. This is ONNX Runtime's InPlaceAccumulator (with
    `overwrite` and `update` as in V2) over files.

    Raises:
        NonFiniteError: a value is NaN or Inf, or a sum overflows its type; nothing is written.
        UsageError: an option is invalid, or contradicts another one.
        BadInputError: a file, index, tensor or weight is invalid.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: reading or writing failed; nothing is written.
    """
    chosen = complete("accumulate", AccumulateOptions, options)
    policy = Policy(
        overwrite=chosen["overwrite"],
        weights=chosen["weight"] or None,
        weight_key=chosen["weight_key"],
        mean=chosen["mean"],
        missing=chosen["missing"],
        create=chosen["create"],
        dtype=chosen["dtype"],
        max_norm=chosen["max_norm"],
        clip_each=chosen["clip_each"],
        norm_type=chosen["norm_type"],
        eps=chosen["eps"],
        nonfinite=chosen["nonfinite"],
    )
    policy.check()
    choices, update = Choices.of(chosen), chosen["update"]
    if policy.create and (choices.output is not None or choices.output_dir is not None):
        raise UsageError("--create writes BUFFER itself; leave out --output and --output-dir")
    path = _checked_buffer(buffer, create=policy.create)
    inputs = Inputs.of([*([] if policy.create else [path]), *checks.paths(gradients)], chosen)
    owned = 0 if policy.create else 1
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
        dry_run=choices.dry_run,
        files_written=done.files_written,
        bytes_written=session.timings.write_bytes,
        per_gradient=tuple(done.rows),
        warnings=tuple(done.warnings),
    )


def _checked_buffer(buffer: Any, *, create: bool) -> str:
    path = checks.path("BUFFER", buffer)
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
