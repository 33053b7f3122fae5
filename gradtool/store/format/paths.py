"""Lists of paths, and names of files in a folder."""

from __future__ import annotations

import os
import re
import select
import sys
from typing import Any

from gradtool.errors import BadInputError, os_errors_about
from gradtool.store.format.limits import MAX_PATH_LIST


def is_file_name(name: Any) -> bool:
    """Whether it is the name of a file in a folder, and leads nowhere else."""
    # Not by a Path: there may be a hundred thousand of them.
    if not isinstance(name, str) or name in {"", ".", ".."} or "/" in name or "\0" in name:
        return False
    try:
        os.fsencode(name)
    except UnicodeError:
        return False
    return True


def read_path_list(source: str) -> list[str]:
    """The paths in a file, or on standard input for `-`: separated by NUL if there is one, else by newline.

    Raises:
        BadInputError: the file is missing, or names nothing.
        SystemRefusedError: it cannot be read.
    """
    where = "standard input" if source == "-" else source
    with os_errors_about(where):
        if source == "-":
            text = _read_stdin()
        else:
            with open(source, "rb") as file:  # noqa: PTH123 - Path's own does the same
                text = file.read(MAX_PATH_LIST + 1)
    if len(text) > MAX_PATH_LIST:
        message = f"has over {MAX_PATH_LIST:,} bytes, the limit for a list of paths"
        raise BadInputError(message, file=where, code="limit")
    separator = b"\0" if b"\0" in text else b"\n"
    # Not `split`: a million separators with nothing between them would become a million strings.
    paths = [os.fsdecode(line) for line in re.findall(b"[^%b]+" % separator, text)]
    if not paths:
        raise BadInputError("names no file", file=where)
    return paths


def _read_stdin() -> bytes:
    if sys.stdin is None:
        return b""
    # In a notebook it is a text stream.
    stream = sys.stdin.buffer if hasattr(sys.stdin, "buffer") else sys.stdin
    text = b""
    while True:
        part = stream.read(MAX_PATH_LIST + 1 - len(text))
        text += os.fsencode(part) if isinstance(part, str) else part or b""
        if part == b"" or len(text) > MAX_PATH_LIST or _blocks(stream):
            return text
        # A non-blocking pipe returns what it has; only an empty answer, not None, is its end.
        waiting = select.poll()
        waiting.register(stream, select.POLLIN)
        waiting.poll()


def _blocks(stream: Any) -> bool:
    try:
        return os.get_blocking(stream.fileno())
    except OSError:  # It is not a file.
        return True
