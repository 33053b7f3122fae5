"""Gradient sets: what the paths of a call name, read from headers and indexes."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import (
    NO_SUCH_FOLDER,
    BadInputError,
    GradtoolError,
    Problem,
    option,
    os_errors_about,
    say,
    shortened,
)
from gradtool.store.format.header import PIECES_KEY, read_shard, read_small
from gradtool.store.format.index import INDEX_SUFFIX, read_weight_map
from gradtool.store.format.paths import is_there, no_path_error
from gradtool.store.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from gradtool.store.format.paths import PathList
    from gradtool.store.format.tensors import Shard, Tensor
    from gradtool.store.source import SmallFile

    StrPath = str | os.PathLike[str]

# Tensors that a message names.
_MAX_NAMED = 3


@dataclass(frozen=True, eq=False, repr=False)
class GradientSet:
    """What a path names: a file, an index with its shards, or a folder.

    The tensors of the `split` shards lie in pieces in the files, which have them under the same names.
    """

    name: str
    shards: tuple[Shard, ...]
    index: Path | None = None
    split: tuple[Shard, ...] = ()

    @property
    def tensors(self) -> Iterator[Selected]:
        """Its tensors, each whole: those of each file, in their order, then those that lie in pieces."""
        split = [Selected(shard, tensor) for shard in self.split for tensor in shard.tensors]
        names = {tensor.name for _, tensor in split}
        for shard in self.shards:
            yield from (Selected(shard, tensor) for tensor in shard.tensors if tensor.name not in names)
        yield from split

    def read_index(self) -> SmallFile | None:
        """Read the index, if there is one."""
        return None if self.index is None else read_small(self.index, is_named=str(self.index) == self.name)


class Selected(NamedTuple):
    """A tensor that an operation works on, and the shard it is in."""

    shard: Shard
    tensor: Tensor

    @property
    def file(self) -> Shard:
        """The file that has it, or its first piece."""
        return self.shard.first_file(self.tensor)


def totals(selected: Sequence[Selected]) -> dict[str, int]:
    """Count tensors, their elements and their bytes."""
    elements, nbytes = (sum(getattr(tensor, key) for _, tensor in selected) for key in ("elements", "nbytes"))
    return {"tensors": len(selected), "elements": elements, "bytes": nbytes}


def open_sets(
    paths: Sequence[str | os.PathLike[str]], listed: PathList | None = None, *, may_repeat: bool = False
) -> list[GradientSet]:
    """Open every set of a call: read and check all headers, but no data. The last paths may be those of a list.

    Raises:
        UsageError: no path is given.
        BadInputError: a file is missing or invalid, an index and its shards disagree, a tensor name occurs twice in
            a set, or a file is named twice, unless it `may_repeat`.
        SystemRefusedError: something cannot be read.
    """
    if not paths:
        raise no_path_error()
    sets: list[GradientSet] = []
    # The first shard of each file, with its path and the place of that in the list; no file is read twice.
    firsts: dict[Hashable, tuple[Shard, str, str]] = {}
    for number, path in enumerate([os.fspath(path) for path in paths]):
        place = "" if listed is None else listed.place_of(len(paths) - number)
        reader = SetReader(path)
        for error in reader.errors():
            from gradtool.store.format.hints import path_error  # only needed for the error

            head = (listed.where, listed.head) if listed and place else None
            # The error of the system remains its cause, which GRADTOOL_DEBUG shows.
            raise path_error(error, path, place, head) from error.__cause__
        sets.append(reader.gradset)
        for shard in () if may_repeat else sets[-1].shards:
            first = firsts.setdefault(shard.source.identity, (shard, path, place))
            if first[0] is not shard:
                from gradtool.store.format.hints import named_twice_error  # only needed for the error

                raise named_twice_error((shard, path, place), first)
    return sets


def require_shapes(sets: Iterable[GradientSet], path: StrPath) -> None:
    """Raise `BadInputError` for tensors whose shape is not that in another set, or which that set lacks."""
    shapes = {tensor.name: tensor.shape for gradset in open_sets([path]) for _, tensor in gradset.tensors}
    problems = []
    for shard, tensor in chain.from_iterable(gradset.tensors for gradset in sets):
        if tensor.name not in shapes:
            message = say("is not in {}", option("shapes_from", path))
        elif shapes[tensor.name] != tensor.shape:
            wanted = list(shapes[tensor.name])
            message = say("has shape {}, not {} as in {}", list(tensor.shape), wanted, option("shapes_from", path))
        else:
            continue
        problems.append(Problem("shape", message, shard.name, tensor.name))
    if problems:
        raise BadInputError.from_problems(problems, "copy the files with the missing pieces")


def unknown_shapes(sets: Iterable[GradientSet]) -> Problem | None:
    """Return the warning that pieces may be missing, for a set that the distributed writer saved."""
    for gradset in sets:
        files = [shard.file_name for shard in gradset.shards if PIECES_KEY in shard.metadata]
        # A file of a single process, which has whole tensors, has another name.
        if gradset.split or (gradset.index is None and any(name.startswith("shard-") for name in files)):
            message = "saved in pieces without whole shapes, so the loss of the last pieces cannot be noticed"
            hint = say("use {} to compare them with a model", option("shapes_from"))
            return Problem("unknown-shapes", message, gradset.name, hint=hint)
    return None


class MissingTensorError(BadInputError):
    """An index maps tensors to a file that does not contain them; `check` has a finer code for that."""

    finding = "missing-tensor"


class UnmappedTensorError(BadInputError):
    """A file contains tensors that the index does not map to it; `check` has a finer code for that."""

    finding = "extra-tensor"


@dataclass(eq=False, repr=False)
class SetReader:
    """Reads what a path names, and yields what is wrong with it: a caller raises the first error, or collects all.

    What could be read is in `shards`. Another function may `read` the header of a file than `read_shard`.
    """

    path: str
    read: Callable[..., Shard] | None = None
    files: list[Path] = field(default_factory=list)
    index: Path | None = None
    # The file name of each tensor's shard, if there is a valid index.
    weight_map: dict[str, str] | None = None
    shards: list[Shard] = field(default_factory=list)
    # Tensors in pieces, and the names of those whose pieces do not make a whole.
    split: tuple[Shard, ...] = ()
    faulty: set[str] = field(default_factory=set)

    @property
    def gradset(self) -> GradientSet:
        """The set, as far as it could be read."""
        return GradientSet(str(Path(self.path)), tuple(self.shards), self.index, self.split)

    def errors(self) -> Iterator[GradtoolError]:
        """Read everything, and compare an index with its shards in both directions."""
        yield from self.list_files()
        if self.weight_map is not None:
            yield from self.drop_repeated_files()
        yield from self.read_files()
        yield from self.join_pieces()
        yield from self.compare()

    def list_files(self) -> Iterator[GradtoolError]:
        """List the files that the path, or its index, names; in a folder with an invalid index, list all files."""
        try:
            self.files, self.index = _list_path(self.path)
        except GradtoolError as error:
            yield error
        if self.index is None:
            return
        is_named = self.index == Path(self.path)
        try:
            self.weight_map = read_weight_map(self.index, is_named=is_named)
            self.files = [self.index.parent / name for name in dict.fromkeys(self.weight_map.values())]
        except GradtoolError as error:
            yield _explained(error, self.index, is_index=True, is_named=is_named)

    def drop_repeated_files(self) -> Iterator[GradtoolError]:
        """Drop names of a file that has another name, before it is read; it is an error if an index has both names."""
        firsts: dict[Hashable, Path] = {}
        for file in self.files:
            first = firsts.setdefault(Source.kind_of(file).identity_at(file), file)
            if first is not file and self.index is not None and self.weight_map is not None:
                message = f"is the same file as {first.name}, and the index {self.index.name} names both"
                yield BadInputError(message, file=file, code="duplicate-file", hint="correct the index")
        self.files = list(firsts.values())

    def read_files(self) -> Iterator[GradtoolError]:
        """Read the headers of the files."""
        is_mapped = self.weight_map is not None
        is_named = self.files == [Path(self.path)] and not is_mapped
        for file in self.files:
            try:
                self.shards.append((self.read or read_shard)(file, is_named=is_named))
            except GradtoolError as error:
                if is_mapped and error.problems[0].code == "missing-file":
                    link = ", a symbolic link to a file" if os.path.islink(file) else ""  # noqa: PTH114
                    message = f"the index names the shard {shortened(file.name)}{link}, which does not exist"
                    hint = "copy it, or correct the index"
                    yield BadInputError(message, file=self.index, code="missing-file", hint=hint)
                else:
                    yield _explained(error, file, is_index=False, is_named=is_named)

    def join_pieces(self) -> Iterator[GradtoolError]:
        """Put together the tensors that lie in pieces, which an index cannot map."""
        if all(PIECES_KEY not in shard.metadata for shard in self.shards):
            return
        from gradtool.store.format.pieces import join_pieces  # most sets have none

        self.split, self.faulty, errors = join_pieces(str(Path(self.path)), self.shards)
        yield from errors
        names = [tensor.name for shard in self.split for tensor in shard.tensors]
        if self.weight_map is not None and names:
            message = f"the index has a single file for {quoted(names)}, which several files have in pieces"
            hint = "move the index away, or use the files that it was made for"
            yield BadInputError(message, file=self.index, tensor=only(names), code="pieces", hint=hint)

    def compare(self) -> Iterator[GradtoolError]:
        """Compare the shards, in which no name may occur twice, and then an index with them."""
        if len(self.shards) < 2 and self.weight_map is None:  # noqa: PLR2004 - a header has no name twice
            return
        shard_of: dict[str, Shard] = {}
        repeated: dict[tuple[Shard, Shard], list[str]] = defaultdict(list)
        in_pieces = self.faulty.union(tensor.name for shard in self.split for tensor in shard.tensors)
        for shard in self.shards:
            for tensor in shard.tensors:
                first = shard_of.setdefault(tensor.name, shard)
                is_piece = tensor.name in in_pieces and PIECES_KEY in shard.metadata and PIECES_KEY in first.metadata
                if first is not shard and not is_piece:
                    repeated[shard, first].append(tensor.name)
        hint = say(
            "if they are not shards of one set, name the files one by one (and for norm and clip, use {} if they "
            "are parts of one vector)",
            option("concat", True),
        )
        for (shard, first), names in repeated.items():
            message = f"is in {first.file_name} too"
            if len(names) > 1:
                message = f"has {quoted(names)}, which {first.file_name} has too"
            yield BadInputError(message, file=shard.name, tensor=only(names), code="duplicate-name", hint=hint)
        if self.weight_map is not None:
            yield from self._compare_index(self.weight_map, set().union(*repeated.values()))

    def _compare_index(self, weight_map: dict[str, str], repeated: set[str]) -> Iterator[GradtoolError]:
        mapped: dict[str, list[str]] = defaultdict(list)
        for name, file in weight_map.items():
            mapped[file].append(name)
        hint = "correct the index, or copy the set again"
        for shard in self.shards:
            file, contained = shard.file_name, {tensor.name for tensor in shard.tensors}
            missing = [name for name in mapped[file] if name not in contained]
            if missing:
                message = f"the index maps it to {file}, which does not contain it"
                if len(missing) > 1:
                    message = f"the index maps {quoted(missing)} to {file}, which does not contain them"
                yield MissingTensorError(message, file=self.index, tensor=only(missing), hint=hint)
        for shard in self.shards:
            file, names = shard.file_name, [tensor.name for tensor in shard.tensors]
            extra = [name for name in names if name not in repeated and weight_map.get(name) != file]
            if extra:
                place = " there" if extra[0] in weight_map else ""
                message = f"is in {file}, but the index does not map it{place}"
                if len(extra) > 1:
                    message = f"{file} contains {quoted(extra)}, which the index does not map to it"
                yield UnmappedTensorError(message, file=self.index, tensor=only(extra), hint=hint)


def _list_path(path: str) -> tuple[list[Path], Path | None]:
    """List the files that a path names, or those of a folder in name order, and its index. A file need not exist."""
    named = Path(path)
    parts = parts_in(named)
    # A Path drops the slash, and with it that a folder is meant.
    if path.endswith(os.sep) and not (is_there(path) and parts is not None):
        raise BadInputError(NO_SUCH_FOLDER, file=path, code="missing-file")
    if parts is None:
        return ([], named) if named.name.endswith(INDEX_SUFFIX) else ([named], None)
    indexes = [part for part in parts if part.name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        message = f"has {len(indexes)} indexes ({', '.join(index.name for index in indexes)})"
        raise BadInputError(message, file=named, hint="name the one to use")
    if not parts:
        from gradtool.store.format.filetypes import no_safetensors_error  # only needed for the error

        raise no_safetensors_error(named)
    return [part for part in parts if part not in indexes], indexes[0] if indexes else None


def parts_in(folder: Path) -> list[Path] | None:
    """List the safetensors files and indexes in a folder, in name order, without hidden ones; None if it is none."""
    with os_errors_about(folder):
        names = Source.kind_of(folder).names_in(folder)
    if names is None:
        return None
    return [folder / name for name in sorted(names) if name.endswith((".safetensors", INDEX_SUFFIX)) and name[0] != "."]


def _explained(error: GradtoolError, file: Path, *, is_index: bool, is_named: bool) -> GradtoolError:
    """Return the error for a file that was refused, which says what the file is if it is of another type."""
    if not isinstance(error, BadInputError):
        return error
    from gradtool.store.format.filetypes import file_type_error  # only needed for the error

    return file_type_error(file, is_index=is_index, is_named=is_named) or error


def quoted(names: Sequence[str]) -> str:
    """Name some tensors, and say how many more there are."""
    shown = ", ".join(repr(shortened(name)) for name in names[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED:,} more"


def only(names: Sequence[str]) -> str | None:
    """Return the name, if there is but one: a message that names several is about none of them alone."""
    return names[0] if len(names) == 1 else None
