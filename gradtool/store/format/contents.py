"""What is in a folder that has no safetensors file: said with the error, so that one sees what to name instead."""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from gradtool.store.format.sniff import DISTRIBUTED, recipe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Of a folder, no more entries are looked at; of its subfolders, no more are looked into.
_MAX_ENTRIES = 10_000
_MAX_SUBFOLDERS = 100
# As many kinds of files, or subfolders, are named.
_MAX_NAMED = 3
_RECIPES = {
    "From .pt": (".pt", ".pth", ".bin", ".ckpt"),
    "From .npz": (".npz",),
    "From .npy": (".npy",),
    "From .h5": (".h5", ".hdf5"),
    "From .onnx": (".onnx",),
    "From a pickle": (".pkl", ".pickle"),
}
_REMEDIES = {suffix: recipe(name, "them") for name, suffixes in _RECIPES.items() for suffix in suffixes} | {
    ".distcp": DISTRIBUTED,
    ".gz": "decompress them with gunzip",
    ".zst": "decompress them with zstd -d",
    ".xz": "decompress them with unxz",
    ".bz2": "decompress them with bunzip2",
    ".tar": "unpack them with tar -xf",
    ".tgz": "unpack them with tar -xzf",
    ".zip": "unpack them with unzip",
}


def without_safetensors(folder: Path) -> str:
    """The message for a folder without a safetensors file: which subfolder has some, or else what there is."""
    entries = list(_entries(folder, _MAX_ENTRIES))
    subfolders = sorted(entry.name for entry in entries if entry.is_dir())
    having = [name for name in subfolders[:_MAX_SUBFOLDERS] if _has_safetensors(folder / name)]
    if having:
        verb, remedy = ("has", "name that") if len(having) == 1 else ("have", "name one of them, or several")
        named = _listing([str(folder / name) for name in having[:_MAX_NAMED]], len(having) - _MAX_NAMED)
        return f"has no .safetensors file, but its subfolder{'s' * (verb == 'have')} {named} {verb}; {remedy}"
    if not entries:
        return "has no .safetensors file; it is empty"
    suffixes = Counter(os.path.splitext(entry.name)[1] for entry in entries if not entry.is_dir())  # noqa: PTH122
    common = [(suffix, count) for suffix, count in suffixes.most_common() if suffix][:_MAX_NAMED]
    others = len(entries) - sum(count for _, count in common)
    named = _listing([f"{count:,} {suffix} file{'s' * (count > 1)}" for suffix, count in common], others)
    remedies = [_REMEDIES[suffix] for suffix, _ in common if suffix in _REMEDIES]
    within = f" among its first {_MAX_ENTRIES:,} entries" if len(entries) == _MAX_ENTRIES else ""
    return f"has no .safetensors file, but {named}{within}; {remedies[0] if remedies else 'check the path'}"


def _listing(named: list[str], more: int) -> str:
    """The names in words, and how many are left out."""
    parts = [*named, *([f"{more:,} other{'s' * (more > 1)}"] if more > 0 else [])]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _has_safetensors(folder: Path) -> bool:
    return any(entry.name.endswith(".safetensors") for entry in _entries(folder, _MAX_ENTRIES))


def _entries(folder: Path, most: int) -> Iterator[os.DirEntry[str]]:
    """The entries of a folder that are not hidden."""
    try:
        with os.scandir(folder) as entries:
            yield from islice((entry for entry in entries if not entry.name.startswith(".")), most)
    except OSError:
        return
