"""Tensors of gradient sets under other names: `REGEX=REPLACEMENT`, as re.sub has it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import BadInputError, UsageError
from gradtool.store.format.limits import check_new_name
from gradtool.store.format.patterns import apply, compiled, matching

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.store.format.gradset import GradientSet


class Rule(NamedTuple):
    """Every match of a pattern in a name gives way to a text."""

    pattern: re.Pattern[str]
    replacement: str

    @classmethod
    def of(cls, text: str) -> Self:
        """The rule that a text spells; the last = ends the pattern."""
        pattern, equals, replacement = text.rpartition("=")
        if not equals:
            raise UsageError(f"--map must be REGEX=REPLACEMENT, not {text!r}; an empty REPLACEMENT removes")
        (expression,) = compiled([pattern], "--map")
        return cls(expression, replacement)

    def applied(self, name: str) -> str:
        """A name under the rule."""
        try:
            return self.pattern.sub(self.replacement, name)
        except (re.error, IndexError) as error:
            raise UsageError(f"--map: {self.replacement!r} is not a replacement: {error}") from error


class Renames(NamedTuple):
    """Rules, applied one after another, and the sets of a call whose tensors they rename."""

    rules: Sequence[Rule]
    sets: slice

    @classmethod
    def of(cls, texts: Sequence[str], sets: slice) -> Self:
        """The rules that texts spell; raises `UsageError` where one spells none."""
        return cls([Rule.of(text) for text in texts], sets)

    def applied(self, sets: Sequence[GradientSet]) -> list[GradientSet]:
        """The sets, with renamed tensors.

        Raises:
            UsageError: a replacement is invalid.
            BadInputError: a pattern matches no name, or two tensors of a set would have the same name.
        """
        chosen = list(sets)[self.sets]
        names = {tensor.name: tensor.name for one in chosen for shard in one.shards for tensor in shard.tensors}
        for rule in self.rules:
            matching(set(names.values()), [rule.pattern], "--map")
            renamed_to = dict(apply(rule.pattern, rule.applied, set(names.values()), "--map"))
            names = {old: renamed_to[new] for old, new in names.items()}
        renamed = list(sets)
        renamed[self.sets] = [_renamed(one, names) for one in chosen]
        return renamed


def _renamed(one: GradientSet, names: dict[str, str]) -> GradientSet:
    home: dict[str, str] = {}
    for shard in one.shards:
        for tensor in shard.tensors:
            new = names[tensor.name]
            check_new_name(shard.path, tensor.name, new, "--map")
            other = home.setdefault(new, tensor.name)
            if other != tensor.name:
                message = f"--map gives it the name {new!r}, and {other!r} too"
                raise BadInputError(message, file=shard.path, tensor=tensor.name, code="duplicate-name")
    shards = (
        replace(shard, tensors=tuple(tensor._replace(name=names[tensor.name]) for tensor in shard.tensors))
        for shard in one.shards
    )
    return replace(one, shards=tuple(shards))
