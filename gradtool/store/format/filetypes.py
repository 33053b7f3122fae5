"""Recognizes files that are not safetensors files, and folders without any, and says what to do about them.

Loaded only to explain a refusal, by the first bytes of a file and its name. Nothing here decides whether it is valid:
the safetensors library, or a limit, has refused it, and their message stands if it looks like a damaged file.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, number_of, option, say
from gradtool.store.format.header import FileTypeError
from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.format.limits import MAX_TEXT
from gradtool.store.source import Source, read_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Bytes from the start of a file; the magic of tar is at 257.
HEAD = 512
_MIN_SIZE = 8
# Entries of a folder that are listed, subfolders that are searched, and kinds of files, or subfolders, that are named.
_MAX_ENTRIES, _MAX_SUBFOLDERS, _MAX_NAMED = 10_000, 100, 3
# For what torch.distributed.checkpoint writes, one file for each process.
DISTRIBUTED = "merge its folder with python -m torch.distributed.checkpoint.format_utils dcp_to_torch"


class FileType(NamedTuple):
    """A type of file, told by the start of a file (`magic`) and by its name, and a hint what to do.

    A file of a type that `is_vague` may also be a bad index or list, whose own message says more.
    """

    name: str
    hint: str
    magic: bytes = b""
    file_name: str = ""
    is_vague: bool = False


def _recipe(name: str, files: str = "it") -> str:
    """Point to a section of a topic."""
    return f"convert {files} as `gradtool help convert` shows under {name!r}"


_TORCH = "a checkpoint of torch.save", _recipe("From .pt")
_TENSORFLOW = (
    "a TensorFlow checkpoint",
    "read it with tf.train.load_checkpoint and save its arrays with safetensors.numpy",
)
_TEXT = "a text file", say("check the path, or use {} for a list of paths", option("files_from"))
_DOWNLOAD = "download the file again"
_GZIP = rb"\x1f\x8b\x08"
_ZIP = rb"PK(?:\x03\x04|\x05\x06)"
_WEIGHT_MAP = rb'\s*[{\[](?=.*"weight_map"\s*:)'
# The first row that matches counts. For a zip archive, the name of its first entry follows its first four bytes.
_BY_MAGIC = (
    FileType("a file that begins with zeros, as an unfinished copy does", "copy it again", rb"\0{9,}\Z", is_vague=True),
    FileType(
        "a Git LFS pointer", "run git lfs pull to fetch the file itself", rb"version https://git-lfs\.github\.com/"
    ),
    FileType("a git-annex pointer", "run git annex get to fetch the file itself", rb"/annex/objects/"),
    FileType("a .npy array", _recipe("From .npy"), rb"\x93NUMPY"),
    FileType("a compressed tar archive", "unpack it with tar -xzf", _GZIP, r"\.(tar\.gz|tgz)$"),
    FileType("gzip data", "decompress it with gunzip", _GZIP),
    FileType("Zstandard data", "decompress it with zstd -d", rb"\x28\xb5\x2f\xfd"),
    FileType("xz data", "decompress it with unxz", rb"\xfd7zXZ\0"),
    FileType("LZ4 data", "decompress it with lz4 -d", rb"\x04\x22\x4d\x18"),
    FileType("bzip2 data", "decompress it with bunzip2", rb"BZh[1-9]1AY&SY"),
    FileType("a 7z archive", "unpack it with 7z x", rb"7z\xbc\xaf\x27\x1c"),
    FileType("a tar archive", "unpack it with tar -xf", rb".{257}ustar"),
    FileType("an HDF5 file", _recipe("From .h5"), rb"\x89HDF\r\n\x1a\n"),
    FileType("a GGUF file", "use the safetensors files that it was made from", rb"GGUF"),
    FileType("a part of a distributed torch checkpoint", DISTRIBUTED, _ZIP, r"\.distcp$"),
    # From the versions of torch so far.
    FileType(*_TORCH, rb"PK\x03\x04.*/(?:data\.pkl|\.format_version|byteorder|version)\Z"),
    FileType("an .npz archive", _recipe("From .npz"), rb"PK\x03\x04.*\.npy\Z"),
    FileType("a zip archive", "unpack it with unzip", _ZIP),
)
# Their few bytes may also be the length of a header, so these rows are for files where they cannot be that.
_BY_WEAK_MAGIC = (
    # The number that torch.save wrote before it wrote zip archives, as protocol 2 has it.
    FileType(*_TORCH, rb"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\."),
    FileType("a pickle", _recipe("From a pickle"), rb"\x80[\x02-\x05]"),
    # The version of the format, then the producer's name or version, or the graph, of which nodes come first.
    FileType(
        "an ONNX model",
        _recipe("From .onnx"),
        rb"\x08[\x01-\x1f](?:[\x12\x1a][\x01-\x7f][ -~]{3}|:[\x80-\xff]{0,4}[\x01-\x7f]\n)",
    ),
    FileType(*_TEXT, rb"\xff\xfe|\xfe\xff", is_vague=True),
)
# The same for what follows the byte order mark of a text; nothing follows if the file is no text.
_BY_TEXT = (
    FileType("an index of .bin files", _recipe("From .pt"), _WEIGHT_MAP + rb"(?=.*\.bin)", is_vague=True),
    FileType(
        "an index", "correct the index that names it as a shard", _WEIGHT_MAP, f"{re.escape(INDEX_SUFFIX)}$", True
    ),
    FileType("an index", f"rename it to end in {INDEX_SUFFIX}", _WEIGHT_MAP, is_vague=True),
    FileType("JSON", f"if it is an index, its name must end in {INDEX_SUFFIX}", rb"\s*[{\[]", is_vague=True),
    FileType(
        "a web page (HTML), such as an error or login page",
        _DOWNLOAD,
        rb"\s*<(?i:!doctype\s+html|html|head|body|script)\b",
    ),
    FileType("XML, such as the error page of a storage service", _DOWNLOAD, rb"\s*<\?xml"),
    FileType(*_TENSORFLOW, rb"\s*model_checkpoint_path:"),
    FileType(*_TEXT, rb".", is_vague=True),
    FileType(*_TENSORFLOW, file_name=r"\.(?:index|data-\d{5}-of-\d{5})$"),
)
# What to do with the files of a folder, by their most common suffix.
_BY_SUFFIX = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _recipe("From .pt", "them")),
    **{suffix: _recipe(f"From {suffix}", "them") for suffix in (".npz", ".npy", ".h5", ".onnx")},
    **dict.fromkeys((".pkl", ".pickle"), _recipe("From a pickle", "them")),
    ".hdf5": _recipe("From .h5", "them"),
    ".distcp": DISTRIBUTED,
    ".gz": "decompress them with gunzip",
    ".zst": "decompress them with zstd -d",
    ".xz": "decompress them with unxz",
    ".bz2": "decompress them with bunzip2",
    ".tar": "unpack them with tar -xf",
    ".tgz": "unpack them with tar -xzf",
    ".zip": "unpack them with unzip",
}


def type_of(head: bytes, size: int, name: str) -> FileType | None:
    """Tell what a file is; None if it may be a safetensors file, even a damaged one, or has too few bytes to tell."""
    if size == 0:
        return FileType("an empty file", "copy or download it again")
    if size < _MIN_SIZE or _is_safetensors(head):
        return None
    is_zip = re.match(_ZIP, head)
    start = head[:4] + head[30 : 30 + int.from_bytes(head[26:28], "little")] if is_zip else head
    file_type = _match(_BY_MAGIC, start, name)
    length = int.from_bytes(head[:8], "little")
    if file_type is None and length > MAX_TEXT:
        file_type = _match(_BY_WEAK_MAGIC, head, name) or _match(_BY_TEXT, _text_of(head), name)
        # The length may be right, and over the limit.
        if file_type is None and not _has_header(head) and length > size:
            unknown = f"a file of an unknown format (its first bytes are {head[:8].hex(' ')})"
            file_type = FileType(unknown, "check the path and what wrote it", is_vague=True)
    return file_type


def _is_safetensors(head: bytes) -> bool:
    """Check whether a file starts like a safetensors file that is within the limits."""
    return len(head) > _MIN_SIZE and int.from_bytes(head[:8], "little") <= MAX_TEXT and _has_header(head)


def _has_header(head: bytes) -> bool:
    return head[8:].lstrip(b" \t\r\n").startswith(b"{")


def _match(rows: Sequence[FileType], head: bytes, name: str) -> FileType | None:
    matches = (row for row in rows if re.match(row.magic, head, re.DOTALL) and re.search(row.file_name, name))
    return next(matches, None)


def _text_of(head: bytes) -> bytes:
    """Return a text without its byte order mark; nothing if it is none."""
    try:
        # The last character may be cut.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)
    except UnicodeError:
        return b""
    is_text = all(character.isprintable() or character in "\t\n\f\r\b\x1b" for character in text)
    return head.removeprefix(codecs.BOM_UTF8) if is_text else b""


def file_type_error(path: Path, *, is_index: bool, is_named: bool) -> FileTypeError | None:
    """Return the error for a refused file that is not even a damaged safetensors file, or index; or else None."""
    expected = ("an index", "remove .index.json from its name") if is_index else ("a safetensors file",)
    # A file that cannot be read, or is not a regular file, was refused for that.
    with (
        contextlib.suppress(OSError, BadInputError),
        contextlib.closing(Source.kind_of(path).at(path, is_named=is_named)) as reader,
    ):
        return _file_type_error(path, read_range(reader, 0, HEAD), reader.source.size, *expected)
    return None


def not_a_list_error(where: str, head: bytes) -> FileTypeError | None:
    """Return the error for a list of paths that is something else."""
    hint = say("name it without {}", option("files_from"))
    return _file_type_error(where, head, len(head), "a list of paths", hint)


def _file_type_error(
    path: Path | str, head: bytes, size: int, expected: str, safetensors_hint: str | None = None
) -> FileTypeError | None:
    """Return the error for a file of another type than expected; safetensors is another type if it has a hint."""
    file_type = type_of(head, size, str(path))
    if safetensors_hint is not None and _is_safetensors(head):
        file_type = FileType("a safetensors file", safetensors_hint)
    elif file_type is None or (file_type.is_vague and safetensors_hint is not None):
        return None
    return FileTypeError(f"is {file_type.name}, not {expected}", file=path, hint=file_type.hint)


def no_safetensors_error(folder: Path) -> BadInputError:
    """Return the error for a folder without a safetensors file: which subfolder has some, or else what there is."""
    content, hint = _content_of(folder)
    return BadInputError(f"has no .safetensors file{content}", file=folder, code="missing-file", hint=hint)


def _content_of(folder: Path) -> tuple[str, str | None]:
    listed = list(entries_of(folder))
    entries = [entry for entry in listed if entry.name[0] != "."]
    subfolders = sorted(entry.name for entry in entries if entry.is_dir())[:_MAX_SUBFOLDERS]
    full = [str(folder / name) for name in subfolders if _has_safetensors(folder / name)]
    if full:
        names = _listing(full[:_MAX_NAMED], len(full) - _MAX_NAMED)
        if len(full) == 1:
            return f", but its subfolder {names} has", "name that folder"
        return f", but its subfolders {names} have", "name one or more of them"
    if not entries:
        return ": it is empty", None
    suffixes = Counter(Path(entry.name).suffix for entry in entries if not entry.is_dir())
    common = [(suffix, count) for suffix, count in suffixes.most_common() if suffix][:_MAX_NAMED]
    more = len(entries) - sum(count for _, count in common)
    counts = _listing([number_of(count, f"{suffix} file") for suffix, count in common], more)
    hint = next((_BY_SUFFIX[suffix] for suffix, _ in common if suffix in _BY_SUFFIX), "check the path")
    within = f" among its first {_MAX_ENTRIES:,} entries" if len(listed) == _MAX_ENTRIES else ""
    return f", but {counts}{within}", hint


def _listing(names: list[str], more: int) -> str:
    """List names in words, and how many are left out."""
    parts = [*names, *([number_of(more, "other")] if more > 0 else [])]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _has_safetensors(folder: Path) -> bool:
    return any(entry.name.endswith(".safetensors") and entry.name[0] != "." for entry in entries_of(folder))


def entries_of(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """List the entries of a folder, up to a limit; nothing if it cannot be listed."""
    with contextlib.suppress(OSError, ValueError), os.scandir(folder or ".") as entries:
        yield from islice(entries, _MAX_ENTRIES)
