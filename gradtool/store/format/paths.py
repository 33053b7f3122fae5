"""Lists of paths, and names of files in a folder."""

from __future__ import annotations

import os
import re
import select
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import BadInputError, Problem, UsageError, from_os_error, os_errors_about
from gradtool.store.format.limits import MAX_PATH, MAX_PATH_LIST, MAX_PATHS
from gradtool.wording import Text, Wording, option, say

if TYPE_CHECKING:
    from collections.abc import Iterable

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# What is wrong with a path that begins with ~/, and what to do.
UNEXPANDED = Wording("the shell did not expand the ~", "~ is not expanded")
EXPAND = Text("use Path.expanduser", "remove the quotes around it, or write $HOME")
_DOWNLOADERS = {"s3": "aws s3 cp", "gs": "gcloud storage cp", "hf": "hf download", "http": "curl", "https": "curl -L"}


def no_path_error() -> UsageError:
    """Return the error for a call without a path."""
    hint = say("name a file, a folder or an index, or use {}", option("files_from"))
    return UsageError("no path is given", hint=hint)


def url_problem(path: str) -> Problem | None:
    """Say what is wrong with a path that is a URL; None for any other path."""
    match = _URL.match(path)
    if match is None:
        return None
    scheme = match[1].lower()
    if scheme == "file":
        return Problem("missing-file", "is a URL, not a path", path, hint="remove file://")
    example = f" (such as with {_DOWNLOADERS[scheme]})" if scheme in _DOWNLOADERS else ""
    hint = f"download the file{example} or mount the storage first"
    return Problem("missing-file", "is a URL, which gradtool cannot read", path, hint=hint)


def is_there(path: str) -> bool:
    """Whether there is something at a path, if only a broken link.

    Raises:
        SystemRefusedError: a folder on the way may not be entered.
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
        if (problem := url_problem(path)) is not None and not is_there(path):
            raise BadInputError.from_problems([problem])


def check_output_path(path: str) -> None:
    """Raise `BadInputError` for an output whose folder the shell, or a mount, should have provided."""
    if _URL.match(path):
        what, hint = "is a URL, which gradtool cannot write to", "name a local path and upload the result"
    elif path.partition(os.sep)[0] == "~" and not os.path.lexists("~"):
        what, hint = say("{}", UNEXPANDED), EXPAND
    else:
        return
    raise BadInputError(what, file=path, code="missing-file", hint=hint)


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


class PathList(NamedTuple):
    """The paths in a file or stream; `head` is its first bytes."""

    where: str
    paths: list[str]
    head: bytes


def read_path_list(source: str) -> PathList:
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
    head = text[:512]
    separator = b"\0" if b"\0" in text else b"\n"
    # Not `split`: a million separators with nothing between them would become a million strings.
    lines = [line[0] for line in islice(re.finditer(b"[^%b]+" % separator, text), MAX_PATHS + 1)]
    over = f"{MAX_PATH_LIST:,} bytes" if len(text) > MAX_PATH_LIST else ""
    over = over or (f"{MAX_PATHS:,} paths" if len(lines) > MAX_PATHS else "")
    over = over or (f"{MAX_PATH:,} bytes for each path" if max(map(len, lines), default=0) > MAX_PATH else "")
    if over:
        from gradtool.store.format.filetypes import not_a_list_error  # only needed for the error

        what = f"exceeds the limit of {over} in a list of paths"
        raise not_a_list_error(where, head) or BadInputError(what, file=where, code="limit")
    if not lines:
        raise BadInputError("names no file", file=where)
    return PathList(where, list(map(os.fsdecode, lines)), head)


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
