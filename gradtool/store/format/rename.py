"""Tensors of gradient sets under other names: `REGEX=REPLACEMENT`, as re.sub has it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import BadInputError, Problem, UsageError
from gradtool.store.format.limits import check_new_name
from gradtool.store.format.patterns import apply, compiled, matching
from gradtool.wording import option, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.store.format.gradset import GradientSet


class Rule(NamedTuple):
    """Every match of a pattern in a name gives way to a text."""

    pattern: re.Pattern[str]
    replacement: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a rule; the last = ends the pattern."""
        pattern, equals, replacement = text.rpartition("=")
        if not equals:
            what = say("{} must be REGEX=REPLACEMENT, not {!r}", option("map"), text)
            raise UsageError(what, hint="use an empty REPLACEMENT to remove what matches")
        (expression,) = compiled([pattern], "map")
        return cls(expression, replacement)

    def applied(self, name: str) -> str:
        """A name under the rule."""
        try:
            return self.pattern.sub(self.replacement, name)
        except (re.error, IndexError) as error:
            what = say("{}: {!r} is not a replacement: {}", option("map"), self.replacement, error)
            raise UsageError(what) from error


class Renames(NamedTuple):
    """Rules, applied one after another, and the sets of a call whose tensors they rename."""

    rules: Sequence[Rule]
    sets: slice

    @classmethod
    def parse(cls, texts: Sequence[str], sets: slice) -> Self:
        """Parse the rules for some of the sets of a call; raises `UsageError` for what is no rule."""
        return cls([Rule.parse(text) for text in texts], sets)

    def applied(self, sets: Sequence[GradientSet]) -> list[GradientSet]:
        """The sets, with renamed tensors.

        Raises:
            UsageError: a replacement is invalid.
            BadInputError: a pattern matches no name, or two tensors of a set would have the same name.
        """
        chosen = list(sets)[self.sets]
        names = {tensor.name: tensor.name for one in chosen for _, tensor in one.tensors}
        for rule in self.rules:
            matching(set(names.values()), [rule.pattern], "map")
            renamed_to = dict(apply(rule.pattern, rule.applied, set(names.values()), "map"))
            names = {old: renamed_to[new] for old, new in names.items()}
        renamed = list(sets)
        renamed[self.sets] = [_renamed(one, names) for one in chosen]
        return renamed


def _renamed(one: GradientSet, names: dict[str, str]) -> GradientSet:
    home: dict[str, str] = {}
    for shard, tensor in one.tensors:
        new = names[tensor.name]
        check_new_name(shard.name, tensor.name, new, option("map"))
        other = home.setdefault(new, tensor.name)
        if other != tensor.name:
            message = say("{} gives the name {!r} to it and to {!r}", option("map"), new, other)
            raise BadInputError(message, file=shard.name, tensor=tensor.name, code="duplicate-name")
    shards, split = (
        tuple(
            replace(shard, tensors=tuple(tensor._replace(name=names[tensor.name]) for tensor in shard.tensors))
            for shard in each
        )
        for each in (one.shards, one.split)
    )
    return replace(one, shards=shards, split=split)


def prefix_problem(names: Sequence[str], other_names: Sequence[str], file: str, other: object) -> Problem | None:
    """Return the problem of a set whose names differ from those of another by a prefix, such as DDP's `module.`.

    The names are those that the other set lacks; None if there is no such prefix.
    """
    for longer, shorter, have, lack, change in (
        (names, other_names, "have", "lack", "remove"),
        (other_names, names, "lack", "have", "add"),
    ):
        prefix = _common_prefix(shorter, longer)
        if prefix is not None:
            rule = f"^{re.escape(prefix)}=" if change == "remove" else "^=" + prefix.replace("\\", r"\\")
            message = f"{len(names)} tensor names {have} the prefix {prefix!r}, which those of {other} {lack}"
            return Problem("extra-tensor", message, file, hint=say("use {} to {} it", option("map", rule), change))
    return None


def _common_prefix(names: Sequence[str], longer: Sequence[str]) -> str | None:
    """Return the prefix that makes all of the names the longer ones."""
    if len(names) != len(longer):
        return None
    for name in longer:
        if names[0] and name.endswith(names[0]):
            prefix = name.removesuffix(names[0])
            if {prefix + short for short in names} == set(longer):
                return prefix
    return None
