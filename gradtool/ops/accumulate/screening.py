"""Screens gradients: those that fail a rule are left out, and named, before anything is written.

The rules are applied in the order of their cost, whatever the order in which they were given, and each only to the
gradients that passed those before. What is left is then added as if the call had named nothing else.
"""

from __future__ import annotations

import errno
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
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
from gradtool.ops.bounds import Bound
from gradtool.ops.weights import read_weight
from gradtool.store.format.gradset import quoted
from gradtool.store.transaction.inputs import Inputs, open_to_read
from gradtool.store.transaction.open import open_unlocked
from gradtool.validators import FROM_MINUS_ONE_TO_ONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradtool.ops.accumulate.gradients import Contribution
    from gradtool.ops.call import Call
    from gradtool.ops.weights import WeightList
    from gradtool.options import AccumulateOptions
    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.format.layout import NewSet
    from gradtool.store.transaction.inputs import OpenSets

    Shape = tuple[int, ...]
    # The numbers of gradients that fail a rule, and why.
    Failures = Iterator[tuple[int, Problem]]

READABLE, WEIGHTED, COMPLETE, FINITE, NORM, COSINE = "readable", "weighted", "complete", "finite", "norm", "cosine"
# In the order in which they are applied.
_FORMS = (READABLE, WEIGHTED, COMPLETE, FINITE, f"{NORM}<=Kx", f"{NORM}>=Kx", f"{COSINE}>=C")


