"""What gradients are added to: a buffer, which is an open gradient set, or a new set."""

from __future__ import annotations

import os
from array import array
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import NO_SUCH_FILE, BadInputError
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import Measure
from gradtool.store.format.gradset import Selected, open_sets
from gradtool.store.format.layout import Layout, lay_out
from gradtool.store.format.metadata import SPARE
from gradtool.store.format.newset import NewSet
from gradtool.store.format.paths import is_there
from gradtool.store.transaction.destination import NewFile
from gradtool.store.transaction.small import SmallFile
from gradtool.wording import option, say

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gradtool.backends.protocol import NormSpec
    from gradtool.ops.accumulate.match import Contribution
    from gradtool.ops.accumulate.policy import Policy
    from gradtool.ops.session import Session
    from gradtool.ops.totals import Total
    from gradtool.options import AccumulateOptions, StrPath
    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.transaction.output import Metadata, Output

# As huggingface_hub has it.
_SHARD_BYTES = 5 * 10**9


def existing_buffer(path: StrPath) -> str:
    """Return the path of the buffer; raise `BadInputError` if there is none."""
    path = os.fspath(path)
    if is_there(path):
        return path
    from gradtool.store.format.hints import no_such_file  # only needed for the error

    problem = no_such_file(path)
    if problem.message == NO_SUCH_FILE:
        hint = say("use {} to write the sum alone", option("output"))
        problem = replace(problem, hint=say("{} Or {}", problem.hint, hint) if problem.hint else hint)
    raise BadInputError.from_problems([problem])


def new_set(policy: Policy, options: AccumulateOptions) -> NewSet:
    """Return the set that will hold the sum alone: one file or, in a folder, shards."""
    like = None if policy.shard_like is None else open_sets([policy.shard_like])[0]
    shard_bytes = None if like is not None or options.output_dir is None else policy.max_shard_size or _SHARD_BYTES
    return NewSet(Path(options.output or options.output_dir or ""), policy.dtype, like, shard_bytes)


class OpenBuffer(NamedTuple):
    """The tensors of a buffer: a set that is `there`, or files that are written anew (`layouts`, and `indexes`)."""

    targets: Sequence[Selected]
    layouts: Sequence[Layout] = ()
    indexes: Sequence[SmallFile] | None = None
    there: GradientSet | None = None

    @classmethod
    def create(cls, created: NewSet, selected: Sequence[Selected], metadata: Mapping[str, str]) -> Self:
        """A new set of the tensors of gradients; `metadata` are those of the first."""
        # The framework that wrote it, which readers ask for; all else is about that gradient alone.
        kept = {key: metadata[key] for key in ("format",) if key in metadata}
        files = created.files(selected)
        index = created.index_over(files)
        indexes = [] if index is None else [SmallFile(index[0], None, index[1])]
        return cls.of_layouts([lay_out(path, tensors, kept) for path, tensors in files.items()], indexes)

    @classmethod
    def of_layouts(cls, layouts: Sequence[Layout], indexes: Sequence[SmallFile] | None) -> Self:
        """New files of these layouts."""
        targets = [Selected(one.shard, tensor) for one in layouts for tensor in one.shard.tensors]
        return cls(targets, layouts, indexes)

    def with_total(self, key: str, total: Total) -> Self:
        """The same new files with a total in their metadata; a buffer that is there keeps its own."""
        if not self.layouts:
            return self
        shards, entries = [one.shard for one in self.layouts], total.entries(key)
        layouts = [lay_out(one.path, one.tensors, one.metadata | entries, spare=SPARE) for one in shards]
        return self.of_layouts(layouts, self.indexes)

    def measure_without(self, session: Session, numbers: Iterable[int], spec: NormSpec) -> Measurement:
        """A measurement of all targets, of which those with the given numbers are still missing."""
        found = Measurement(self.targets, spec)
        others = sorted(set(range(len(self.targets))) - set(numbers))
        if not others:
            return found
        left = [self.targets[number] for number in others]
        if not self.layouts:
            return found.updated(others, session.run(Measure(left, spec)))
        zeros = Measurement(left, spec)
        zeros.zeros = array("q", (one.tensor.elements for one in left))
        return found.updated(others, zeros)

    def files(self, output: Output, changed: Sequence[Selected], metadata: Metadata | None = None) -> list[NewFile]:
        """The files to be written: new ones, or those in which tensors or metadata change, and elsewhere all."""
        if self.layouts:
            return [NewFile(one.shard, one.shard.size, one.header, copies=()) for one in self.layouts]
        shards = {one.shard for one in changed}
        files = output.files(changed, metadata)
        return [one if one.shard in shards else one._replace(copies=[(0, one.size, 0)]) for one in files]


def numbers_of(contributions: Sequence[Contribution]) -> list[int]:
    """The numbers of the targets that something is added to."""
    return sorted({number for one in contributions for number in one.tensors})
