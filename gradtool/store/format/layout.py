"""The layout of what is written anew: headers, files, and sets with their indexes.

Where only metadata change, all other bytes of a header stay as they are, and it is as long as the old one if it fits,
with spaces at its end. So a file may be changed in place, and both ways to write give the same bytes. If a header must
grow, it gets spare bytes for the next time.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, Problem, option, say
from gradtool.store.format.header import METADATA, encoded, new_header, read_text
from gradtool.store.format.index import INDEX_SUFFIX, new_index
from gradtool.store.format.tensors import BITS, INTEGERS, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.format.tensors import Shard

# Spare bytes of a header with an entry that is a number: enough for any other number.
SPARE = 32
# A header is padded with spaces, so that the tensors behind it are aligned.
_ALIGNMENT = 8
_SPACES = re.compile(r"[ \t\r\n]*")
# What huggingface's save_pretrained calls the files of a model, and what loaders look for in a folder.
_STEM = "model"
INDEX_NAME = f"{_STEM}{INDEX_SUFFIX}"


class Layout(NamedTuple):
    """The bytes before the first tensor, and the file that they describe."""

    header: bytes
    shard: Shard


def new_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Make a tensor without a place in a file."""
    tensor = Tensor(name, dtype, shape, 0, 0)
    return tensor._replace(end=tensor.elements * BITS[dtype] // 8)


def lay_out(path: Path | str, tensors: Iterable[Tensor], metadata: Mapping[str, str], *, spare: int = 0) -> Layout:
    """Lay out a file of these tensors, in this order, with new offsets, and `spare` bytes in its header.

    If a name occurs twice, or the file could not be read again, raise `BadInputError`.
    """
    entries: dict[str, object] = {METADATA: dict(metadata)}
    end = 0
    for tensor in tensors:
        if tensor.name in entries:
            message = "nothing written, because another tensor of the new file, or its metadata, has this name"
            raise BadInputError(message, file=path, tensor=tensor.name, code="duplicate-name")
        begin, end = end, end + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    if not metadata:
        del entries[METADATA]
    return Layout(*new_header(path, _padded(encoded(entries), spare), end))


def rewritten(shard: Shard, entries: Mapping[str, str | None], *, spare: int = SPARE) -> bytes:
    """Return the bytes before the first tensor with those entries of the metadata set, or removed if they are None.

    A header that must grow gets `spare` bytes more than it needs.

    Raises:
        BadInputError: the file could not be read again.
        SystemRefusedError: the old one cannot be read, or the file changed since.
    """
    old = read_text(shard)
    text = with_entries(old, entries)
    text = text.ljust(len(old)) if len(text) <= len(old) else _padded(text, spare)
    return new_header(shard.name, text, shard.size - shard.data_start)[0]


def with_entries(header: bytes, entries: Mapping[str, str | None]) -> bytes:
    """Return the JSON of a header with those entries of the metadata set or removed, without spaces at its end."""
    text = header.decode().rstrip(" \t\r\n")
    begin, end, metadata = _metadata_in(text)
    changed = {key: value for key, value in {**metadata, **entries}.items() if value is not None}
    value = encoded(changed).decode()
    if begin == end:
        is_last = text[_skip(text, begin)] == "}"
        value = f'"{METADATA}":{value}' + ("" if is_last else ",")
    return (text[:begin] + value + text[end:]).encode()


def _metadata_in(text: str) -> tuple[int, int, dict[str, str]]:
    """Return where the metadata begin and end, and their entries; or where they would begin, if there are none."""
    decoder = json.JSONDecoder()
    first = at = text.index("{") + 1
    while text[at := _skip(text, at)] != "}":
        key, at = decoder.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)
        value, end = decoder.raw_decode(text, begin)
        if key == METADATA:
            return begin, end, value or {}
        at = _skip(text, end)
        at += text[at] == ","
    return first, first, {}


def _skip(text: str, at: int) -> int:
    """Return the next position that is no space."""
    match = _SPACES.match(text, at)
    return match.end() if match else at


def _padded(text: bytes, spare: int) -> bytes:
    """Return the JSON of a header with `spare` spaces behind it, and those that align the tensors."""
    length = len(text) + spare
    return text.ljust(length + -length % _ALIGNMENT)


