"""What is added, and to what: gradients with their weights, matched by name with a buffer or a new set."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gradtool.errors import NO_SUCH_FILE, BadInputError, Problem, UsageError, number_of, option, say, shortened
from gradtool.ops.aligned_read import is_broadcastable
from gradtool.ops.passes import Measure, Measurement
from gradtool.ops.weights import Weight, read_weight
from gradtool.store.format.gradset import Selected, open_sets
from gradtool.store.format.layout import SPARE, Layout, NewSet, lay_out
from gradtool.store.format.paths import is_there
from gradtool.store.io.destination import NewFile
from gradtool.store.source import SmallFile

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from gradtool.backends.protocol import NormSpec
    from gradtool.ops.call import Call
    from gradtool.options import AccumulateOptions, StrPath
    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.transaction.output import Metadata, Output

# As huggingface_hub has it.
_SHARD_BYTES = 5 * 10**9
# Of the names in a warning.
_NAMES = 3


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


def new_set(options: AccumulateOptions) -> NewSet:
    """Return the set that will hold the sum alone: one file or, in a folder, shards."""
    like = None if options.shard_like is None else open_sets([options.shard_like])[0]
    is_sharded = like is None and options.output_dir is not None
    shard_bytes = int(options.max_shard_size or _SHARD_BYTES) if is_sharded else None
    return NewSet(Path(options.output or options.output_dir or ""), options.dtype, like, shard_bytes)


class Buffer(NamedTuple):
    """The tensors that are added to: of a set that exists, or of files that are created (`layouts`, `indexes`)."""

    targets: Sequence[Selected]
    existing: GradientSet | None = None
    layouts: Sequence[Layout] = ()
    indexes: Sequence[SmallFile] | None = None

    @classmethod
    def create(cls, created: NewSet, selected: Sequence[Selected], metadata: Mapping[str, str]) -> Self:
        """Lay out a new set of the tensors of gradients, of which the first has these metadata."""
        # The framework that wrote it, which readers ask for; all else is about that gradient alone.
        framework = {key: metadata[key] for key in ("format",) if key in metadata}
        files = created.files(selected)
        index = created.index_over(files)
        indexes = [] if index is None else [SmallFile(index[0], None, index[1])]
        return cls._of([lay_out(path, tensors, framework) for path, tensors in files.items()], indexes)

    @classmethod
    def _of(cls, layouts: Sequence[Layout], indexes: Sequence[SmallFile] | None) -> Self:
        targets = [Selected(layout.shard, tensor) for layout in layouts for tensor in layout.shard.tensors]
        return cls(targets, None, layouts, indexes)

    def with_metadata(self, entries: Mapping[str, str]) -> Self:
        """Return the same new set with more metadata, and spare bytes for numbers that grow."""
        shards = [layout.shard for layout in self.layouts]
        layouts = [lay_out(shard.name, shard.tensors, {**shard.metadata, **entries}, spare=SPARE) for shard in shards]
        return self._of(layouts, self.indexes)

    def measure_without(self, call: Call, numbers: Collection[int], spec: NormSpec) -> Measurement:
        """Measure all targets but those with the given numbers, which still have to be filled in."""
        measurement = Measurement(self.targets, spec)
        others = sorted(set(range(len(self.targets))) - set(numbers))
        if not others:
            return measurement
        rest = [self.targets[number] for number in others]
        if self.existing is not None:
            return measurement.updated(others, call.run(Measure(rest, spec)))
        zeros = Measurement(rest, spec)
        zeros.zeros = array("q", (target.tensor.elements for target in rest))
        return measurement.updated(others, zeros)

    def files(self, output: Output, changed: Sequence[Selected], metadata: Metadata | None = None) -> list[NewFile]:
        """Return the files to be written: new ones, or those in which tensors or metadata change, and elsewhere all."""
        if self.existing is None:
            return [NewFile(shard, shard.size, header, copies=()) for header, shard in self.layouts]
        files = output.files(changed, metadata)
        return [file if file.changes else file._replace(copies=[(0, file.size, 0)]) for file in files]


@dataclass(frozen=True, kw_only=True)
class GradientRow:
    """One gradient set: its weight, and whether it was added; what was found in it, if it was measured before.

    `norm` is that of what it adds, as it is broadcast, without its weight and `coef`. `cosine` and `distance` are
    between that and the sum, mean or median of all, before that is clipped; a tensor that it lacks counts as zeros.
    `missing` and `extra` count the tensors that it lacks, and those that the buffer lacks.
    """

    weight: float
    taken: bool = True
    norm: float | None = None
    coef: float | None = None
    nan: int | None = None
    inf: int | None = None
    cosine: float | None = None
    distance: float | None = None
    missing: int
    extra: int
    file: str


class Contribution(NamedTuple):
    """What a gradient adds: its tensors by the number of the target that they are for, and its row in the result.

    A sum is the gradient times its weight already.
    """

    tensors: Mapping[int, Selected]
    is_sum: bool
    row: GradientRow

    @property
    def factor(self) -> float:
        """What its values are multiplied by, unless it is clipped by itself."""
        return 1.0 if self.is_sum else self.row.weight

    @property
    def unscale(self) -> float:
        """What its values are divided by to get the gradient; a sum of weight 0 stays as it is."""
        return self.row.weight or 1.0 if self.is_sum else 1.0

    @property
    def scale(self) -> float:
        """What its values are multiplied by."""
        return self.factor if self.row.coef is None else self.factor * self.row.coef

    def with_row(self, **fields: Any) -> Contribution:
        """Return the same with other fields in its row."""
        return self._replace(row=replace(self.row, **fields))


def weights_of(options: AccumulateOptions, gradients: Sequence[GradientSet]) -> list[Weight]:
    """Return the weight of each gradient: as given, or as its files have it under a key, or else 1.

    Raises:
        UsageError: the weights are not one for each gradient.
        BadInputError: a file has no such key, or no finite number under it, or shards of one set differ.
    """
    if options.weight_key is not None:
        return [read_weight(gradient, options.weight_key) for gradient in gradients]
    weights = options.weight or [1.0] * len(gradients)
    if len(weights) != len(gradients):
        given, needed = number_of(len(weights), "weight"), number_of(len(gradients), "gradient")
        raise UsageError(say("{} gives {} for {}", option("weight"), given, needed), hint="give one for each, in order")
    return [Weight(weight) for weight in weights]


def match(
    options: AccumulateOptions,
    targets: Sequence[Selected],
    gradients: Sequence[tuple[GradientSet, Sequence[Selected]]],
    weights: Sequence[Weight],
) -> tuple[list[Contribution], list[Problem]]:
    """Return what each gradient set contributes to the targets, and a warning for each whose tensors are others.

    The targets are the tensors of the buffer; or of a new set, which has those of all gradients.

    Raises:
        BadInputError: a gradient lacks a tensor of the buffer or has one that the buffer lacks, unless the options
            allow that; or its shape does not broadcast to the buffer's. Every such tensor is named. The first gradient
            stands for the buffer where there is none.
    """
    numbers = {target.tensor.name: number for number, target in enumerate(targets)}
    expected = {each.tensor.name: None for each in (gradients[0][1] if options.is_new else targets)}
    whole = "the first gradient" if options.is_new else "the buffer"
    problems: list[Problem] = []
    warnings: list[Problem] = []
    contributions: list[Contribution] = []
    for (gradient, selected), weight in zip(gradients, weights, strict=True):
        by_name = {each.tensor.name: each for each in selected}
        missing = [name for name in expected if name not in by_name]
        extra = [each for each in selected if each.tensor.name not in expected]
        if (missing or extra) and (options.missing == "error" or (expected and len(missing) == len(expected))):
            problems += _unmatched(options, gradient, missing, extra, whole)
        if options.is_new and options.missing != "error":
            missing, extra = [name for name in numbers if name not in by_name], []
        if missing or extra:
            warnings.append(_gap(options, gradient, missing, extra))
        matched = {numbers[name]: each for name, each in by_name.items() if name in numbers}
        for number, each in matched.items():
            if not is_broadcastable(each.tensor.shape, targets[number].tensor.shape):
                shape, target = list(each.tensor.shape), list(targets[number].tensor.shape)
                message = f"shape {shape} does not broadcast to {target}, its shape in {whole}"
                problems.append(Problem("shape", message, each.shard.name, each.tensor.name))
        row = GradientRow(weight=weight.value, missing=len(missing), extra=len(extra), file=gradient.name)
        contributions.append(Contribution(matched, weight.is_sum, row))
    if problems:
        hint = None
        if warnings and options.missing == "error":
            hint = "rename tensors"
            # A gradient that shares no name cannot be added in part either.
            if all(each.row.missing < len(expected) for each in contributions):
                skip, zero = option("missing", "skip"), option("missing", "zero")
                hint = say("rename tensors, or use {} to count only what is there, or {} to count zeros", skip, zero)
        raise BadInputError.from_problems([replace(problem, hint=problem.hint or hint) for problem in problems])
    return contributions, warnings


def _unmatched(
    options: AccumulateOptions, gradient: GradientSet, missing: Sequence[str], extra: Sequence[Selected], whole: str
) -> list[Problem]:
    """Return a problem for each tensor on one side only; or, if some are allowed, for a gradient that shares none."""
    from gradtool.store.format.hints import prefix_problem  # only needed for the error

    prefix = prefix_problem([each.tensor.name for each in extra], missing, gradient.name, whole)
    if prefix is not None:
        return [prefix]
    if options.missing != "error":
        message = say("has no tensor of the buffer; {} needs at least one", option("missing", options.missing))
        return [] if options.is_new else [Problem("missing-tensor", message, gradient.name)]
    return [
        *(Problem("missing-tensor", f"is only in {whole}", gradient.name, name) for name in missing),
        *(Problem("extra-tensor", f"is not in {whole}", each.shard.name, each.tensor.name) for each in extra),
    ]


def _gap(
    options: AccumulateOptions, gradient: GradientSet, missing: Sequence[str], extra: Sequence[Selected]
) -> Problem:
    """Return the warning about tensors that are on one side only."""
    parts = []
    if missing:
        what = "counted as zeros" if options.missing == "zero" else "not counted there"
        parts.append(f"lacks {number_of(len(missing), 'tensor')} ({_some(missing)}), {what}")
    if extra:
        names = _some([each.tensor.name for each in extra])
        parts.append(f"has {number_of(len(extra), 'tensor')} that the buffer lacks ({names}), not added")
    return Problem("unmatched", "; ".join(parts), gradient.name)


def _some(names: Sequence[str]) -> str:
    """Return the first of the names, in quotes."""
    return ", ".join([repr(shortened(name)) for name in names[:_NAMES]] + ["…"] * (len(names) > _NAMES))
