"""The buffer that gradients are added to: an open gradient set, or a file that is being created."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gradtool import checks
from gradtool.errors import NO_SUCH_FILE, BadInputError, UsageError
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import Measure
from gradtool.store.format.gradset import Selected
from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.format.layout import Layout, lay_out, new_tensor
from gradtool.store.format.paths import is_there, refuse_output
from gradtool.store.transaction.destination import NewFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from gradtool.backends import NormSpec
    from gradtool.ops.accumulate.match import Contribution
    from gradtool.ops.session import Session
    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.transaction.output import Output


def checked_buffer(buffer: Any, *, create: bool) -> str:
    """The path of the buffer, which must exist, or must not if it is to be created."""
    path = checks.path("BUFFER", buffer)
    there = is_there(path)
    if create:
        refuse_output(path)
    if create and there:
        raise BadInputError("already exists; leave out --create to add to it", file=path, code="exists")
    if create and path.endswith((os.sep, INDEX_SUFFIX)):
        raise UsageError(f"--create makes a single file, which {path} does not name")
    if not create and not there:
        from gradtool.store.format.missing import no_such_file  # only needed for the error

        message = no_such_file(path)
        # The reason why, or the path that may be meant, comes last.
        message = message.replace(NO_SUCH_FILE, f"{NO_SUCH_FILE}; --create makes it from the first gradient", 1)
        raise BadInputError(message, file=path, code="missing-file")
    return path


class OpenBuffer(NamedTuple):
    """The tensors of a buffer; `layout` is that of a file that is being created."""

    targets: Sequence[Selected]
    layout: Layout | None = None

    @classmethod
    def create(cls, path: Path, first: GradientSet, selected: Sequence[Selected], dtype: str) -> Self:
        """A new file with the names and shapes of the first gradient."""
        metadata = first.shards[0].metadata
        # The framework that wrote it, which readers ask for; all else is about that gradient alone.
        kept = {key: metadata[key] for key in ("format",) if key in metadata}
        tensors = [new_tensor(one.tensor.name, dtype, one.tensor.shape) for one in selected]
        return cls.of_layout(lay_out(path, tensors, kept))

    @classmethod
    def of_layout(cls, layout: Layout) -> Self:
        """A new file of this layout."""
        return cls([Selected(layout.shard, tensor) for tensor in layout.shard.tensors], layout)

    def with_metadata(self, more: dict[str, str]) -> Self:
        """The same new file with more in its metadata; a buffer that exists keeps its own."""
        if self.layout is None:
            return self
        shard = self.layout.shard
        return self.of_layout(lay_out(shard.path, shard.tensors, shard.metadata | more))

    def measure_without(self, session: Session, numbers: Iterable[int], spec: NormSpec) -> Measurement:
        """A measurement of all targets, of which those with the given numbers are still missing."""
        found = Measurement(self.targets, spec)
        others = sorted(set(range(len(self.targets))) - set(numbers))
        if not others:
            return found
        left = [self.targets[number] for number in others]
        if self.layout is None:
            return found.updated(others, session.run(Measure(left, spec)))
        zeros = Measurement(left, spec)
        zeros.zeros[:] = [one.tensor.elements for one in left]
        return found.updated(others, zeros)

    def files(self, output: Output, changed: Sequence[Selected]) -> list[NewFile]:
        """The files to be written: the new one, or those with a changed tensor, and elsewhere copies of the others."""
        if self.layout is not None:
            shard = self.layout.shard
            return [NewFile(shard, shard.size, self.layout.header, copies=(), replaces=False)]
        shards = {one.shard for one in changed}
        files = output.files(changed)
        return [one if one.shard in shards else one._replace(copies=[(0, one.size, 0)]) for one in files]


def numbers_of(contributions: Sequence[Contribution]) -> list[int]:
    """The numbers of the targets that something is added to."""
    return sorted({number for one in contributions for number in one.tensors})
