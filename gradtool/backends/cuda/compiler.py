"""The CUDA kernels as machine code: their source, its compilation by NVRTC, and a cache of the results."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from importlib import resources
from pathlib import Path

from gradtool.backends.storage import STORAGE
from gradtool.errors import BackendUnavailableError, option, say

_FILES = (
    *("_device.cuh", "_codes.h", "_storage.cuh", "_tiles.cuh", "_again.cuh"),
    *("_histogram.cuh", "_extremes.cuh", "_sums.cuh", "_order.cuh", "_differences.cuh", "_layer_norm.cuh"),
)
# CuPy's own way to compile always flushes subnormals to zero, so NVRTC is called directly.
_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
# A module for each storage type, and a module for layer norms of several types.
MODULES = (*STORAGE, "mixed")


def source() -> str:
    """Return the text of all kernels."""
    backends = resources.files("gradtool.backends")
    # The C kernels share those that end in .h.
    folders = {name: backends if name.endswith(".h") else backends / "cuda" for name in _FILES}
    return "".join((folder / name).read_text(encoding="utf-8") for name, folder in folders.items())


def options(module: str) -> tuple[str, ...]:
    """Return the compiler options of a module."""
    return _OPTIONS if module == "mixed" else (*_OPTIONS, f"-DGRADTOOL_STORAGE={STORAGE[module].code}")


def compile_module(module: str, capability: int, *extra: str) -> tuple[bytes, str]:
    """Compile a module for a compute capability (90 for sm_90), with neither a GPU nor a driver; return the log, too.

    The module is machine code, or PTX if the GPU is newer than NVRTC.

    Raises:
        BackendUnavailableError: the GPU is too old for NVRTC.
    """
    from cupy_backends.cuda.libs import nvrtc

    known = [arch for arch in nvrtc.getSupportedArchs() if arch <= capability]
    if not known:
        version = ".".join(map(str, nvrtc.getVersion()))
        hint = say("install gradtool[cuda12], or use {}", option("backend", "cpu"))
        raise BackendUnavailableError(f"NVRTC {version} does not support a GPU as old as sm_{capability}", hint=hint)
    is_known = capability in known
    arch = f"-arch=sm_{capability}" if is_known else f"-arch=compute_{max(known)}"
    program = nvrtc.createProgram(source(), "gradtool.cu", [], [])
    try:
        nvrtc.compileProgram(program, (arch, *options(module), *extra))
        # CuPy cuts off the last byte, which is the NUL of a text, but a part of machine code.
        image = nvrtc.getCUBIN(program) + b"\0" if is_known else nvrtc.getPTX(program)
        return image.encode() if isinstance(image, str) else image, nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def cached_module(module: str, capability: int) -> bytes:
    """Return a module from the user's cache; if it is missing or damaged there, compile and cache it."""
    from cupy_backends.cuda.libs import nvrtc

    base = os.environ.get("XDG_CACHE_HOME", "")
    # Path.home() raises if there is no home.
    folder = Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "gradtool"  # noqa: PTH111, PTH117
    if not folder.is_absolute():
        return compile_module(module, capability)[0]
    key = repr((source(), options(module), capability, nvrtc.getVersion()))
    path = folder / f"{module}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    with suppress(OSError):
        content = path.read_bytes()
        digest, image = content[:32], content[32:]
        if hashlib.sha256(image).digest() == digest:
            return image
    image, _ = compile_module(module, capability)
    with suppress(OSError):
        _replace(path, hashlib.sha256(image).digest() + image)
    return image


def _replace(path: Path, content: bytes) -> None:
    """Write a file at once, so that no other process reads a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
