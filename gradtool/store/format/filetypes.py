"""What a file is that is no safetensors file, or what is in a folder that has none, and what to do about it.

A file is told by its first bytes and its name. Nothing here decides whether a file is valid: it is asked after the
safetensors library, or a limit, has refused a file, and only where that file does not look like a damaged one.
"""

from __future__ import annotations

import codecs
import os
import re
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError
from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.format.limits import MAX_TEXT
from gradtool.wording import option, say

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Bytes from the start of a file; the magic of tar is at 257.
HEAD = 512
_MIN_SIZE = 8
# Of a folder, no more entries are looked at; of its subfolders, no more are looked into.
_MAX_ENTRIES = 10_000
_MAX_SUBFOLDERS = 100
# As many kinds of files, or subfolders, are named.
_MAX_NAMED = 3


class FileType(NamedTuple):
    """What a file is, and what to do; if `is_vague`, it may be a bad index or list, whose own message says more."""

    name: str
    hint: str
    is_vague: bool = False


def recipe(name: str, what: str = "it") -> str:
    """Point to a recipe of the cookbook."""
    return f"convert {what} as docs/cookbook.md shows under {name!r}"


# For what torch.distributed.checkpoint writes, one file for each process.
DISTRIBUTED = "merge its folder with python -m torch.distributed.checkpoint.format_utils dcp_to_torch"


_EMPTY = FileType("an empty file", "copy or download it again")
_PICKLE = FileType("a pickle", recipe("From a pickle"))
_TORCH = FileType("a checkpoint of torch.save", recipe("From .pt"))
_TENSORFLOW = FileType(
    "a TensorFlow checkpoint", "read it with tf.train.load_checkpoint and save its arrays with safetensors.numpy"
)
_WEB_PAGE = FileType("a web page (HTML), such as an error or login page", "download the file again")
_XML = FileType("XML, such as the error page of a storage service", "download the file again")
_TEXT = FileType(
    "a text file", say("check the path, or use {} for a list of paths", option("files_from")), is_vague=True
)
_TAR = FileType("a tar archive", "unpack it with tar -xf")
_ZIP = FileType("a zip archive", "unpack it with unzip")

# By how they start. Zip archives and text are looked at more closely.
_MAGIC = {
    b"version https://git-lfs.github.com/": FileType("a Git LFS pointer", "run git lfs pull to fetch the file itself"),
    b"/annex/objects/": FileType("a git-annex pointer", "run git annex get to fetch the file itself"),
    b"\x93NUMPY": FileType("a .npy array", recipe("From .npy")),
    b"\x1f\x8b\x08": FileType("gzip data", "decompress it with gunzip"),
    b"\x28\xb5\x2f\xfd": FileType("Zstandard data", "decompress it with zstd -d"),
    b"\xfd7zXZ\0": FileType("xz data", "decompress it with unxz"),
    b"\x04\x22\x4d\x18": FileType("LZ4 data", "decompress it with lz4 -d"),
    b"7z\xbc\xaf\x27\x1c": FileType("a 7z archive", "unpack it with 7z x"),
    b"\x89HDF\r\n\x1a\n": FileType("an HDF5 file", recipe("From .h5")),
    b"GGUF": FileType("a GGUF file", "use the safetensors files that it was made from"),
}
_BZIP2 = re.compile(rb"BZh[1-9]1AY&SY")
_PICKLED = re.compile(rb"\x80[\x02-\x05]")
# The number that torch.save wrote before it wrote zip archives, as protocol 2 has it.
_OLD_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
# The version of the format, then the producer's name or version, or the graph, of which nodes come first.
_ONNX = re.compile(rb"\x08[\x01-\x1f](?:[\x12\x1a][\x01-\x7f][ -~]{3}|:[\x80-\xff]{0,4}[\x01-\x7f]\n)")
_HTML = re.compile(rb"<(?:!doctype\s+html|html|head|body|script)\b", re.IGNORECASE)
_INDEX = re.compile(rb'"weight_map"\s*:')
_TENSORFLOW_NAME = re.compile(r"\.(?:index|data-\d{5}-of-\d{5})$")
# The first entry of an archive, from the versions of torch so far.
_TORCH_ENTRY = re.compile(rb"/(?:data\.pkl|\.format_version|byteorder|version)$")
# By the suffix of most files in a folder.
_RECIPES = {
    "From .pt": (".pt", ".pth", ".bin", ".ckpt"),
    "From .npz": (".npz",),
    "From .npy": (".npy",),
    "From .h5": (".h5", ".hdf5"),
    "From .onnx": (".onnx",),
    "From a pickle": (".pkl", ".pickle"),
}
_HINTS = {suffix: recipe(name, "them") for name, suffixes in _RECIPES.items() for suffix in suffixes} | {
    ".distcp": DISTRIBUTED,
    ".gz": "decompress them with gunzip",
    ".zst": "decompress them with zstd -d",
    ".xz": "decompress them with unxz",
    ".bz2": "decompress them with bunzip2",
    ".tar": "unpack them with tar -xf",
    ".tgz": "unpack them with tar -xzf",
    ".zip": "unpack them with unzip",
}


