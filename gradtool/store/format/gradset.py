"""Gradient sets: from the paths of one call to its shards and the tensors selected in them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, shortened
from gradtool.store.format.header import Shard, read_outline, read_shard, read_small
from gradtool.store.format.index import read_weight_map
from gradtool.store.format.listing import listing_of
from gradtool.store.format.paths import no_path_error
from gradtool.store.format.patterns import compiled, matching
from gradtool.wording import call, option, say

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
    from pathlib import Path

    from gradtool.store.format.listing import Listing
    from gradtool.store.format.paths import PathList
    from gradtool.store.format.tensors import Tensor
    from gradtool.store.source import SmallFile

_CORRECT = "correct the index, or copy the set again"


@dataclass(frozen=True, eq=False, repr=False)
class GradientSet:
    """What one path names: a file, an index with its shards, or a folder. In `split` are tensors that lie in pieces."""

    name: str
    shards: tuple[Shard, ...]
    index: Path | None = None
    split: tuple[Shard, ...] = ()

    @property
    def tensors(self) -> Iterator[Selected]:
        """Its tensors, each whole, in the order of the files."""
        return (Selected(shard, tensor) for shard in (*self.shards, *self.split) for tensor in shard.tensors)

    def read_index(self) -> SmallFile | None:
        """Read the index, if there is one."""
        return None if self.index is None else read_small(self.index, is_named=str(self.index) == self.name)


class Selected(NamedTuple):
    """One tensor that an operation works on, and the shard it is in."""

    shard: Shard
    tensor: Tensor


def open_sets(
    paths: Sequence[str | os.PathLike[str]], listed: PathList | None = None, *, may_repeat: bool = False
) -> list[GradientSet]:
    """Open every set of one call: read and check all headers, but no data. The last paths may be those of a list.

    Raises:
        UsageError: no path is given.
        BadInputError: a file is missing or invalid, an index and its shards disagree, a tensor name occurs twice in
            one set, or one file is named twice, unless it `may_repeat`.
        SystemRefusedError: something cannot be read.
    """
    if not paths:
        raise no_path_error()
    sets: list[GradientSet] = []
    # The first of each file; none is read twice.
    first: dict[Hashable, tuple[Shard, int]] = {}
    for number, path in enumerate(paths):
        try:
            sets.append(_open_named(os.fspath(path)))
        except BadInputError as error:
            from gradtool.store.format.hints import NamedPath  # only needed for the error

            if (explained := NamedPath.from_call(paths, listed, number).explained(error)) is None:
                raise
            raise explained from error
        for shard in () if may_repeat else sets[-1].shards:
            other, before = first.setdefault(shard.source.identity, (shard, number))
            if other is not shard:
                from gradtool.store.format.hints import NamedPath, named_twice_error  # only needed for the error

                named, other_named = (NamedPath.from_call(paths, listed, at) for at in (number, before))
                raise named_twice_error(shard.name, named, other.name, other_named)
    return sets


def select(sets: Sequence[GradientSet], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Selected]:
    """The tensors whose name matches any `include` (all, without one) and no `exclude`, in file order.

    Raises:
        UsageError: a pattern is not a regular expression.
        BadInputError: a pattern matches no tensor, or nothing is left.
    """
    wanted, unwanted = compiled(include, "include"), compiled(exclude, "exclude")
    everything = [selected for one in sets for selected in one.tensors]
    if not wanted and not unwanted:
        return everything
    names = {one.tensor.name for one in everything}
    included = matching(names, wanted, "include") if wanted else names
    excluded = matching(names, unwanted, "exclude")
    selected = [one for one in everything if one.tensor.name in included and one.tensor.name not in excluded]
    if not selected:
        raise BadInputError(say("{} and {} leave no tensors", option("include"), option("exclude")), code="no-match")
    return selected


def check_dtypes(selected: Iterable[Selected], supported: Sequence[str], *, can_exclude: bool = True) -> None:
    """Raise `BadInputError` for the first tensor whose dtype the operation cannot work with."""
    for one in selected:
        if one.tensor.dtype not in supported:
            what = f"unsupported dtype {one.tensor.dtype} (supported: {', '.join(supported)})"
            hint = say("skip it with {}", option("exclude", f"^{re.escape(one.tensor.name)}$")) if can_exclude else None
            raise BadInputError(what, file=one.shard.name, tensor=one.tensor.name, code="dtype", hint=hint)


def require_unique_names(selected: Iterable[Selected]) -> None:
    """Raise `BadInputError` if a name is selected in several sets of a call: they may not be parts of one vector."""
    home: dict[str, Shard] = {}
    for shard, tensor in selected:
        other = home.setdefault(tensor.name, shard)
        if other is not shard:
            hint = say(
                "use {} for the norm of the sum, {} for the norm of each path, or {} if the paths are parts of one "
                "vector, as from ranks that each hold a part",
                call("accumulate"),
                call("norm", by_file=True),
                option("concat", True),
            )
            what = f"is in {other.name} too"
            raise BadInputError(what, file=shard.name, tensor=tensor.name, code="shared-name", hint=hint)


def _open_named(path: str) -> GradientSet:
    one = listing_of(path)
    if one.index is not None:
        return _open_index(one, one.index)
    shards = tuple(read_shard(file, is_named=one.is_named) for file in one.files)
    if len(shards) > 1:
        _shards_by_tensor(shards)
    return GradientSet(str(one.path), shards)


def _open_index(listing: Listing, index: Path) -> GradientSet:
    """An index and its shards, checked against each other in both directions."""
    weight_map = read_weight_map(index, is_named=listing.is_named)
    files = dict.fromkeys(weight_map.values())
    shards = tuple(_distinct(index, (read_mapped(index, file, read_shard) for file in files)))
    home = _shards_by_tensor(shards)
    names = {shard: shard.file_name for shard in shards}
    for name, file in weight_map.items():
        if name not in home or names[home[name]] != file:
            what = f"the index maps it to {file}, which does not contain it"
            raise BadInputError(what, file=index, tensor=name, hint=_CORRECT)
    for name, shard in home.items():
        if name not in weight_map:
            what = f"is in {names[shard]}, but the index does not map it"
            raise BadInputError(what, file=index, tensor=name, hint=_CORRECT)
    return GradientSet(str(listing.path), shards, index)


def outline_of(path: str) -> GradientSet:
    """Return a set as its headers describe it, which may be of types that the library does not know."""
    listing = listing_of(path)
    if listing.index is None:
        shards = tuple(read_outline(file, is_named=listing.is_named) for file in listing.files)
    else:
        files = dict.fromkeys(read_weight_map(listing.index, is_named=listing.is_named).values())
        shards = tuple(read_mapped(listing.index, file, read_outline) for file in files)
    return GradientSet(str(listing.path), shards, listing.index)


def read_mapped(index: Path, file: str, read: Callable[..., Shard]) -> Shard:
    """Read a shard that an index names; raises `BadInputError` about the index if there is no such file."""
    try:
        return read(index.parent / file, is_named=False)
    except BadInputError as error:
        if error.problems[0].code != "missing-file":
            raise
        link = ", a symbolic link to a file" if os.path.islink(index.parent / file) else ""  # noqa: PTH114
        what = f"the index names the shard {shortened(file)}{link}, which does not exist"
        hint = "copy it, or correct the index"
        raise BadInputError(what, file=index, code="missing-file", hint=hint) from error


def _shards_by_tensor(shards: Sequence[Shard]) -> dict[str, Shard]:
    """The shard of each tensor, by its name; raises `BadInputError` if two have one of the same name."""
    home: dict[str, Shard] = {}
    for shard in shards:
        for tensor in shard.tensors:
            other = home.setdefault(tensor.name, shard)
            if other is not shard:
                hint = say(
                    "if they are not shards of one set, name the files one by one (and for norm and clip, use {} if "
                    "they are parts of one vector)",
                    option("concat", True),
                )
                what = f"is in {other.file_name} too"
                raise BadInputError(what, file=shard.name, tensor=tensor.name, code="duplicate-name", hint=hint)
    return home


def _distinct(index: Path, shards: Iterable[Shard]) -> Iterator[Shard]:
    """The shards; raises `BadInputError` for one that is the same file as another, before the next one is read."""
    home: dict[Hashable, Shard] = {}
    for shard in shards:
        other = home.setdefault(shard.source.identity, shard)
        if other is not shard:
            what = f"is the same file as {other.file_name}, and the index {index.name} names both"
            raise BadInputError(what, file=shard.name, code="duplicate-file", hint="correct the index")
        yield shard
