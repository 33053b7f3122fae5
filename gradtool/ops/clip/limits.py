"""Limits that follow from the norms of earlier calls: the rules of `clip --limit`, and their state."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gradtool import validators
from gradtool.errors import BadInputError, UsageError, option, say, shortened
from gradtool.store.format.header import read_small
from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.source import SmallFile
from gradtool.store.transaction.once import MAX_IDS, checked_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.options import ClipOptions
    from gradtool.store.transaction.once import Once

_VERSION = 1
_MAX_NORMS = 100_000
# A norm takes up to 30 bytes.
_MAX_BYTES = 4_000_000
# Norms above it have no variance in float64.
_LARGEST = 2.0**500
_INFINITY = "Infinity"
# The weight of the old moving mean and variance, and the number of norms that they begin with: those of the paper.
_ALPHA, _WARMUP = 0.97, 25
# So many norms take 200 kB in a state.
_WINDOW = 10_000


@dataclass(frozen=True)
class State:
    """The state of a rule: how many norms it has seen, and what it needs of them.

    `norms` are those that a percentile is taken of, or those of a warm-up that has not ended; `mean` and `variance` are
    the moving ones once it has. `once` are the IDs of the last calls that have one.
    """

    rule: str
    norm_type: float
    steps: int = 0
    mean: float | None = None
    variance: float | None = None
    norms: tuple[float, ...] = ()
    once: Sequence[str] = ()

    def after_norm(self, **changes: Any) -> Self:
        """Return the state after another norm."""
        return replace(self, steps=self.steps + 1, **changes)


@dataclass(frozen=True)
class ZScore:
    """ZClip (Kumar, Owen, Chowdhury and Güra 2025, arXiv 2504.02507), with its reciprocal adjustment.

    With the moving mean and variance of the norms before this one, std² = variance and T the threshold:

        z = (norm - mean) / std
        limit = mean + T · (T / z) · std                    where z > T; else nothing is clipped

    Then, with A = 0.97, and clipped the norm or, where it is larger, the limit:

        mean ← A · mean + (1 - A) · clipped
        variance ← A · variance + (1 - A) · (clipped - mean)²     with the new mean

    The first `warmup` norms are not clipped; mean and variance begin as theirs. All is float64. Where std is 0, every
    norm above the mean has an infinite z, so that the limit is the mean.
    """

    threshold: float
    warmup: int

    name = "z"

    def learn(self, state: State, norm: float) -> tuple[float, State]:
        """Return the limit of a norm, infinite where nothing is clipped, and the state after that norm.

        A norm that is not finite leaves the state as it is.
        """
        limit, mean, variance = math.inf, state.mean, state.variance
        if mean is not None and variance is not None:
            distance, std = norm - mean, math.sqrt(variance)
            # NaN is not above the threshold.
            if distance > self.threshold * std:
                z = distance / std if std else math.inf
                limit = mean + self.threshold * (self.threshold / z) * std
        if not math.isfinite(norm):
            return limit, state
        if norm > _LARGEST:
            raise BadInputError(say("the square of the norm {!r} overflows, which {} needs; nothing written", norm, _Z))
        if mean is not None and variance is not None:
            clipped = min(norm, limit)
            mean = _ALPHA * mean + (1 - _ALPHA) * clipped
            variance = _ALPHA * variance + (1 - _ALPHA) * (clipped - mean) ** 2
            return limit, state.after_norm(mean=mean, variance=variance)
        norms = (*state.norms, norm)
        if len(norms) < self.warmup:
            return limit, state.after_norm(norms=norms)
        mean = math.fsum(norms) / len(norms)
        variance = math.fsum((value - mean) ** 2 for value in norms) / len(norms)
        return limit, state.after_norm(norms=(), mean=mean, variance=variance)


@dataclass(frozen=True)
class Percentile:
    """AutoClip (Seetharaman, Wichern, Pardo and Le Roux 2020, arXiv 2007.14469).

    The limit is the percentile P of the last `window` norms, unclipped and this one included; between two norms it is
    interpolated linearly, as `numpy.percentile` does it.
    """

    percentile: float
    window: int

    name = "percentile"

    def learn(self, state: State, norm: float) -> tuple[float, State]:
        """Return the limit of a norm, infinite where no norm is known, and the state after that norm.

        A norm that is not finite leaves the state as it is.
        """
        if math.isfinite(norm):
            state = state.after_norm(norms=(*state.norms, norm)[-self.window :])
        norms = sorted(state.norms[-self.window :])
        if not norms:
            return math.inf, state
        place = (len(norms) - 1) * (self.percentile / 100)
        lower, part = math.floor(place), place - math.floor(place)
        below, above = norms[lower], norms[min(lower + 1, len(norms) - 1)]
        # From the nearer of the two, as numpy does it.
        near = below + (above - below) * part
        return near if part < 0.5 else above - (above - below) * (1 - part), state  # noqa: PLR2004


LimitRule = ZScore | Percentile
_Z, _PERCENTILE = option("limit", "z=T"), option("limit", "percentile=P")


def rule_from_options(options: ClipOptions) -> LimitRule | None:
    """Return the rule of `limit`, if it is given; raise `UsageError` for an unknown rule or options of another rule."""
    text, warmup, window = options.limit or "", options.warmup, options.window
    name, _, value = text.partition("=")
    for key, count, rule, form in (("warmup", warmup, "z", _Z), ("window", window, "percentile", _PERCENTILE)):
        if count is not None and name != rule:
            raise UsageError(say("{} requires {}", option(key), form))
        if count is not None and count > _MAX_NORMS:
            raise UsageError(say("{} must be at most {:,}, not {:,}", option(key), _MAX_NORMS, count))
    if not text:
        return None
    number = validators.number_from(say("the number in {}", option("limit", text)), value) if value else math.nan
    if name == "z" and 0 < number < math.inf:
        return ZScore(number, _WARMUP if warmup is None else warmup)
    if name == "percentile" and 0 <= number <= 100:  # noqa: PLR2004
        return Percentile(number, _WINDOW if window is None else window)
    forms = "z=T, such as z=2.5, or percentile=P, such as percentile=10"
    raise UsageError(say("{} must be {}, not {!r}", option("limit"), forms, text))


def state_path(options: ClipOptions) -> Path | None:
    """Return the path of the state, if it is given; raise `UsageError` if it is a folder or has the name of a set."""
    if options.state is None:
        return None
    path = os.fspath(options.state)
    if path.endswith((".safetensors", INDEX_SUFFIX)):
        message = say("{} has the name of a gradient set", option("state", path))
        raise UsageError(message, hint="use another name, such as clip.json")
    if path == "-" or path.endswith(os.sep) or os.path.isdir(path):  # noqa: PTH112 - Path's own raises
        raise UsageError(say("{} must be a file", option("state", path)))
    return Path(path)


class StateFile(NamedTuple):
    """The state of a rule, and the small JSON file that it was read from."""

    file: SmallFile
    rule: LimitRule
    state: State

    @classmethod
    def read(cls, path: Path, rule: LimitRule, norm_type: float) -> Self:
        """Read the state of a rule for norms of an order; it is empty if the file does not exist.

        Raises:
            BadInputError: the file is not a state, or that of another rule or order.
            SystemRefusedError: it cannot be read.
        """
        try:
            file = read_small(path, _MAX_BYTES)
        except BadInputError as error:
            if error.problems[0].code != "missing-file":
                raise
            return cls(SmallFile(path, None, b""), rule, State(rule.name, norm_type))
        try:
            return cls(file, rule, _parse(file.content, State(rule.name, norm_type)))
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            message = f"is not a state that this call can use ({shortened(str(error))})"
            hint = say("use another {}, or delete it to start again", option("state"))
            raise BadInputError(message, file=path, code="state", hint=hint) from error

    def recording(self, once: Once) -> Self:
        """Return the same state with the ID of this call."""
        return self._replace(state=replace(self.state, once=once.added_to(self.state.once)))

    def content(self) -> SmallFile:
        """Return the file with the state as its content."""
        document = {"gradtool_state": _VERSION} | vars(self.state)
        if not self.state.once:
            del document["once"]
        if math.isinf(self.state.norm_type):
            document["norm_type"] = _INFINITY  # JSON has no such number.
        # A line for each key: with an indent, json takes several times as long for many norms.
        lines = ",\n".join(f' "{key}": {json.dumps(value, allow_nan=False)}' for key, value in document.items())
        return self.file._replace(content=f"{{\n{lines}\n}}\n".encode())


def _parse(content: bytes, new: State) -> State:
    """Parse a state of the same rule and order as a new one; raise an error for whatever else the file has."""
    if not content.lstrip().startswith(b"{"):
        raise ValueError("it is not a JSON object")
    # Each value of a list has a comma: they are counted before they are parsed. Those of IDs count, too.
    counts = [content.count(character) - most for character, most in ((b",", _MAX_NORMS + 100), (b"[", 2), (b"{", 1))]
    if max(counts) > MAX_IDS * validators.MAX_ID:
        raise ValueError("it has too many values")
    document: dict[str, Any] = json.loads(content, parse_int=partial(validators.whole_from, "each count"))
    version = document.pop("gradtool_state", None)
    if type(version) is not int or version != _VERSION:
        raise ValueError(f"its version is {version!r}, not {_VERSION}")
    ids = checked_ids(document.pop("once", []))
    if document.keys() | {"once"} != vars(new).keys():
        raise ValueError(f"its keys must be gradtool_state, {', '.join(vars(new))}")
    rule, order, steps = document["rule"], document["norm_type"], document["steps"]
    order = math.inf if order == _INFINITY else _number(order)
    if (rule, order) != (new.rule, new.norm_type):
        raise ValueError(f"it belongs to limit {rule} and norms of order {order}")
    norms = tuple(map(_number, document["norms"]))
    mean, variance = (None if document[key] is None else _number(document[key]) for key in ("mean", "variance"))
    # Only the z-score has moments, and none of norms whose squares overflow.
    largest = _LARGEST if rule == ZScore.name else math.inf
    is_sound = (mean is None) == (variance is None) and max(norms, default=0.0) <= largest
    is_sound = is_sound and (mean or 0.0) <= largest and (variance or 0.0) <= largest**2
    if type(steps) is not int or not len(norms) <= min(steps, _MAX_NORMS) or not is_sound:
        raise ValueError("its values are inconsistent")
    return State(rule, order, steps, mean, variance, norms, ids)


def _number(value: Any) -> float:
    if type(value) not in {int, float} or not 0 <= float(value) < math.inf:
        raise ValueError(f"{value!r} is not a norm")
    return float(value)
