"""Gradient sets: from the paths of one call to its shards and the tensors selected in them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from select import POLLIN, poll
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import BadInputError, SystemRefusedError, UsageError, from_os_error, shortened
from gradtool.store.format.header import Shard, read_regular, read_shard
from gradtool.store.format.limits import MAX_PATH_LIST, refuse_large_index, refuse_long_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradtool.store.format.tensors import Tensor

INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True)
class GradientSet:
    """What one path names: a file, an index with its shards, or a folder."""

    path: Path
    shards: tuple[Shard, ...]
    index: Path | None = None


class Selected(NamedTuple):
    """One tensor that an operation works on, and the shard it is in."""

    shard: Shard
    tensor: Tensor


def read_path_list(source: str) -> list[str]:
    """The paths in a file, or on standard input for `-`: separated by NUL if there is one, else by newline.

    Raises:
        BadInputError: the file is missing, or names nothing.
        SystemRefusedError: it cannot be read.
    """
    where = "standard input" if source == "-" else source
    try:
        text = _read_stdin() if source == "-" else _read_list(source)
    except OSError as error:
        raise from_os_error(error, where) from error
    if len(text) > MAX_PATH_LIST:
        raise BadInputError(
            f"has over {MAX_PATH_LIST:,} bytes, the limit for a list of paths", file=where, code="limit"
        )
    separator = b"\0" if b"\0" in text else b"\n"
    # Not by splitting, for what lies between a million separators would be a million paths.
    paths = [os.fsdecode(line) for line in re.findall(b"[^%b]+" % separator, text)]
    if not paths:
        raise BadInputError("names no file", file=where)
    return paths


def _read_list(source: str) -> bytes:
    with open(source, "rb") as file:  # noqa: PTH123 - Path's own does the same
        return file.read(MAX_PATH_LIST + 1)


def _read_stdin() -> bytes:
    if sys.stdin is None:
        return b""
    # In a notebook it is text and nothing else.
    stream = sys.stdin.buffer if hasattr(sys.stdin, "buffer") else sys.stdin
    text = b""
    while True:
        part = stream.read(MAX_PATH_LIST + 1 - len(text))
        text += os.fsencode(part) if isinstance(part, str) else part or b""
        if part == b"" or len(text) > MAX_PATH_LIST or _blocks(stream):
            return text
        # A pipe that does not block gave what there was; only an answer that is empty, and not None, is its end.
        waiting = poll()
        waiting.register(stream, POLLIN)
        waiting.poll()


def _blocks(stream: Any) -> bool:
    try:
        return os.get_blocking(stream.fileno())
    except OSError:  # It is no file.
        return True


def open_sets(paths: Sequence[str | os.PathLike[str]]) -> list[GradientSet]:
    """Open every set of one call: read and check all headers, touch no data.

    Raises:
        UsageError: no path is given.
        BadInputError: a file is missing or invalid, an index and its shards disagree, a tensor name occurs twice in
            one set, or one file is named twice.
        SystemRefusedError: something cannot be read.
    """
    if not paths:
        raise UsageError("no path is given; name a file, a folder, an index, or use --files-from")
    for path in paths:
        # Path takes the slash away, and with it that a folder is meant.
        if str(path).endswith(os.sep) and not os.path.isdir(path):  # noqa: PTH112
            raise BadInputError("no such folder", file=path, code="missing-file")
    sets = [_open_set(Path(path)) for path in paths]
    _refuse_same_file(shard for one in sets for shard in one.shards)
    return sets


def select(sets: Sequence[GradientSet], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Selected]:
    """The tensors whose name any `include` finds (all, without one) and no `exclude` does, in file order.

    Raises:
        UsageError: a pattern is no regular expression.
        BadInputError: a pattern finds no tensor, or nothing is left.
    """
    wanted, unwanted = _compile(include, "--include"), _compile(exclude, "--exclude")
    everything = [Selected(shard, tensor) for one in sets for shard in one.shards for tensor in shard.tensors]
    if not wanted and not unwanted:
        return everything
    found: set[re.Pattern[str]] = set()

    def hits(patterns: list[re.Pattern[str]], name: str) -> bool:
        # Every pattern is tried, so that one which never finds anything is known.
        matching = [pattern for pattern in patterns if pattern.search(name)]
        found.update(matching)
        return bool(matching)

    selected = []
    for one in everything:
        included, excluded = hits(wanted, one.tensor.name), hits(unwanted, one.tensor.name)
        if (included or not wanted) and not excluded:
            selected.append(one)
    for option, patterns in (("--include", wanted), ("--exclude", unwanted)):
        for pattern in patterns:
            if pattern not in found:
                raise BadInputError(f"{option} {pattern.pattern!r} matches no tensor name", code="no-match")
    if not selected:
        raise BadInputError("--include and --exclude leave no tensor", code="no-match")
    return selected


def refuse_dtypes(selected: Iterable[Selected], supported: Sequence[str], *, can_exclude: bool = True) -> None:
    """Raise `BadInputError` for the first tensor whose type the operation cannot work with."""
    for one in selected:
        if one.tensor.dtype not in supported:
            remedy = f"; leave it out with --exclude {shlex.quote(f'^{re.escape(one.tensor.name)}$')}"
            raise BadInputError(
                f"has type {one.tensor.dtype}, which carries no gradient ({', '.join(supported)} do)"
                f"{remedy if can_exclude else ''}",
                file=one.shard.path,
                tensor=one.tensor.name,
                code="dtype",
            )


def foreign_index(one: GradientSet) -> Path | None:
    """The index that maps a file which was named without it, if there is one: it would not know of added tensors."""
    if one.index is not None or len(one.shards) != 1:
        return None
    path = one.shards[0].path
    try:
        indexes = [entry for entry in path.parent.iterdir() if entry.name.endswith(INDEX_SUFFIX)]
    except OSError:
        return None
    for index in indexes:
        with contextlib.suppress(BadInputError, SystemRefusedError):
            if path.name in _read_weight_map(index).values():
                return index
    return None


def _compile(patterns: Sequence[str], option: str) -> list[re.Pattern[str]]:
    compiled = []
    for pattern in patterns:
        try:
            with warnings.catch_warnings(action="ignore"):
                compiled.append(re.compile(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(f"{option} {pattern!r} is no regular expression: {error}") from error
    return compiled


def _open_set(path: Path) -> GradientSet:
    if os.path.isdir(path):  # noqa: PTH112 - Path's own raises where there is no permission
        return _open_folder(path)
    if path.name.endswith(INDEX_SUFFIX):
        return _open_index(path, path)
    return GradientSet(path, (read_shard(path),))


def _open_folder(folder: Path) -> GradientSet:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise from_os_error(error, folder) from error
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise BadInputError(f"has {len(indexes)} indexes ({', '.join(indexes)}); name the one to use", file=folder)
    if indexes:
        return _open_index(folder, folder / indexes[0])
    files = [folder / name for name in names if name.endswith(".safetensors")]
    if not files:
        raise BadInputError("has no .safetensors file", file=folder, code="missing-file")
    shards = tuple(read_shard(file) for file in files)
    _refuse_same_name(shards)
    return GradientSet(folder, shards)


def _open_index(path: Path, index: Path) -> GradientSet:
    """An index and its shards, checked against each other in both directions."""
    weight_map = _read_weight_map(index)
    shards = tuple(_read_mapped(index, file) for file in dict.fromkeys(weight_map.values()))
    _refuse_same_file(shards)
    home = _refuse_same_name(shards)
    names = {shard: shard.path.name for shard in shards}
    for name, file in weight_map.items():
        if name not in home or names[home[name]] != file:
            raise BadInputError(f"the index maps it to {file}, which does not hold it", file=index, tensor=name)
    for name, shard in home.items():
        if name not in weight_map:
            raise BadInputError(f"is in {names[shard]}, and the index does not map it", file=index, tensor=name)
    return GradientSet(path, shards, index)


def _read_weight_map(index: Path) -> dict[str, str]:
    _, text = read_regular(index)
    refuse_large_index(index, text)
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
        weight_map: dict[str, Any] = document["weight_map"]
        refuse_long_names(index, weight_map)
        files = list(weight_map.values())
        refuse_long_names(index, (file for file in files if isinstance(file, str)))
    except _DuplicateKeyError as error:
        raise BadInputError(f"the index has the key {shortened(str(error))!r} twice", file=index) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, BadInputError):
            raise
        raise BadInputError(f"is not a valid index: {shortened(repr(error))}", file=index) from error
    for name, file in zip(weight_map, files, strict=True):
        if not _is_plain_name(file):
            raise BadInputError(
                f"the index maps it to {shortened(repr(file))}; a shard must lie beside its index",
                file=index,
                tensor=name,
            )
    if not weight_map:
        raise BadInputError("the index maps no tensor", file=index)
    return weight_map


def _is_plain_name(file: Any) -> bool:
    """Whether it names a file in the same folder, and nothing else."""
    # Not by a Path, for there may be a hundred thousand of them.
    if not isinstance(file, str) or file in {"", ".", ".."} or os.sep in file or "\0" in file:
        return False
    try:
        os.fsencode(file)
    except UnicodeError:
        return False
    return True


class _DuplicateKeyError(ValueError):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _DuplicateKeyError(name)
            seen.add(name)
    return document


def _read_mapped(index: Path, file: str) -> Shard:
    try:
        return read_shard(index.parent / file)
    except BadInputError as error:
        if error.problems[0].code != "missing-file":
            raise
        raise BadInputError(
            f"the index names the shard {shortened(file)}, which is not there", file=index, code="missing-file"
        ) from error


def _refuse_same_name(shards: Sequence[Shard]) -> dict[str, Shard]:
    """The shard that each tensor is in, by its name."""
    home: dict[str, Shard] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in home:
                raise BadInputError(
                    f"is in {home[tensor.name].path.name} too; files that are no shards of one set "
                    f"must be named one by one",
                    file=shard.path,
                    tensor=tensor.name,
                    code="duplicate-name",
                )
            home[tensor.name] = shard
    return home


def _refuse_same_file(shards: Iterable[Shard]) -> None:
    home: dict[tuple[int, int], Shard] = {}
    for shard in shards:
        other = home.setdefault(shard.identity, shard)
        if other is not shard:
            raise BadInputError(
                f"is the same file as {other.path}; name each file once", file=shard.path, code="duplicate-file"
            )
