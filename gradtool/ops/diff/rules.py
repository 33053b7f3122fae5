"""Rules by name, `REGEX: CONDITION`: the first one whose regular expression matches the whole name decides."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import BadInputError, Problem, UsageError, option, say
from gradtool.ops.bounds import Bound
from gradtool.ops.diff.comparison import COUNTS, MAXIMA, Metrics
from gradtool.store.format.paths import read_list
from gradtool.store.format.selection import compiled, first_full_matches
from gradtool.validators import FROM_MINUS_ONE_TO_ONE, NOT_NEGATIVE, word

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping, Sequence

    from gradtool.ops.diff.comparison import Comparison
    from gradtool.options import DiffOptions
    from gradtool.store.format.gradset import Selected

_EXAMPLE = ".*: rel_l2<=1e-3 or max_abs<=1e-6"
_METRICS = (*Metrics._fields, *MAXIMA, *COUNTS)
_ALIASES = {"max_abs": "max_abs_diff", "max_rel": "max_rel_diff"}
_WORDS = {"bits": "differing_bits<=0", "identical": "differing_bits<=0", "close": "not_close<=0"}
_HINT = f"use {', '.join(_WORDS)}, or METRIC<=X or METRIC>=X with a metric of {', '.join((*_ALIASES, *_METRICS))}"
_HINT += "; quote the rule, because < and > redirect in a shell"
_EXCEEDS = {"<=": "is above", ">=": "is below", "<": "is not below", ">": "is not above"}
# The limits that apply to the elements of all tensors.
_EXCLUDED = ("rtol", "atol", "max_ulp", "close", "bits")


@dataclass(frozen=True)
class RuleRow:
    """One rule: the number of `tensors` that it decides, and of those that `failed`."""

    rule: str
    tensors: int
    failed: int


class Rule(NamedTuple):
    """The text of a rule, the names it is for, and its condition: all bounds of one of the alternatives must hold."""

    text: str
    pattern: re.Pattern[str]
    alternatives: Sequence[Sequence[Bound]]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a rule; the last colon ends the regular expression. Raise `UsageError` if it is none."""
        pattern, _, condition = word(option("rule"), text).rpartition(":")
        if not pattern.strip():
            raise UsageError(say("{} must be REGEX: CONDITION, such as {!r}", option("rule", text), _EXAMPLE))
        (expression,) = compiled([pattern.strip()], "rule")
        parts = [part.split(" and ") for part in " ".join(condition.lower().split()).split(" or ")]
        return cls(text, expression, [[_bound(text, bound) for bound in alternative] for alternative in parts])

    def failures(self, figures: Mapping[str, float]) -> list[Bound]:
        """Return the bounds that the figures of a tensor exceed; none if all bounds of an alternative hold."""
        failed = [[bound for bound in bounds if not bound.holds(figures[bound.metric])] for bounds in self.alternatives]
        return list(dict.fromkeys(chain.from_iterable(failed))) if all(failed) else []


def _bound(rule: str, text: str) -> Bound:
    """Parse a part of the condition of a rule; raise `UsageError` if it is none."""
    bound = Bound.parse(_WORDS.get(text, text))
    metric = "" if bound is None else _ALIASES.get(bound.metric, bound.metric)
    if bound is None or not bound.sign or bound.unit or metric not in _METRICS:
        raise UsageError(say("{}: {!r} is not a condition", option("rule", rule), text), hint=_HINT)
    limits = FROM_MINUS_ONE_TO_ONE if metric == "cosine" else NOT_NEGATIVE
    limits.require(say("the limit of {} in {}", bound.metric, option("rule", rule)), bound.limit)
    return bound._replace(metric=metric)


def rules_of(options: DiffOptions) -> list[Rule]:
    """Return the rules of a call: those of its options, then those in its file; raise an error for what is none."""
    conflict = next((name for name in _EXCLUDED if not options.is_default(name)), None)
    if conflict and (options.rule or options.rules):
        message = say("{} and {} exclude each other", option("rule" if options.rule else "rules"), option(conflict))
        raise UsageError(message, hint="write the limit as a rule, such as '.*: max_ulp<=4', '.*: close' or '.*: bits'")
    rules = list(map(Rule.parse, options.rule))
    if options.rules is not None:
        listed = read_list(os.fspath(options.rules), "rule")
        lines = [line.strip() for line in listed.paths]
        try:
            rules += [Rule.parse(line) for line in lines if line and not line.startswith("#")]
        except UsageError as error:
            problem = error.problems[0]
            raise BadInputError(problem.message, file=listed.where, hint=problem.hint) from error
    return rules


def assign(rules: Sequence[Rule], tensors: Sequence[Selected]) -> list[int]:
    """Return the number of the rule for each tensor; raise `BadInputError` for tensors that no rule matches."""
    matches = first_full_matches([tensor.name for _, tensor in tensors], [rule.pattern for rule in rules], "rule")
    names = [(shard.name, tensor.name) for shard, tensor in tensors if tensor.name not in matches]
    if names:
        problems = [Problem("no-match", "no rule matches the name", *entry) for entry in names]
        hint = say("add a last rule for all other tensors, such as {}", option("rule", _EXAMPLE))
        raise BadInputError.from_problems(problems, hint)
    return [matches[tensor.name] for _, tensor in tensors]


def check_rules(
    rules: Sequence[Rule], numbers: Sequence[int], tensors: Sequence[Selected], comparison: Comparison
) -> tuple[list[RuleRow], list[Problem]]:
    """Check each tensor against the rule with its number; return a row for each rule, and a problem for each failure.

    NaN or Inf on one side fails every rule, but has its own problem elsewhere.
    """
    counts, failed, problems = Counter(numbers), Counter[int](), []
    for place, (number, (shard, tensor)) in enumerate(zip(numbers, tensors, strict=False)):
        figures, reasons = comparison.figures(place), []
        for metric, sign, limit, _ in (failures := rules[number].failures(figures)):
            value = f"{figures[metric]:,}" if isinstance(figures[metric], int) else repr(figures[metric])
            index = f" at index {getattr(comparison, f'{metric}_index')[place]}" if metric in MAXIMA else ""
            reasons.append(f"{metric} {value}{index if figures[metric] else ''} {_EXCEEDS[sign]} the limit {limit}")
        failed[number] += bool(failures or figures["nonfinite_a"] or figures["nonfinite_b"])
        if failures:
            message = say("fails {}: {}", option("rule", rules[number].text), " and ".join(reasons))
            problems.append(Problem("different", message, shard.name, tensor.name))
    return [RuleRow(rule.text, counts[n], failed[n]) for n, rule in enumerate(rules)], problems
