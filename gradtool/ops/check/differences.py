"""Compares sets that should be alike, such as the gradients of several clients."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gradtool.errors import Problem, number_of
from gradtool.store.format.gradset import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gradtool.store.format.gradset import GradientSet, Selected

    # The type and shape of each tensor, and which numbers, such as weights, are in the metadata.
    Traits = dict[tuple[Literal["tensor", "weight"], str], str]


@dataclass(frozen=True)
class Difference:
    """A tensor or a weight of a set that is not as in most sets: its `value`, and the `usual` one."""

    kind: Literal["tensor", "weight"]
    name: str
    file: str
    value: str | None
    usual: str | None


def compare_sets(
    sets: Sequence[GradientSet], selected: Iterable[Selected]
) -> Iterator[tuple[Problem, list[Difference]]]:
    """Compare sets with most of them or, if all differ, with the first; yield a note on each set that differs.

    Sets without a common tensor may be parts of one vector, and are not compared.
    """
    set_of = {shard: gradset.name for gradset in sets for shard in gradset.shards}
    traits: defaultdict[str, Traits] = defaultdict(dict)
    for shard, tensor in selected:
        value = f"{tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"
        traits[set_of[shard]]["tensor", tensor.name] = value
    for shard, name in set_of.items():
        numbers = (key for key, text in shard.metadata.items() if _is_number(text))
        traits[name] |= {("weight", key): "a number" for key in numbers}
    signatures = {name: frozenset(entry.items()) for name, entry in traits.items()}
    counts = Counter(signatures.values())
    first = max(signatures, key=lambda name: counts[signatures[name]])
    usual, count = traits[first], counts[signatures[first]]
    other = first if count == 1 else f"{count:,} of {len(traits):,} sets"
    for name, entry in traits.items():
        keys = [key for key in usual | entry if entry.get(key) != usual.get(key)]
        if keys and any(kind == "tensor" for kind, _ in entry.keys() & usual.keys()):
            rows = [Difference(*key, name, entry.get(key), usual.get(key)) for key in keys]
            hint = "leave it out, or write it again like the others"
            yield Problem("unlike", f"differs from {other}: {_summary(rows)}", name, hint=hint), rows


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return math.isfinite(float(text))
    return False


def _summary(differences: Iterable[Difference]) -> str:
    """Say in a line how many tensors and weights differ, and which."""
    groups: defaultdict[tuple[str, str], list[Difference]] = defaultdict(list)
    for row in differences:
        groups[row.kind, "missing" if row.value is None else "extra" if row.usual is None else "different"].append(row)
    parts = []
    for (kind, how), rows in groups.items():
        first, names = rows[0], quoted([row.name for row in rows])
        example = f"{quoted([first.name])} is {first.value}, not {first.usual}" if how == "different" else names
        parts.append(f"{number_of(len(rows), kind)} {how} ({example})")
    return "; ".join(parts)
