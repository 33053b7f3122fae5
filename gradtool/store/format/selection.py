"""Select, group and rename tensors by regular expressions on their names, in limited time; check what is selected.

Python's `re` may take forever for a name of 30 characters, and lets no other thread run meanwhile; but it lets the main
thread handle signals. So a timer of CPU time ends it: SIGVTALRM, because SIGALRM may be sent to end the process, and
SIGPROF belongs to profilers.
"""

from __future__ import annotations

import re
import signal
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from gradtool.errors import BadInputError, UsageError, call, option, say, shortened
from gradtool.store.format.header import METADATA
from gradtool.store.format.limits import MAX_NAME
from gradtool.store.format.tensors import INTEGERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from gradtool.errors import Text
    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.format.tensors import Shard

    _T = TypeVar("_T")

# Seconds for a pattern and all names; 400,000 of them take half a second.
LIMIT = 10.0


class _TimeUp(Exception):  # noqa: N818 - it never leaves this module
    pass


def select(sets: Sequence[GradientSet], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Selected]:
    """List the tensors whose name matches any `include` (all, without one) and no `exclude`, in file order.

    Raises:
        UsageError: a pattern is not a regular expression.
        BadInputError: a pattern matches no tensor, or nothing is left.
    """
    everything = [selected for gradset in sets for selected in gradset.tensors]
    if not include and not exclude:
        return everything
    included, excluded = compiled(include, "include"), compiled(exclude, "exclude")
    all_names = {tensor.name for _, tensor in everything}
    names = set().union(*(matching(all_names, pattern, "include") for pattern in included)) if included else all_names
    names = names.difference(*(matching(all_names, pattern, "exclude") for pattern in excluded))
    selected = [entry for entry in everything if entry.tensor.name in names]
    if not selected:
        raise BadInputError(say("{} and {} leave no tensors", option("include"), option("exclude")), code="no-match")
    return selected


def check_dtypes(
    selected: Iterable[Selected], supported: Sequence[str], *, can_exclude: bool = True, can_copy: bool = False
) -> None:
    """Raise `BadInputError` for the first tensor whose dtype the operation cannot work with."""
    for shard, tensor in selected:
        if tensor.dtype not in supported:
            message = f"unsupported dtype {tensor.dtype} (supported: {', '.join(supported)})"
            hint = say("skip it with {}", option("exclude", f"^{re.escape(tensor.name)}$")) if can_exclude else None
            if can_copy and tensor.dtype in INTEGERS:
                hint = say("{}, or copy such tensors with {}", hint, option("others", "copy"))
            raise BadInputError(message, file=shard.name, tensor=tensor.name, code="dtype", hint=hint)


SHARED_NAMES = say(
    "use {} for the norm of the sum, {} for the norm of each path, or {} if the paths are parts of one vector, as from "
    "ranks that each hold a part",
    call("accumulate"),
    call("norm", by_file=True),
    option("concat", True),
)


def require_unique_names(selected: Iterable[Selected], hint: Text) -> None:
    """Raise `BadInputError` if a name is selected in several sets of a call: they may not be parts of one vector."""
    shard_of: dict[str, Shard] = {}
    for shard, tensor in selected:
        first = shard_of.setdefault(tensor.name, shard)
        if first is not shard:
            message = f"is in {first.name} too"
            raise BadInputError(message, file=shard.name, tensor=tensor.name, code="shared-name", hint=hint)