class Rule(NamedTuple):
    """A rule: its place in the order, its kind, its text, and its bound, which is a word alone for most kinds."""

    place: int
    kind: str
    text: str
    bound: Bound

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a rule; raise `UsageError` if it is none."""
        bound = Bound.parse(text.lower())
        form = "" if bound is None else bound.metric + bound.sign + ("Kx" if bound.unit else "C" if bound.sign else "")
        if bound is None or form not in _FORMS:
            hint = "quote the rule, because < and > redirect in a shell" if form in (NORM, COSINE) else None
            message = say("{} must be {} or {}, not {!r}", option("screen"), ", ".join(_FORMS[:-1]), _FORMS[-1], text)
            raise UsageError(message, hint=hint)
        if bound.metric == COSINE:
            FROM_MINUS_ONE_TO_ONE.require(option("screen", text), bound.limit)
        return cls(_FORMS.index(form), bound.metric, text, bound)


def rules_of(options: AccumulateOptions) -> list[Rule]:
    """Return the rules of a call in the order in which they are applied; raise `UsageError` for what is none."""
    return sorted(map(Rule.parse, options.screen))


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
        # Of those that passed, once they are open.
        self._gradients: list[GradientSet] = []
        self._measured: dict[int, Contribution] = {}
        self._nonfinite: dict[int, Problem] = {}
        self._rows: dict[int, GradientRow] = {}
        self.screened: list[ScreenedRow] = []
        self.warnings: list[Problem] = []
        self._weights, self._unweighted = list(options.weight), dict[int, Problem]()
        if listed is not None:
            self._weights, self._unweighted = listed.weights_of(self._paths)
            if self._unweighted and all(rule.kind != WEIGHTED for rule in self._rules):
                raise BadInputError.from_problems(list(self._unweighted.values()))
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

        Raises errors as `open_unlocked` and `match` do, unless a rule is about them, and `TooFewError`.
        """
        if not self._rules:
            return None
        check_count(self._options, len(self._paths))
        self._apply(READABLE, self._unreadable)
        inputs = self._call.inputs
        paths = [*inputs.paths[: self._buffers], *(self._paths[number] for number in self._passed)]
        self._call.inputs = inputs._replace(paths=paths, listed=None if self._rows else inputs.listed)
        # Types are checked once it is known what is left.
        opened = open_unlocked(self._call.inputs._replace(dtypes=None), self._options)
        self._gradients = opened.sets[self._buffers :]
        self._apply(WEIGHTED, self._without_weight)
        self._apply(COMPLETE, partial(self._incomplete, opened))
        left = self._left(opened)
        inputs.check_dtypes(left.selected)
        if self._rules[-1].kind in (FINITE, NORM, COSINE):
            with self._call.reading(left):
                targets = buffer_in(left, created).targets
                self._measure(left, targets)
                self._apply(FINITE, self._not_finite)
                self._apply(NORM, self._far_from_median)
                self._apply(COSINE, partial(self._in_another_direction, targets))
            left = self._left(opened)
        self._call.inputs = inputs._replace(paths=[gradset.name for gradset in left.sets], listed=None)
        return left

    def require_unchanged(self) -> None:
        """Raise `SystemRefusedError` if a gradient has changed since it passed."""
        for gradset in self._gradients:
            for shard in gradset.shards:
                if not shard.source.is_unchanged:
                    raise changed_meanwhile(shard.name)

    def all_rows(self, rows: Sequence[GradientRow]) -> list[GradientRow]:
        """Merge the rows of the gradients that passed with those of the others, in the order of the call."""
        numbered = self._rows | dict(zip(self._passed, rows, strict=True))
        return [numbered[number] for number in sorted(numbered)]

    def _left(self, opened: OpenSets) -> OpenSets:
        """Return the buffer, if there is one, and the gradients that passed."""
        return opened.restricted_to([*opened.sets[: self._buffers], *self._gradients])

    def _apply(self, kind: str, failures: Callable[[Rule], Failures]) -> None:
        """Apply the rules of a kind; raise `TooFewError` if too few gradients pass."""
        for rule in (rule for rule in self._rules if rule.kind == kind):
            failed = dict(failures(rule))
            for number, problem in failed.items():
                self._leave_out(number, rule, problem)
            passes = [number not in failed for number in self._passed]
            self._passed = list(compress(self._passed, passes))
            self._gradients = list(compress(self._gradients, passes))
        needed, left = max(self._options.at_least or 1, min_count(self._options)), len(self._passed)
        if left < needed:
            message = say("{} leaves {:,} of {}", option("screen"), left, number_of(len(self._paths), "gradient"))
            message = say("{}, but at least {:,} must be left; nothing written", message, needed)
            raise TooFewError.from_problems([Problem("too-few", message), *self.warnings])

    def _leave_out(self, number: int, rule: Rule, problem: Problem) -> None:
        name = str(Path(self._paths[number]))
        # The path of the gradient comes first anyway.
        place = "" if problem.file in (None, name) else f"{problem.file}: "
        reason = say("{}{}", place + (f"tensor {problem.tensor!r}: " if problem.tensor else ""), problem.message)
        row = self._measured[number].row if number in self._measured else GradientRow(file=name)
        self._rows[number] = replace(row, taken=False, screened=rule.text)
        self.screened.append(ScreenedRow(rule=rule.text, reason=reason, file=name))
        message = say("left out by {}: {}{}", option("screen", rule.text), place, problem.message)
        self.warnings.append(replace(problem, code="screened", message=message, file=name, hint=None))

    def _unreadable(self, _rule: Rule) -> Failures:
        for number, path in enumerate(self._paths):
            try:
                open_to_read(Inputs([path]))
            except GradtoolError as error:
                # Not those about this machine, or about runs in progress.
                is_denied = getattr(error, "errno", None) in (errno.EACCES, errno.EPERM)
                if not (isinstance(error, BadInputError) or is_denied or error.problems[0].code == "link"):
                    raise
                yield number, error.problems[0]

    def _without_weight(self, _rule: Rule) -> Failures:
        yield from ((number, self._unweighted[number]) for number in self._passed if number in self._unweighted)
        for number, gradset in zip(self._passed, self._gradients, strict=True):
            try:
                if self._options.weight_key is not None:
                    read_weight(gradset, self._options.weight_key)
            except BadInputError as error:
                yield number, error.problems[0]

    def _incomplete(self, opened: OpenSets, _rule: Rule) -> Failures:
        """Compare tensors with those of the buffer or, without one, with those that most gradients have."""
        each = [opened.selected_in(gradset) for gradset in self._gradients]
        buffer = [tensor for gradset in opened.sets[: self._buffers] for _, tensor in opened.selected_in(gradset)]
        shapes = {tensor.name: tensor.shape for tensor in buffer} or _usual_shapes(each)
        for number, selected in zip(self._passed, each, strict=True):
            for problem in self._gaps(selected, shapes):
                yield number, problem
                break

    def _gaps(self, selected: Sequence[Selected], shapes: dict[str, Shape]) -> Iterator[Problem]:
        """Yield what is wrong with the tensors of a gradient."""
        whole, names = "the buffer" if self._buffers else "most gradients", [tensor.name for _, tensor in selected]
        if missing := [name for name in shapes if name not in set(names)]:
            yield Problem("", f"lacks {number_of(len(missing), 'tensor')} of {whole} ({quoted(missing)})")
        if extra := [name for name in names if name not in shapes]:
            yield Problem("", f"has {number_of(len(extra), 'tensor')} beyond those of {whole} ({quoted(extra)})")
        for _, tensor in selected:
            shape, usual = tensor.shape, shapes.get(tensor.name, tensor.shape)
            if not (is_broadcastable(shape, usual) if self._buffers else shape == usual):
                yield Problem("", f"shape {list(shape)}, but {list(usual)} in {whole}", tensor=tensor.name)
        try:
            self._call.inputs.check_dtypes(selected)
        except BadInputError as error:
            yield error.problems[0]

    def _measure(self, opened: OpenSets, targets: Sequence[Selected]) -> None:
        contributions, _ = match(self.remaining_options, targets, opened, self._gradients)
        each = measure_each(self._call, self._options, targets, contributions)
        for number, (contribution, nonfinite) in zip(self._passed, each, strict=True):
            self._measured[number] = contribution
            if nonfinite:
                self._nonfinite[number] = nonfinite[0]

    def _not_finite(self, _rule: Rule) -> Failures:
        """Yield what contains NaN or Inf; the first of the rules about values, whichever it is, leaves it out."""
        yield from ((number, self._nonfinite[number]) for number in self._passed if number in self._nonfinite)

    def _far_from_median(self, rule: Rule) -> Failures:
        yield from self._not_finite(rule)
        norms = {number: self._measured[number].row.norm or 0.0 for number in self._passed}
        ordered = sorted(norm for number, norm in norms.items() if number not in self._nonfinite) or [0.0]
        median = ordered[(len(ordered) - 1) // 2] / 2 + ordered[len(ordered) // 2] / 2
        for number, norm in norms.items():
            if number not in self._nonfinite and not rule.bound.holds(norm, median):
                times = norm / median if median else math.inf
                yield number, Problem("", f"norm {norm:.6g} is {times:.3g} times the median {median:.6g}")

    def _in_another_direction(self, targets: Sequence[Selected], rule: Rule) -> Failures:
        yield from self._not_finite(rule)
        options, numbers = self._options, [number for number in self._passed if number not in self._nonfinite]
        accepted = [limited(options, self._measured[number]) for number in numbers]
        if not accepted:
            return
        check_counts(options, targets, accepted)
        _, adding = adding_pass(options, targets, accepted, sum_of_weights(options, accepted))
        for number, contribution in zip(numbers, compare(self._call, options, adding, accepted), strict=True):
            self._measured[number], cosine = contribution, contribution.row.cosine or 0.0
            if not rule.bound.holds(cosine):
                yield number, Problem("", f"cosine to the result is {cosine:.3g}")


def buffer_in(opened: OpenSets, created: NewSet | None) -> Buffer:
    """Return the buffer of a call, which is the first set, or the new set that has the tensors of all gradients."""
    if created is None:
        return Buffer(opened.selected_in(opened.sets[0]), opened.sets[0])
    return Buffer.create(created, opened)


def _usual_shapes(each: Sequence[Sequence[Selected]]) -> dict[str, Shape]:
    """Return the tensors that more than half of the gradients have, each with its commonest shape."""
    shapes: dict[str, Counter[Shape]] = {}
    for selected in each:
        for _, tensor in selected:
            shapes.setdefault(tensor.name, Counter())[tensor.shape] += 1
    return {name: counts.most_common(1)[0][0] for name, counts in shapes.items() if 2 * counts.total() > len(each)}