class NewSet(NamedTuple):
    """A set that will have every tensor of other sets; all but integers are of a single type if `dtype` says so.

    It is one file; or a folder, if it is to have the files of the set `like`, or files of at most `shard_bytes`.
    """

    path: Path
    dtype: str | None
    like: GradientSet | None = None
    shard_bytes: int | None = None

    @property
    def folder(self) -> Path | None:
        """The folder that holds it, if it is sharded."""
        return None if self.like is None and self.shard_bytes is None else self.path

    def files(self, selected: Sequence[Selected]) -> dict[Path, list[Tensor]]:
        """Return the tensors of each file, without a place yet: for each name, as the first that is selected has it.

        If the set `like` has no place for some, raise `BadInputError`, which names them all.
        """
        firsts: dict[str, Selected] = {}
        for each in selected:
            firsts.setdefault(each.tensor.name, each)
        tensors = [
            new_tensor(name, tensor.dtype if tensor.dtype in INTEGERS else self.dtype or tensor.dtype, tensor.shape)
            for name, (_, tensor) in firsts.items()
        ]
        if self.like is not None:
            _require_places(self.like, list(firsts.values()))
            return _in_files_of(self.like, tensors, self.path)
        if self.shard_bytes is None:
            return {self.path: tensors}
        parts = _by_size(tensors, self.shard_bytes)
        if len(parts) == 1:
            return {self.path / f"{_STEM}.safetensors": tensors}
        names = [f"{_STEM}-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
        return {self.path / name: part for name, part in zip(names, parts, strict=True)}

    def index_over(self, files: Mapping[Path, Sequence[Tensor]]) -> tuple[Path, bytes] | None:
        """Return the index of these files and its content; None for a single file, or if `like` has no index."""
        if self.folder is None:
            return None
        like = None if self.like is None else self.like.index
        if like is None and (self.like is not None or len(files) == 1):
            return None
        path = self.folder / (INDEX_NAME if like is None else like.name)
        weight_map = {tensor.name: file.name for file, tensors in files.items() for tensor in tensors}
        total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
        return path, new_index(path, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def targets(self, selected: Sequence[Selected]) -> list[Path]:
        """List every file that will be written, the index last."""
        files = self.files(selected)
        index = self.index_over(files)
        return [*files, *([] if index is None else [index[0]])]


def _require_places(like: GradientSet, selected: Sequence[Selected]) -> None:
    """Raise `BadInputError` for tensors that have no place in the files of a set, or if there is no tensor at all."""
    known = {tensor.name for _, tensor in like.tensors}
    message = say("is not in {} ({})", like.name, option("shard_like"))
    extra = [each for each in selected if each.tensor.name not in known]
    if extra:
        problems = [Problem("extra-tensor", message, shard.name, tensor.name) for shard, tensor in extra]
        hint = say("name a set of the same model, or use {}", option("exclude"))
        raise BadInputError.from_problems(problems, hint)
    if not selected:
        message = say("the gradients have no tensors, so {} makes no file", option("shard_like"))
        raise BadInputError(message, code="no-match")


def _in_files_of(like: GradientSet, tensors: Sequence[Tensor], folder: Path) -> dict[Path, list[Tensor]]:
    """Return tensors in the files and in the order in which a set has them, without files that would have none.

    What the set has in pieces goes whole into the file of the first of them.
    """
    new = {tensor.name: tensor for tensor in tensors}
    files: dict[Path, list[Tensor]] = {}
    for shard in like.shards:
        # Each name is taken once.
        part = [new.pop(old.name) for old in shard.tensors if old.name in new]
        if part:
            files[folder / shard.file_name] = part
    return files


def _by_size(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """Return parts of at most so many bytes, as huggingface_hub makes them; a larger tensor has a part to itself.

    After such a tensor, the part before it is filled further. Parts are in the order in which they are completed.
    """
    parts: list[list[Tensor]] = []
    part: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if tensor.nbytes > limit:
            parts.append([tensor])
            continue
        if filled + tensor.nbytes > limit:
            parts.append(part)
            part, filled = [], 0
        part.append(tensor)
        filled += tensor.nbytes
    return [*parts, part] if part or not parts else parts
