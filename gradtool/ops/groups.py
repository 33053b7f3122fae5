"""Groups of tensors, by regular expressions on their names: each group has a norm of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError
from gradtool.store.format.patterns import compiled, matching
from gradtool.wording import option, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.store.format.gradset import Selected

OPTION = "group"


class Group(NamedTuple):
    """The tensors that a pattern matches, by their numbers; or, without a pattern, those that are in no group."""

    pattern: str | None
    numbers: list[int]


def groups_of(selected: Sequence[Selected], patterns: Sequence[str]) -> list[Group]:
    """The group of each pattern, in order, then all other tensors, if there are any; none without a pattern.

    Raises:
        UsageError: a pattern is not a regular expression.
        BadInputError: a pattern matches no tensor, or a tensor is in two groups.
    """
    names = {one.tensor.name for one in selected}
    home: dict[str, int] = {}
    for number, pattern in enumerate(compiled(patterns, OPTION)):
        found = matching(names, [pattern], OPTION)
        if not found.isdisjoint(home):
            first = next(one for one in selected if one.tensor.name in found and one.tensor.name in home)
            raise _in_two(first, patterns[home[first.tensor.name]], pattern.pattern)
        home |= dict.fromkeys(found, number)
    groups = [Group(pattern, []) for pattern in patterns]
    rest = Group(None, [])
    for number, one in enumerate(selected):
        (groups[home[one.tensor.name]] if one.tensor.name in home else rest).numbers.append(number)
    return [*groups, rest] if groups and rest.numbers else groups


def _in_two(one: Selected, first: str, second: str) -> BadInputError:
    what = say("is in two groups, {} and {}", option("group", first), option("group", second))
    hint = say("narrow one of the regular expressions, or skip the tensor with {}", option("exclude"))
    return BadInputError(what, file=one.shard.path, tensor=one.tensor.name, code="two-groups", hint=hint)
