"""The state of a limit that learns: what it knows of the norms so far, as a small JSON file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gradtool import validators
from gradtool.errors import BadInputError, shortened
from gradtool.store.format.header import read_regular
from gradtool.store.transaction.small import SmallFile

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from gradtool.ops.limits import Rule

VERSION = 1
RULES = ("z", "percentile")
MOST_NORMS = 100_000
# A norm takes up to 30 bytes.
_MOST_BYTES = 4_000_000
# Norms above it have no variance in float64.
LARGEST = 2.0**500
_INFINITY = "Infinity"
_AGAIN = "delete it to start again, or give another --state"


@dataclass(frozen=True)
class State:
    """What a rule knows: how many norms it has seen, and what it keeps of them.

    `norms` are those that a percentile is taken of, or those of a warm-up that has not ended; `mean` and `variance` are
    the moving ones once it has.
    """

    rule: str
    norm_type: float
    steps: int = 0
    mean: float | None = None
    variance: float | None = None
    norms: tuple[float, ...] = ()

    def seen(self, **changes: Any) -> Self:
        """The state after one more norm."""
        return replace(self, steps=self.steps + 1, **changes)


class Kept(NamedTuple):
    """A state with its path and its status when it was read; None if there was no file."""

    path: Path
    stat: os.stat_result | None
    state: State

    @classmethod
    def read(cls, path: Path, rule: Rule, norm_type: float) -> Self:
        """The state of a rule for norms of an order; one that knows nothing if the file does not exist.

        Raises:
            BadInputError: the file is not a state, or that of another rule or order.
            SystemRefusedError: it cannot be read.
        """
        try:
            stat, content = read_regular(path, _MOST_BYTES)
        except BadInputError as error:
            if error.problems[0].code != "missing-file":
                raise
            return cls(path, None, State(rule.name, norm_type))
        state = _parsed(path, content)
        if state.rule != rule.name:
            raise _bad(path, f"is the state of --limit {state.rule}, not of --limit {rule.name}; give another --state")
        if state.norm_type != norm_type:
            raise _bad(path, f"has norms of order {state.norm_type!r}, not {norm_type!r}; give another --state")
        return cls(path, stat, state)

    def new(self, state: State) -> SmallFile:
        """The file with a later state."""
        document = {"gradtool_state": VERSION} | vars(state)
        if math.isinf(state.norm_type):
            document["norm_type"] = _INFINITY  # JSON has no such number.
        # A line for each key: with an indent, json takes several times as long for many norms.
        lines = ",\n".join(f' "{key}": {json.dumps(value, allow_nan=False)}' for key, value in document.items())
        return SmallFile(self.path, self.stat, f"{{\n{lines}\n}}\n".encode())


def _parsed(path: Path, content: bytes) -> State:
    """The state in a file, of which nothing is taken for granted."""
    try:
        document = _loaded(content)
        version = document.pop("gradtool_state")
        if type(version) is int and version == VERSION:
            return _checked(document)
        why = f"its version is {version!r}, not {VERSION}"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    raise _bad(path, f"is not a state that this version of gradtool clip reads ({shortened(why)}); {_AGAIN}")


def _loaded(content: bytes) -> dict[str, Any]:
    if not content.lstrip().startswith(b"{"):
        raise ValueError("it is not a JSON object")
    # Each value of a list has a comma: they are counted before they are parsed.
    if content.count(b",") > MOST_NORMS + 100 or max(map(content.count, (b"[", b"{"))) > 1:
        raise ValueError("it has too many values")
    document: dict[str, Any] = json.loads(content, parse_int=partial(validators.whole, "each count"))
    return document


def _checked(document: dict[str, Any]) -> State:
    if document.keys() != State.__annotations__.keys():
        raise ValueError(f"its keys must be gradtool_state, {', '.join(State.__annotations__)}")
    rule, order, steps = document["rule"], document["norm_type"], document["steps"]
    order = math.inf if order == _INFINITY else _number(order)
    norms = tuple(map(_number, document["norms"]))
    known = [None if document[key] is None else _number(document[key]) for key in ("mean", "variance")]
    mean, variance = known
    # Only the z-score has moments, and none of norms whose squares overflow.
    largest = LARGEST if rule == "z" else math.inf
    is_sound = (mean is None) == (variance is None) and max(norms, default=0.0) <= largest
    is_sound = is_sound and (mean is None or mean <= largest) and (variance is None or variance <= largest**2)
    if rule not in RULES or type(steps) is not int or not len(norms) <= min(steps, MOST_NORMS) or not is_sound:
        raise ValueError("its values do not fit together")
    return State(rule, order, steps, mean, variance, norms)


def _number(value: Any) -> float:
    """A finite number that is not negative."""
    if type(value) not in {int, float} or not 0 <= float(value) < math.inf:
        raise ValueError(f"{value!r} is not a norm")
    return float(value)


def _bad(path: Path, message: str) -> BadInputError:
    return BadInputError(message, file=path, code="state")