def not_safetensors_error(path: Path, head: bytes, size: int) -> BadInputError | None:
    """Return the error for a refused file that is not even a damaged safetensors file; `head` is its first bytes."""
    return _error(path, type_of(head, size, path.name), "a safetensors file")


def not_an_index_error(path: Path, head: bytes, size: int) -> BadInputError | None:
    """Return the error for a refused index that is no JSON, not even damaged JSON."""
    if is_safetensors(head):
        return _error(path, FileType("a safetensors file", "remove .index.json from its name"), "an index")
    return _error(path, _certain(type_of(head, size, path.name)), "an index")


def not_a_list_error(where: str, head: bytes) -> BadInputError | None:
    """Return the error for a list of paths that are not there, if it is no list."""
    if is_safetensors(head):
        hint = say("name it without {}", option("files_from"))
        return _error(where, FileType("a safetensors file", hint), "a list of paths")
    return _error(where, _certain(type_of(head, len(head), where)), "a list of paths")


def _certain(kind: FileType | None) -> FileType | None:
    return None if kind is None or kind.is_vague else kind


def _error(path: Path | str, kind: FileType | None, wanted: str) -> BadInputError | None:
    if kind is None:
        return None
    return BadInputError(f"is {kind.name}, not {wanted}", file=path, hint=kind.hint)


def type_of(head: bytes, size: int, name: str) -> FileType | None:
    """Tell what a file is; None if it may be a safetensors file, even a damaged one, or has too few bytes to tell."""
    if size == 0:
        return _EMPTY
    if size < _MIN_SIZE or is_safetensors(head):
        return None
    kind = _by_magic(head, name)
    if kind is None and int.from_bytes(head[:8], "little") > MAX_TEXT:
        kind = _by_weak_magic(head) or _of_text(head, name)
        if kind is None and _TENSORFLOW_NAME.search(name):
            kind = _TENSORFLOW
        # The length may be right, and over the limit.
        if kind is None and not _has_header(head) and int.from_bytes(head[:8], "little") > size:
            what = f"a file of an unknown format (its first bytes are {head[:8].hex(' ')})"
            kind = FileType(what, "check the path and what wrote it", is_vague=True)
    return kind


def is_safetensors(head: bytes) -> bool:
    """Check whether a file starts like a safetensors file that is within the limits."""
    return len(head) > _MIN_SIZE and int.from_bytes(head[:8], "little") <= MAX_TEXT and _has_header(head)


def _has_header(head: bytes) -> bool:
    return head[8:].lstrip(b" \t\r\n").startswith(b"{")


def _by_magic(head: bytes, name: str) -> FileType | None:
    if len(head) > _MIN_SIZE and not any(head):
        return FileType("a file that begins with zeros, as an unfinished copy does", "copy it again", is_vague=True)
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            is_tar = magic == b"\x1f\x8b\x08" and name.endswith((".tar.gz", ".tgz"))
            return FileType("a compressed tar archive", "unpack it with tar -xzf") if is_tar else kind
    if head.startswith(b"PK") and head[2:4] in (b"\x03\x04", b"\x05\x06"):
        return _type_of_zip(head, name)
    if _BZIP2.match(head):
        return FileType("bzip2 data", "decompress it with bunzip2")
    return _TAR if head[257:262] == b"ustar" else None


