"""Gradient sets: from the paths of one call to its shards and the tensors selected in them."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gradtool.errors import BadInputError, GradtoolError, call, option, say, shortened
from gradtool.store.format.header import Shard, read_shard, read_small
from gradtool.store.format.index import read_weight_map
from gradtool.store.format.paths import list_path, no_path_error
from gradtool.store.format.patterns import compiled, matching
from gradtool.store.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from gradtool.store.format.paths import PathList
    from gradtool.store.format.tensors import Tensor
    from gradtool.store.source import SmallFile

    _T = TypeVar("_T")

# As many tensors are named in one message.
_MAX_NAMED = 3


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


def totals(selected: Sequence[Selected]) -> dict[str, int]:
    """Count tensors, their elements and their bytes."""
    elements, nbytes = (sum(getattr(tensor, key) for _, tensor in selected) for key in ("elements", "nbytes"))
    return {"tensors": len(selected), "elements": elements, "bytes": nbytes}


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
            reader = SetReader(os.fspath(path))
            raise_first(reader.errors())
            sets.append(reader.gradset)
        except BadInputError as error:
            from gradtool.store.format.hints import NamedPath, path_error  # only needed for the error

            if (explanation := path_error(error, NamedPath(paths, listed, number))) is None:
                raise
            raise explanation from error
        for shard in () if may_repeat else sets[-1].shards:
            other, before = first.setdefault(shard.source.identity, (shard, number))
            if other is not shard:
                from gradtool.store.format.hints import NamedPath, named_twice_error  # only needed for the error

                named, other_named = (NamedPath(paths, listed, at) for at in (number, before))
                raise named_twice_error(shard.name, named, other.name, other_named)
    return sets


def select(sets: Sequence[GradientSet], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Selected]:
    """List the tensors whose name matches any `include` (all, without one) and no `exclude`, in file order.

    Raises:
        UsageError: a pattern is not a regular expression.
        BadInputError: a pattern matches no tensor, or nothing is left.
    """
    wanted, unwanted = compiled(include, "include"), compiled(exclude, "exclude")
    everything = [selected for gradset in sets for selected in gradset.tensors]
    if not wanted and not unwanted:
        return everything
    names = {tensor.name for _, tensor in everything}
    included = set().union(*(matching(names, pattern, "include") for pattern in wanted)) if wanted else names
    included = included.difference(*(matching(names, pattern, "exclude") for pattern in unwanted))
    selected = [entry for entry in everything if entry.tensor.name in included]
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


class MissingTensorError(BadInputError):
    """An index maps tensors to a file that does not contain them; `check` has a finer code for that."""

    finding = "missing-tensor"


class UnmappedTensorError(BadInputError):
    """A file contains tensors that the index does not map to it; `check` has a finer code for that."""

    finding = "extra-tensor"


class SetReader:
    """Reads what one path names, and yields what is wrong with it: a caller raises the first error, or collects all.

    What could be read is in `shards`. Another way to read the header of a file may take the place of `read_shard`.
    """

    def __init__(self, path: str, read: Callable[..., Shard] | None = None) -> None:
        self.path, self._read = path, read or read_shard
        self.files: list[Path] = []
        self.index: Path | None = None
        # The file name of each tensor's shard, if there is a valid index.
        self.weight_map: dict[str, str] | None = None
        self.shards: list[Shard] = []

    @property
    def gradset(self) -> GradientSet:
        """The set, as far as it could be read."""
        return GradientSet(str(Path(self.path)), tuple(self.shards), self.index)

    def errors(self) -> Iterator[GradtoolError]:
        """Read everything, and compare an index with its shards in both directions."""
        yield from self.list_files()
        if self.weight_map is not None:
            yield from self.drop_repeated_files()
        yield from self.read_files()
        yield from self.compare()

    def list_files(self) -> Iterator[GradtoolError]:
        """List the files that the path, or its index, names; in a folder with an invalid index, list all files."""
        try:
            self.files, self.index = list_path(self.path)
            if self.index is not None:
                is_named = self.index == Path(self.path)
                self.weight_map = _read_or_explain(read_weight_map, self.index, is_index=True, is_named=is_named)
                self.files = [self.index.parent / name for name in dict.fromkeys(self.weight_map.values())]
        except GradtoolError as error:
            yield error

    def drop_repeated_files(self) -> Iterator[GradtoolError]:
        """Drop files that are the same as another one, before they are read; it is an error if an index names both."""
        first_files: dict[Hashable, Path] = {}
        for file in self.files:
            first = first_files.setdefault(Source.kind_of(file).identity_at(file), file)
            if first is not file and self.index is not None and self.weight_map is not None:
                what = f"is the same file as {first.name}, and the index {self.index.name} names both"
                yield BadInputError(what, file=file, code="duplicate-file", hint="correct the index")
        self.files = list(first_files.values())

    def read_files(self) -> Iterator[GradtoolError]:
        """Read the headers of the files."""
        is_mapped = self.weight_map is not None
        is_named = self.files == [Path(self.path)] and not is_mapped
        for file in self.files:
            try:
                self.shards.append(_read_or_explain(self._read, file, is_named=is_named))
            except GradtoolError as error:
                if is_mapped and error.problems[0].code == "missing-file":
                    link = ", a symbolic link to a file" if os.path.islink(file) else ""  # noqa: PTH114
                    what = f"the index names the shard {shortened(file.name)}{link}, which does not exist"
                    hint = "copy it, or correct the index"
                    yield BadInputError(what, file=self.index, code="missing-file", hint=hint)
                else:
                    yield error

    def compare(self) -> Iterator[GradtoolError]:
        """Find names that several files have, and tensors that are not where the index maps them."""
        if len(self.shards) < 2 and self.weight_map is None:  # noqa: PLR2004 - a header has no name twice
            return
        shard_of: dict[str, Shard] = {}
        repeated: dict[tuple[Shard, Shard], list[str]] = defaultdict(list)
        for shard in self.shards:
            for tensor in shard.tensors:
                first = shard_of.setdefault(tensor.name, shard)
                if first is not shard:
                    repeated[shard, first].append(tensor.name)
        for (shard, first), names in repeated.items():
            what = f"is in {first.file_name} too"
            if len(names) > 1:
                what = f"has {quoted(names)}, and so has {first.file_name}"
            hint = say(
                "if they are not shards of one set, name the files one by one (and for norm and clip, use {} if they "
                "are parts of one vector)",
                option("concat", True),
            )
            yield BadInputError(what, file=shard.name, tensor=only(names), code="duplicate-name", hint=hint)
        if self.weight_map is not None:
            everywhere = {name for names in repeated.values() for name in names}
            yield from self._compare_with_index(self.weight_map, everywhere)

    def _compare_with_index(self, weight_map: Mapping[str, str], repeated: set[str]) -> Iterator[GradtoolError]:
        mapped: dict[str, list[str]] = defaultdict(list)
        for name, file in weight_map.items():
            mapped[file].append(name)
        hint = "correct the index, or copy the set again"
        for shard in self.shards:
            file, contained = shard.file_name, {tensor.name for tensor in shard.tensors}
            missing = [name for name in mapped[file] if name not in contained]
            if missing:
                what = f"the index maps it to {file}, which does not contain it"
                if len(missing) > 1:
                    what = f"the index maps {quoted(missing)} to {file}, which does not contain them"
                yield MissingTensorError(what, file=self.index, tensor=only(missing), hint=hint)
        for shard in self.shards:
            file, names = shard.file_name, [tensor.name for tensor in shard.tensors]
            extra = [name for name in names if name not in repeated and weight_map.get(name) != file]
            if extra:
                what = f"is in {file}, but the index does not map it{' there' if extra[0] in weight_map else ''}"
                if len(extra) > 1:
                    what = f"{file} contains {quoted(extra)}, which the index does not map to it"
                yield UnmappedTensorError(what, file=self.index, tensor=only(extra), hint=hint)


def raise_first(errors: Iterator[GradtoolError]) -> None:
    """Raise the first error, if there is one."""
    for error in errors:
        raise error


def quoted(names: Sequence[str]) -> str:
    """Name some tensors, and say how many more there are."""
    shown = ", ".join(repr(shortened(name)) for name in names[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED:,} more"


def only(names: Sequence[str]) -> str | None:
    """Return the name, if there is but one: a message that names several is about none of them alone."""
    return names[0] if len(names) == 1 else None


def _read_or_explain(read: Callable[..., _T], path: Path, *, is_index: bool = False, is_named: bool) -> _T:
    """Read a file; of one that is refused, say what it is if it is something else."""
    try:
        return read(path, is_named=is_named)
    except BadInputError as error:
        from gradtool.store.format.filetypes import file_type_error  # only needed for the error

        if (explanation := file_type_error(path, is_index=is_index, is_named=is_named)) is None:
            raise
        raise explanation from error
