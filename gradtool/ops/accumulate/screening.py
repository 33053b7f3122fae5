"""Screens gradients: those that fail a rule are left out, and named, before anything is written.

The rules are applied in the order of their cost, whatever the order in which they were given, and each only to the
gradients that passed those before. What is left is then added as if the call had named nothing else.
"""

from __future__ import annotations

import errno
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import (
    BadInputError,
    GradtoolError,
    Problem,
    TooFewError,
    UsageError,
    changed_meanwhile,
    number_of,
    option,
    say,
)
from gradtool.ops.accumulate.adding import adding_pass, check_count, check_counts, min_count, sum_of_weights
from gradtool.ops.accumulate.buffer import Buffer
from gradtool.ops.accumulate.gradients import GradientRow, check_weight_count, compare, limited, match, measure_each
from gradtool.ops.aligned_read import is_broadcastable
from gradtool.ops.weights import read_weight
from gradtool.store.format.gradset import quoted
from gradtool.store.format.selection import check_dtypes
from gradtool.store.transaction.inputs import Inputs, OpenSets, open_to_read
from gradtool.store.transaction.open import open_unlocked
from gradtool.validators import FROM_MINUS_ONE_TO_ONE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from gradtool.ops.accumulate.gradients import Contribution
    from gradtool.ops.call import Call
    from gradtool.ops.weights import WeightList
    from gradtool.options import AccumulateOptions
    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.format.layout import NewSet
    from gradtool.store.source import Source

    Shape = tuple[int, ...]

# In the order in which they are applied: from the file alone, from headers, and from values.
READABLE, WEIGHTED, COMPLETE, FINITE, NORM, COSINE = "readable", "weighted", "complete", "finite", "norm", "cosine"
_ORDER = (READABLE, WEIGHTED, COMPLETE, FINITE, NORM, COSINE)
_NUMBER = r"-?[0-9]*\.?[0-9]+(?:e-?[0-9]+)?"
_FORM = re.compile(rf"({READABLE}|{WEIGHTED}|{COMPLETE}|{FINITE})|({NORM}[<>]=)({_NUMBER})x|({COSINE}>=)({_NUMBER})")
_FORMS = f"{READABLE}, {WEIGHTED}, {COMPLETE}, {FINITE}, {NORM}<=Kx, {NORM}>=Kx or {COSINE}>=C"