def _type_of_zip(head: bytes, name: str) -> FileType:
    """Tell an archive by its first entry, whose name is in the first bytes."""
    entry = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if name.endswith(".distcp"):
        return FileType("a part of a distributed torch checkpoint", DISTRIBUTED)
    if _TORCH_ENTRY.search(entry):
        return _TORCH
    if entry.endswith(b".npy"):
        return FileType("an .npz archive", recipe("From .npz"))
    return _ZIP


def _by_weak_magic(head: bytes) -> FileType | None:
    """Tell a file by a few bytes that may also be the length of a short header."""
    if head.startswith(_OLD_TORCH):
        return _TORCH
    if _PICKLED.match(head):
        return _PICKLE
    if _ONNX.match(head):
        return FileType("an ONNX model", recipe("From .onnx"))
    return None


def _of_text(head: bytes, name: str) -> FileType | None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return _TEXT  # UTF-16.
    if not _is_text(head):
        return None
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith((b"{", b"[")):
        return _type_of_json(text, name)
    if _HTML.match(text):
        return _WEB_PAGE
    if text.startswith(b"<?xml"):
        return _XML
    return _TENSORFLOW if text.startswith(b"model_checkpoint_path:") else _TEXT


def _is_text(head: bytes) -> bool:
    try:
        # The last character may be cut.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)
    except UnicodeError:
        return False
    return all(character.isprintable() or character in "\t\n\f\r\b\x1b" for character in text)


def _type_of_json(text: bytes, name: str) -> FileType:
    if not _INDEX.search(text):
        return FileType("JSON", f"if it is an index, its name must end in {INDEX_SUFFIX}", is_vague=True)
    if b".bin" in text:
        return FileType("an index of .bin files", recipe("From .pt"), is_vague=True)
    is_shard = name.endswith(INDEX_SUFFIX)
    hint = "correct the index that names it as a shard" if is_shard else f"rename it to end in {INDEX_SUFFIX}"
    return FileType("an index", hint, is_vague=True)


def no_safetensors_error(folder: Path) -> BadInputError:
    """Return the error for a folder without a safetensors file: which subfolder has some, or else what there is."""
    what, hint = _content_of(folder)
    return BadInputError(f"has no .safetensors file{what}", file=folder, code="missing-file", hint=hint)


def _content_of(folder: Path) -> tuple[str, str | None]:
    entries = list(_entries(folder, _MAX_ENTRIES))
    subfolders = sorted(entry.name for entry in entries if entry.is_dir())
    having = [name for name in subfolders[:_MAX_SUBFOLDERS] if _has_safetensors(folder / name)]
    if having:
        named = _listing([str(folder / name) for name in having[:_MAX_NAMED]], len(having) - _MAX_NAMED)
        if len(having) == 1:
            return f", but its subfolder {named} has", "name that folder"
        return f", but its subfolders {named} have", "name one or more of them"
    if not entries:
        return ": it is empty", None
    suffixes = Counter(os.path.splitext(entry.name)[1] for entry in entries if not entry.is_dir())  # noqa: PTH122
    common = [(suffix, count) for suffix, count in suffixes.most_common() if suffix][:_MAX_NAMED]
    others = len(entries) - sum(count for _, count in common)
    named = _listing([f"{count:,} {suffix} file{'s' * (count > 1)}" for suffix, count in common], others)
    hints = [_HINTS[suffix] for suffix, _ in common if suffix in _HINTS]
    within = f" among its first {_MAX_ENTRIES:,} entries" if len(entries) == _MAX_ENTRIES else ""
    return f", but {named}{within}", hints[0] if hints else "check the path"


def _listing(named: list[str], more: int) -> str:
    """List names in words, and how many are left out."""
    parts = [*named, *([f"{more:,} other{'s' * (more > 1)}"] if more > 0 else [])]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _has_safetensors(folder: Path) -> bool:
    return any(entry.name.endswith(".safetensors") for entry in _entries(folder, _MAX_ENTRIES))


def _entries(folder: Path, most: int) -> Iterator[os.DirEntry[str]]:
    """List the entries of a folder that are not hidden."""
    try:
        with os.scandir(folder) as entries:
            yield from islice((entry for entry in entries if not entry.name.startswith(".")), most)
    except OSError:
        return
