"""What a file is that was refused: found by its first bytes and its name, and said with what to do about it.

Nothing here decides whether a file is valid. It is asked after the safetensors library, or a limit, has refused a file,
and only where that file does not look like a damaged safetensors file.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError
from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.format.limits import MAX_TEXT

if TYPE_CHECKING:
    from pathlib import Path

# Bytes from the start of a file; the magic of tar is at 257.
HEAD = 512
_MIN_SIZE = 8


class Kind(NamedTuple):
    """What a file is, and what to do; if `is_vague`, it may be a bad index or list, whose own message says more."""

    what: str
    remedy: str
    is_vague: bool = False


def recipe(name: str, what: str = "it") -> str:
    """The remedy that is a recipe of the cookbook."""
    return f"convert {what} as docs/cookbook.md shows under {name!r}"


# The remedy for what torch.distributed.checkpoint writes, one file for each process.
DISTRIBUTED = "merge its folder with python -m torch.distributed.checkpoint.format_utils dcp_to_torch"


_EMPTY = Kind("an empty file", "copy or download it again")
_PICKLE = Kind("a pickle", recipe("From a pickle"))
_TORCH = Kind("a checkpoint of torch.save", recipe("From .pt"))
_TENSORFLOW = Kind(
    "a TensorFlow checkpoint", "read it with tf.train.load_checkpoint and save its arrays with safetensors.numpy"
)
_WEB_PAGE = Kind("a web page (HTML), such as an error or login page", "download the file again")
_XML = Kind("XML, such as the error page of a storage service", "download the file again")
_TEXT = Kind("a text file", "check the path; if it is a list of paths, use --files-from", is_vague=True)
_TAR = Kind("a tar archive", "unpack it with tar -xf")
_ZIP = Kind("a zip archive", "unpack it with unzip")

# By how they start. Zip archives and text are looked at more closely.
_MAGIC = {
    b"version https://git-lfs.github.com/": Kind("a Git LFS pointer", "run git lfs pull to fetch the file itself"),
    b"/annex/objects/": Kind("a git-annex pointer", "run git annex get to fetch the file itself"),
    b"\x93NUMPY": Kind("a .npy array", recipe("From .npy")),
    b"\x1f\x8b\x08": Kind("gzip data", "decompress it with gunzip"),
    b"\x28\xb5\x2f\xfd": Kind("Zstandard data", "decompress it with zstd -d"),
    b"\xfd7zXZ\0": Kind("xz data", "decompress it with unxz"),
    b"\x04\x22\x4d\x18": Kind("LZ4 data", "decompress it with lz4 -d"),
    b"7z\xbc\xaf\x27\x1c": Kind("a 7z archive", "unpack it with 7z x"),
    b"\x89HDF\r\n\x1a\n": Kind("an HDF5 file", recipe("From .h5")),
    b"GGUF": Kind("a GGUF file", "use the safetensors files that it was made from"),
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


def foreign(path: Path, head: bytes, size: int) -> BadInputError | None:
    """The error for a refused file that is no safetensors file, not even a damaged one; `head` is its first bytes."""
    kind = kind_of(head, size, path.name)
    return None if kind is None else _error(path, kind, "a safetensors file")


def foreign_index(path: Path, head: bytes, size: int) -> BadInputError | None:
    """The error for a refused index that is no JSON, not even damaged JSON."""
    if is_safetensors(head):
        return _error(path, Kind("a safetensors file", "drop .index.json from its name"), "an index")
    kind = kind_of(head, size, path.name)
    return None if kind is None or kind.is_vague else _error(path, kind, "an index")


def foreign_list(where: str, head: bytes) -> BadInputError | None:
    """The error for a list of paths that are not there, if it is no list."""
    if is_safetensors(head):
        return _error(where, Kind("a safetensors file", "name it without --files-from"), "a list of paths")
    kind = kind_of(head, len(head), where)
    return None if kind is None or kind.is_vague else _error(where, kind, "a list of paths")


def _error(path: Path | str, kind: Kind, wanted: str) -> BadInputError:
    return BadInputError(f"is {kind.what}, not {wanted}; {kind.remedy}", file=path)


def kind_of(head: bytes, size: int, name: str) -> Kind | None:
    """What a file is; None if it looks like a safetensors file, even a damaged one, or has too few bytes to tell."""
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
            kind = Kind(what, "check the path and what wrote it", is_vague=True)
    return kind


def is_safetensors(head: bytes) -> bool:
    """Whether a file starts like a safetensors file that is within the limits."""
    return len(head) > _MIN_SIZE and int.from_bytes(head[:8], "little") <= MAX_TEXT and _has_header(head)


def _has_header(head: bytes) -> bool:
    return head[8:].lstrip(b" \t\r\n").startswith(b"{")


def _by_magic(head: bytes, name: str) -> Kind | None:
    if len(head) > _MIN_SIZE and not any(head):
        return Kind("a file that begins with zeros, as an unfinished copy does", "copy it again", is_vague=True)
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            is_tar = magic == b"\x1f\x8b\x08" and name.endswith((".tar.gz", ".tgz"))
            return Kind("a compressed tar archive", "unpack it with tar -xzf") if is_tar else kind
    if head.startswith(b"PK") and head[2:4] in (b"\x03\x04", b"\x05\x06"):
        return _kind_of_zip(head, name)
    if _BZIP2.match(head):
        return Kind("bzip2 data", "decompress it with bunzip2")
    return _TAR if head[257:262] == b"ustar" else None


def _kind_of_zip(head: bytes, name: str) -> Kind:
    """The kind of an archive by its first entry, whose name is in the first bytes."""
    entry = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if name.endswith(".distcp"):
        return Kind("a part of a distributed torch checkpoint", DISTRIBUTED)
    if _TORCH_ENTRY.search(entry):
        return _TORCH
    if entry.endswith(b".npy"):
        return Kind("an .npz archive", recipe("From .npz"))
    return _ZIP


def _by_weak_magic(head: bytes) -> Kind | None:
    """The kind by a few bytes that may also be the length of a short header."""
    if head.startswith(_OLD_TORCH):
        return _TORCH
    if _PICKLED.match(head):
        return _PICKLE
    if _ONNX.match(head):
        return Kind("an ONNX model", recipe("From .onnx"))
    return None


def _of_text(head: bytes, name: str) -> Kind | None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return _TEXT  # UTF-16.
    if not _is_text(head):
        return None
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith((b"{", b"[")):
        return _kind_of_json(text, name)
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


def _kind_of_json(text: bytes, name: str) -> Kind:
    if not _INDEX.search(text):
        return Kind("JSON", f"if it is an index, its name must end in {INDEX_SUFFIX}", is_vague=True)
    if b".bin" in text:
        return Kind("an index of .bin files", recipe("From .pt"), is_vague=True)
    is_named_so = name.endswith(INDEX_SUFFIX)
    remedy = "correct the index that names it as a shard" if is_named_so else f"rename it to end in {INDEX_SUFFIX}"
    return Kind("an index", remedy, is_vague=True)