class Rule(NamedTuple):
    """A rule as it was given: its kind and, for norms and cosines, its comparison and bound."""

    text: str
    kind: str
    compares: str = ""
    bound: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a rule; raise `UsageError` if it is none."""
        parts = _FORM.fullmatch(text.lower())
        if parts is None:
            hint = "quote the rule, because < and > redirect in a shell" if text.lower() in (NORM, COSINE) else None
            raise UsageError(say("{} must be {}, not {!r}", option("screen"), _FORMS, text), hint=hint)
        if parts[1]:
            return cls(text, parts[1])
        head, bound = parts[2] or parts[4], float(parts[3] or parts[5])
        if parts[4]:
            FROM_MINUS_ONE_TO_ONE.require(option("screen", text), bound)
        return cls(text, head[:-2], head[-2:], bound)

    def holds(self, value: float, unit: float = 1.0) -> bool:
        """Check a value against the bound, in units; NaN is never within it."""
        return value <= self.bound * unit if self.compares == "<=" else value >= self.bound * unit


def rules_of(options: AccumulateOptions) -> list[Rule]:
    """Return the rules of a call in the order in which they are applied; raise `UsageError` for what is none."""
    return sorted(map(Rule.parse, options.screen), key=lambda rule: _ORDER.index(rule.kind))


@dataclass(frozen=True, kw_only=True)
class ScreenedRow:
    """A gradient that was left out: the first rule that it failed, and why."""

    rule: str
    reason: str
    file: str


class Screening:
    """The gradients of a call by their numbers: those that passed all rules so far, and the rows of the others.

    Without rules, all have passed. Weights from a list become those of the options.
    """

    def __init__(self, call: Call, options: AccumulateOptions, buffers: int, listed: WeightList | None) -> None:
        self._call, self._options, self._buffers = call, options, buffers
        self._paths, self._rules = list(call.inputs.paths[buffers:]), rules_of(options)
        self._passed = list(range(len(self._paths)))
        self._rows: dict[int, GradientRow] = {}
        self._sources: list[Source] = []
        self.screened: list[ScreenedRow] = []
        self.warnings: list[Problem] = []
        self._weights, self._unweighted = list(options.weight), dict[int, Problem]()
        if listed is not None:
            self._take_weights(listed)
        elif self._rules:
            check_weight_count(options, len(self._paths))

    @property
    def remaining_options(self) -> AccumulateOptions:
        """The options, with the weights of the gradients that passed."""
        if len(self._weights) != len(self._paths):
            return self._options
        return self._options.replace(weight=[self._weights[number] for number in self._passed])

    def opened(self, created: NewSet | None) -> OpenSets | None:
        """Apply the rules, if there are any, and return the sets that are left: open, but not locked.

        Raises:
            TooFewError: too few gradients passed.
            BadInputError: a gradient is invalid in a way that no rule is about, or the buffer is.
            SystemRefusedError: a file is in use, half changed, or cannot be read.
        """
        if not self._rules:
            return None
        check_count(self._options, len(self._paths))
        self._leave_out(READABLE, self._unreadable())
        inputs = self._call.inputs
        paths = [*inputs.paths[: self._buffers], *(self._paths[number] for number in self._passed)]
        # Types are checked once it is known what is left.
        opened = open_unlocked(Inputs(paths, inputs.include, inputs.exclude, renames=inputs.renames), self._options)
        sets = dict(zip(self._passed, opened.sets[self._buffers :], strict=True))
        self._leave_out(WEIGHTED, self._without_weight(sets))
        self._leave_out(COMPLETE, self._incomplete(opened, sets))
        opened = self._restricted(opened, sets)
        check_dtypes(opened.selected, inputs.dtypes or ())
        if any(rule.kind in (FINITE, NORM, COSINE) for rule in self._rules):
            with self._call.reading(opened):
                self._apply_to_values(opened, buffer_in(opened, created).targets)
            opened = self._restricted(opened, sets)
        self._sources = [shard.source for gradset in opened.sets[self._buffers :] for shard in gradset.shards]
        self._call.inputs = inputs._replace(paths=[gradset.name for gradset in opened.sets], listed=None)
        return opened

    def require_unchanged(self) -> None:
        """Raise `SystemRefusedError` if a gradient has changed since it passed."""
        for source in self._sources:
            if not source.is_unchanged:
                raise changed_meanwhile(source.name)

    def all_rows(self, rows: Sequence[GradientRow]) -> list[GradientRow]:
        """Merge the rows of the gradients that passed with those of the others, in the order of the call."""
        numbered = self._rows | dict(zip(self._passed, rows, strict=True))
        return [numbered[number] for number in sorted(numbered)]

    def _take_weights(self, listed: WeightList) -> None:
        listed.require_known(self._paths)
        for number, path in enumerate(self._paths):
            try:
                self._weights.append(listed.weight_of(path))
            except BadInputError as error:
                self._weights.append(math.nan)
                (self._unweighted[number],) = error.problems
        if self._unweighted and all(rule.kind != WEIGHTED for rule in self._rules):
            raise BadInputError.from_problems(list(self._unweighted.values()))

    def _leave_out(self, kind: str, failures: Iterable[tuple[int, Problem]]) -> None:
        """Leave out the gradients that fail a rule, if the call has it."""
        for rule in [rule for rule in self._rules if rule.kind == kind][:1]:
            for number, problem in list(failures):
                self._fail(number, rule, problem)

    def _fail(self, number: int, rule: Rule, problem: Problem, row: GradientRow | None = None) -> None:
        """Leave out a gradient, whose row may be known already."""
        name = str(Path(self._paths[number]))
        # The path of the gradient comes first anyway.
        place = replace(problem, message="", file=None if problem.file == name else problem.file).line
        reason = say("{}: {}", place, problem.message) if place else problem.message
        self._passed.remove(number)
        self._rows[number] = replace(row or GradientRow(file=name), taken=False, screened=rule.text)
        self.screened.append(ScreenedRow(rule=rule.text, reason=reason, file=name))
        message = say("left out by {}: {}", option("screen", rule.text), reason)
        self.warnings.append(Problem("screened", message, name))

    def _require_enough(self) -> None:
        needed, left = max(self._options.at_least or 1, min_count(self._options)), len(self._passed)
        if left < needed:
            message = say("{} leaves {:,} of {}", option("screen"), left, number_of(len(self._paths), "gradient"))
            message = say("{}, but at least {:,} must be left; nothing written", message, needed)
            raise TooFewError.from_problems([Problem("too-few", message), *self.warnings])

    def _restricted(self, opened: OpenSets, sets: Mapping[int, GradientSet]) -> OpenSets:
        """Return the buffer, if there is one, and the gradients that passed, which must be enough."""
        self._require_enough()
        left = [*opened.sets[: self._buffers], *(sets[number] for number in self._passed)]
        return OpenSets(left, [selected for gradset in left for selected in opened.selected_in(gradset)])

    def _unreadable(self) -> Iterator[tuple[int, Problem]]:
        for number, path in enumerate(self._paths):
            try:
                open_to_read(Inputs([path]))
            except GradtoolError as error:
                # Not those about this machine, or about runs in progress.
                is_denied = getattr(error, "errno", None) in (errno.EACCES, errno.EPERM)
                if not (isinstance(error, BadInputError) or is_denied or error.problems[0].code == "link"):
                    raise
                yield number, error.problems[0]

    def _without_weight(self, sets: Mapping[int, GradientSet]) -> Iterator[tuple[int, Problem]]:
        for number, gradset in sets.items():
            if number in self._unweighted:
                yield number, self._unweighted[number]
            elif self._options.weight_key is not None:
                try:
                    read_weight(gradset, self._options.weight_key)
                except BadInputError as error:
                    yield number, error.problems[0]

    def _incomplete(self, opened: OpenSets, sets: Mapping[int, GradientSet]) -> Iterator[tuple[int, Problem]]:
        """Compare tensors with those of the buffer or, without one, with those that most gradients have."""
        self._require_enough()
        selected = {number: opened.selected_in(sets[number]) for number in self._passed}
        buffer = [tensor for gradset in opened.sets[: self._buffers] for _, tensor in opened.selected_in(gradset)]
        shapes = {tensor.name: tensor.shape for tensor in buffer} or _usual_shapes(selected.values())
        for number, tensors in selected.items():
            problem = next(self._gaps(tensors, shapes, "the buffer" if buffer else "most gradients"), None)
            if problem is not None:
                yield number, problem

    def _gaps(self, selected: Sequence[Selected], shapes: Mapping[str, Shape], whole: str) -> Iterator[Problem]:
        """Yield what is wrong with the tensors of a gradient."""
        names = {tensor.name for _, tensor in selected}
        if missing := [name for name in shapes if name not in names]:
            yield Problem("", f"lacks {number_of(len(missing), 'tensor')} of {whole} ({quoted(missing)})")
        if extra := [name for name in names if name not in shapes]:
            yield Problem(
                "", f"has {number_of(len(extra), 'tensor')} beyond those of {whole} ({quoted(sorted(extra))})"
            )
        for _, tensor in selected:
            shape, usual = tensor.shape, shapes.get(tensor.name, tensor.shape)
            if not (is_broadcastable(shape, usual) if self._buffers else shape == usual):
                message = f"shape {list(shape)}, where {whole} {'has' if self._buffers else 'have'} {list(usual)}"
                yield Problem("", message, tensor=tensor.name)
        try:
            check_dtypes(selected, self._call.inputs.dtypes or ())
        except BadInputError as error:
            yield error.problems[0]

    def _apply_to_values(self, opened: OpenSets, targets: Sequence[Selected]) -> None:
        """Apply the rules about values. NaN and Inf fail the first of them, whichever it is."""
        options, rules = self.remaining_options, [rule for rule in self._rules if rule.kind in (FINITE, NORM, COSINE)]
        contributions, _ = match(options, targets, opened, opened.sets[self._buffers :])
        measured: dict[int, Contribution] = {}
        each = measure_each(self._call, options, targets, contributions)
        for number, (contribution, nonfinite) in zip(list(self._passed), each, strict=True):
            measured[number] = contribution
            if nonfinite:
                self._fail(number, rules[0], nonfinite[0], contribution.row)
        self._require_enough()
        norms = {number: measured[number].row.norm or 0.0 for number in self._passed}
        ordered = sorted(norms.values())
        median = ordered[(len(ordered) - 1) // 2] / 2 + ordered[len(ordered) // 2] / 2
        for rule in [rule for rule in rules if rule.kind == NORM]:
            for number in [number for number in self._passed if not rule.holds(norms[number], median)]:
                times = norms[number] / median if median else math.inf
                message = f"norm {norms[number]:.6g} is {times:.3g} times the median {median:.6g}"
                self._fail(number, rule, Problem("", message), measured[number].row)
        self._require_enough()
        if rules[-1].kind == COSINE:
            accepted = [limited(options, measured[number]) for number in self._passed]
            check_counts(options, targets, accepted)
            _, adding = adding_pass(options, targets, accepted, sum_of_weights(options, accepted))
            compared = dict(zip(self._passed, compare(self._call, adding, accepted), strict=True))
            for rule in [rule for rule in rules if rule.kind == COSINE]:
                for number in list(self._passed):
                    row, cosine = compared[number].row, compared[number].row.cosine or 0.0
                    if not rule.holds(cosine):
                        self._fail(number, rule, Problem("", f"cosine to the result is {cosine:.3g}"), row)


def buffer_in(opened: OpenSets, created: NewSet | None) -> Buffer:
    """Return the buffer of a call, which is the first set, or the new set that has the tensors of all gradients."""
    if created is None:
        return Buffer(opened.selected_in(opened.sets[0]), opened.sets[0])
    return Buffer.create(created, opened.selected, opened.sets[0].shards[0].metadata)


def _usual_shapes(each: Collection[Sequence[Selected]]) -> dict[str, Shape]:
    """Return the tensors that more than half of the gradients have, each with its commonest shape."""
    shapes: dict[str, Counter[Shape]] = {}
    for selected in each:
        for _, tensor in selected:
            shapes.setdefault(tensor.name, Counter())[tensor.shape] += 1
    return {name: counts.most_common(1)[0][0] for name, counts in shapes.items() if 2 * counts.total() > len(each)}
