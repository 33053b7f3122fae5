"""Which file, or folder on the way to it, a permission is missing for. Asked only after the system has refused."""

from __future__ import annotations

import os
from pathlib import Path


def missing(file: str) -> tuple[str, str] | None:
    """Find the file or folder that refuses, and what may not be done to it; None if that cannot be told."""
    for path in dict.fromkeys((file, os.path.realpath(file))):
        for folder in map(str, reversed(Path(path).parents)):
            if not _may(folder, os.X_OK):
                return (folder, "this folder may not be entered") if os.path.isdir(folder) else None  # noqa: PTH112
        what = _missing_for(path)
        if what is not None:
            return path, what
    return None


def _missing_for(path: str) -> str | None:
    if os.path.isdir(path):  # noqa: PTH112 - Path's own raises without permission
        rights = {os.X_OK: "entered", os.R_OK: "listed", os.W_OK: "written to"}
    else:
        rights = {os.R_OK: "read", os.W_OK: "written to"}
    kind = "folder" if os.X_OK in rights else "file"
    denied = [word for right, word in rights.items() if os.path.exists(path) and not _may(path, right)]  # noqa: PTH110
    return f"this {kind} may not be {denied[0]}" if denied else None


def _may(path: str, right: int) -> bool:
    return os.access(path, right, effective_ids=os.access in os.supports_effective_ids)
