"""Groups of tensors, by regular expressions on their names: each group has a norm of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, option, say
from gradtool.store.format.selection import compiled, matching

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.store.format.gradset import Selected


class Group(NamedTuple):
    """The tensors that a pattern matches, by their numbers; or, without a pattern, those that are in no group."""

    pattern: str | None
    numbers: list[int]


def groups_of(selected: Sequence[Selected], patterns: Sequence[str]) -> list[Group]:
    """Return the group of each pattern, in order, then all other tensors, if there are any; none without a pattern.

    Raises:
        UsageError: a pattern is not a regular expression.
        BadInputError: a pattern matches no tensor, or a tensor is in two groups.
    """
    names = {tensor.name for _, tensor in selected}
    group_by_name: dict[str, int] = {}
    for number, pattern in enumerate(compiled(patterns, "group")):
        matches = matching(names, pattern, "group")
        for shard, tensor in selected:
            if tensor.name in matches and tensor.name in group_by_name:
                first = patterns[group_by_name[tensor.name]]
                what = say("is in two groups, {} and {}", option("group", first), option("group", pattern.pattern))
                hint = say("narrow one of the regular expressions, or skip the tensor with {}", option("exclude"))
                raise BadInputError(what, file=shard.name, tensor=tensor.name, code="two-groups", hint=hint)
        group_by_name |= dict.fromkeys(matches, number)
    groups = [Group(pattern, []) for pattern in patterns]
    rest = Group(None, [])
    for number, (_, tensor) in enumerate(selected):
        (groups[group_by_name[tensor.name]] if tensor.name in group_by_name else rest).numbers.append(number)
    return [*groups, rest] if groups and rest.numbers else groups