def compiled(patterns: Sequence[str], name: str) -> list[re.Pattern[str]]:
    """Compile the patterns of an option; raise `UsageError` for one that is not a regular expression."""
    expressions = []
    for pattern in patterns:
        try:
            with warnings.catch_warnings(action="ignore"):
                expressions.append(re.compile(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            from gradtool.store.format.hints import shell_pattern_hint  # only needed for the error

            message = say("{} is not a regular expression: {}", option(name, pattern), error)
            raise UsageError(message, hint=shell_pattern_hint(name, pattern)) from error
    return expressions


def matching(names: set[str], pattern: re.Pattern[str], name: str) -> set[str]:
    """Return the names that a pattern of an option matches; raise `BadInputError` if there is none."""
    results = _applied(pattern, lambda tensor: pattern.search(tensor) is not None, names, name)
    matches = {tensor for tensor, is_match in results if is_match}
    if not matches:
        from gradtool.store.format.hints import shell_pattern_hint  # only needed for the error

        message = say("{} matches no tensor name", option(name, pattern.pattern))
        raise BadInputError(message, code="no-match", hint=shell_pattern_hint(name, pattern.pattern, names))
    return matches


def _applied(
    pattern: re.Pattern[str], function: Callable[[str], _T], names: Iterable[str], option_name: str
) -> list[tuple[str, _T]]:
    """Return each name with the result of a function that uses a pattern of an option, unless it takes too long."""
    name, results = "", []
    try:
        with time_limit(LIMIT):
            for name in names:
                results.append((name, function(name)))
    except _TimeUp as error:
        message = "{} takes more than {:g} s of CPU time to match the name"
        raise BadInputError(
            say(message, option(option_name, pattern.pattern), LIMIT),
            tensor=shortened(name),
            code="limit",
            hint="avoid a repetition in a group that is repeated, such as (a+)*, which may take forever",
        ) from error
    return results


def first_full_matches(names: Sequence[str], patterns: Sequence[re.Pattern[str]], option_name: str) -> dict[str, int]:
    """Return for each name the number of the first pattern that matches all of it; leave out the other names."""
    numbers: dict[str, int] = {}
    for number, pattern in enumerate(patterns):
        remaining = [name for name in names if name not in numbers]
        results = _applied(pattern, pattern.fullmatch, remaining, option_name)
        numbers |= {name: number for name, match in results if match}
    return numbers


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `_TimeUp` in the block once this thread has computed for so long.

    Nothing is limited in other threads than the main one, which alone handles signals; where a handler was installed
    from C, because it could not be restored; and where the program that calls uses the timer itself.
    """
    before = signal.getsignal(signal.SIGVTALRM)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before is None or signal.getitimer(signal.ITIMER_VIRTUAL) != (0.0, 0.0):
        yield
        return
    end = time.thread_time() + seconds
    is_armed = True

    def check(_number: int, _frame: object) -> None:
        nonlocal is_armed
        # The timer counts the time of other threads too.
        if is_armed and time.thread_time() >= end:
            is_armed = False
            raise _TimeUp

    try:
        signal.signal(signal.SIGVTALRM, check)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 10)
        try:
            yield
        finally:
            is_armed = False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Group(NamedTuple):
    """The tensors that a pattern matches, by their numbers; or, without a pattern, those that are in no group."""

    pattern: str | None
    numbers: list[int]


def groups_of(selected: Sequence[Selected], patterns: Sequence[str]) -> list[Group]:
    """Return the group of each pattern, in order, then all remaining tensors, if there are any; none without a pattern.

    Raises:
        UsageError: a pattern is not a regular expression.
        BadInputError: a pattern matches no tensor, or a tensor is in two groups.
    """
    if not patterns:
        return []
    names = {tensor.name for _, tensor in selected}
    group_by_name: dict[str, int] = {}
    for number, pattern in enumerate(compiled(patterns, "group")):
        matches = matching(names, pattern, "group")
        for shard, tensor in selected:
            if tensor.name in matches and tensor.name in group_by_name:
                first = patterns[group_by_name[tensor.name]]
                message = say("is in two groups, {} and {}", option("group", first), option("group", pattern.pattern))
                hint = say("narrow one of the regular expressions, or skip the tensor with {}", option("exclude"))
                raise BadInputError(message, file=shard.name, tensor=tensor.name, code="two-groups", hint=hint)
        group_by_name |= dict.fromkeys(matches, number)
    groups = [Group(pattern, []) for pattern in patterns]
    remaining = Group(None, [])
    for number, (_, tensor) in enumerate(selected):
        (groups[group_by_name[tensor.name]] if tensor.name in group_by_name else remaining).numbers.append(number)
    return [*groups, remaining] if remaining.numbers else groups


class Renames(NamedTuple):
    """Pairs of pattern and replacement, applied one after another, and the sets of a call whose tensors they rename."""

    rules: list[tuple[re.Pattern[str], str]]
    sets: slice

    @classmethod
    def parse(cls, texts: Sequence[str], sets: slice) -> Self:
        """Parse rules REGEX=REPLACEMENT, as re.sub has them; the last = ends the pattern. Else raise `UsageError`."""
        rules = []
        for text in texts:
            pattern, equals, replacement = text.rpartition("=")
            if not equals:
                message = say("{} must be REGEX=REPLACEMENT, not {!r}", option("map"), text)
                raise UsageError(message, hint="use an empty REPLACEMENT to remove what matches")
            (expression,) = compiled([pattern], "map")
            rules.append((expression, replacement))
        return cls(rules, sets)

    def applied(self, sets: Sequence[GradientSet]) -> list[GradientSet]:
        """Return the sets, with renamed tensors.

        Raises:
            UsageError: a replacement is invalid.
            BadInputError: a pattern matches no name, or two tensors of a set would have the same name.
        """
        result = list(sets)
        new_names = {tensor.name: tensor.name for gradset in result[self.sets] for _, tensor in gradset.tensors}
        for pattern, replacement in self.rules:
            names = set(new_names.values())
            matching(names, pattern, "map")
            try:
                renamed = dict(_applied(pattern, partial(pattern.sub, replacement), names, "map"))
            except (re.error, IndexError) as error:
                message = say("{}: {!r} is not a replacement: {}", option("map"), replacement, error)
                raise UsageError(message) from error
            new_names = {old: renamed[new] for old, new in new_names.items()}
        result[self.sets] = [_renamed(gradset, new_names) for gradset in result[self.sets]]
        return result


def _renamed(gradset: GradientSet, new_names: Mapping[str, str]) -> GradientSet:
    old_names: dict[str, str] = {}
    for shard, tensor in gradset.tensors:
        new = new_names[tensor.name]
        check_new_name(shard.name, tensor.name, new, option("map"))
        if old_names.setdefault(new, tensor.name) != tensor.name:
            message = say("{} gives the name {!r} to it and to {!r}", option("map"), new, old_names[new])
            raise BadInputError(message, file=shard.name, tensor=tensor.name, code="duplicate-name")

    def renamed(shard: Shard) -> Shard:
        return replace(shard, tensors=tuple(tensor._replace(name=new_names[tensor.name]) for tensor in shard.tensors))

    return replace(gradset, shards=tuple(map(renamed, gradset.shards)), split=tuple(map(renamed, gradset.split)))


def check_new_name(file: str, tensor: str, new: str, option: Text) -> None:
    """Raise `BadInputError` for the new name of a tensor, or of its gradient, if no tensor can have it."""
    message, code = say("{} makes the new name {!r}", option, shortened(new)), ""
    if new == METADATA:
        message = say("{}, which the format reserves", message)
    elif len(new) > MAX_NAME:
        code, limit = "limit", "{}, which exceeds the limit of {:,} characters (it has {:,})"
        message = say(limit, message, MAX_NAME, len(new))
    else:
        return
    raise BadInputError(message, file=file, tensor=tensor, code=code, hint="choose another name")
