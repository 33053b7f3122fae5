"""The paths of a call and lists of them, checked before any file is opened."""

from __future__ import annotations

import os
import re
import select
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import BadInputError, UsageError, from_os_error, option, os_errors_about, say
from gradtool.store.format.limits import MAX_PATH, MAX_PATH_LIST, MAX_PATHS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class PathList(NamedTuple):
    """The paths in a file or stream; `head` is its first bytes."""

    where: str
    paths: list[str]
    head: bytes

    def place_of(self, from_end: int) -> str:
        """Say which entry a path is, counted from the end of the paths of a call; nothing if it is an argument."""
        entry = len(self.paths) - from_end + 1
        return f" (entry {entry:,} of {self.where})" if entry > 0 else ""


def is_there(path: str) -> bool:
    """Check whether there is something at a path, if only a broken link.

    If a folder on the way may not be entered, raise `SystemRefusedError`.
    """
    try:
        os.lstat(path)
    except PermissionError as error:
        raise from_os_error(error, path) from error
    except (OSError, ValueError):
        return False
    return True


def require_local(paths: Iterable[str]) -> None:
    """Raise `BadInputError` for the first URL, unless there is a file of that name."""
    for path in paths:
        if "://" in path and not is_there(path):
            from gradtool.store.format.hints import url_problem  # only needed for the error

            if (problem := url_problem(path)) is not None:
                raise BadInputError.from_problems([problem])


def check_output_path(path: str) -> None:
    """Raise `BadInputError` for an output whose folder the shell, or a mount, should have provided."""
    if "://" in path or path.startswith("~"):
        from gradtool.store.format.hints import output_problem  # only needed for the error

        if (problem := output_problem(path)) is not None:
            raise BadInputError.from_problems([problem])


def paths_of(named: Sequence[str], files_from: str | os.PathLike[str] | None) -> list[str]:
    """Return the paths of a call and those of its list, each once; raise `UsageError` if there are none."""
    listed = [] if files_from is None else read_list(os.fspath(files_from)).paths
    if not (paths := [*dict.fromkeys([*named, *listed])]):
        raise no_path_error()
    return paths


def no_path_error() -> UsageError:
    """Return the error for a call without a path."""
    hint = say("name a file, a folder or an index, or use {}", option("files_from"))
    return UsageError("no path is given", hint=hint)


def read_list(source: str, noun: str = "path") -> PathList:
    """Read the paths in a file, or on standard input for `-`: separated by NUL if there is one, else by newline.

    Lines that begin with # are comments; with NULs, there are none. A list of something else has another `noun`.

    Raises:
        BadInputError: the file is missing, or names nothing.
        SystemRefusedError: it cannot be read.
    """
    where, text = read_stream(source, MAX_PATH_LIST)
    head = text[:512]
    separator = b"\0" if b"\0" in text else b"\n"
    # Not `split`: a million separators with nothing between them would become a million strings.
    lines = [line[0] for line in islice(re.finditer(b"[^%b]+" % separator, text), MAX_PATHS + 1)]
    for is_over, limit in (
        (len(text) > MAX_PATH_LIST, f"{MAX_PATH_LIST:,} bytes"),
        (len(lines) > MAX_PATHS, f"{MAX_PATHS:,} {noun}s"),
        (max(map(len, lines), default=0) > MAX_PATH, f"{MAX_PATH:,} bytes for each {noun}"),
    ):
        if is_over:
            from gradtool.store.format.filetypes import not_a_list_error  # only needed for the error

            message = f"exceeds the limit of {limit} in a list of {noun}s"
            raise not_a_list_error(where, head) or BadInputError(message, file=where, code="limit")
    if separator == b"\n":
        lines = [line for line in lines if not line.startswith(b"#")]
    if not lines:
        raise BadInputError(f"lists no {noun}s", file=where)
    return PathList(where, list(map(os.fsdecode, lines)), head)


def read_stream(source: str, limit: int) -> tuple[str, bytes]:
    """Read a file, or standard input for `-`, up to a byte beyond a limit; return what messages call it, too."""
    where = "standard input" if source == "-" else source
    with os_errors_about(where):
        if source == "-":
            return where, _read_stdin(limit)
        with open(source, "rb") as file:  # noqa: PTH123 - Path's own does the same
            return where, file.read(limit + 1)


def _read_stdin(limit: int) -> bytes:
    if sys.stdin is None:
        return b""
    # In a notebook it is a text stream.
    stream = sys.stdin.buffer if hasattr(sys.stdin, "buffer") else sys.stdin
    text = b""
    while True:
        part = stream.read(limit + 1 - len(text))
        text += os.fsencode(part) if isinstance(part, str) else part or b""
        if part == b"" or len(text) > limit or _blocks(stream):
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
