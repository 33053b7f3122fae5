"""Print diagnostics about this machine and a folder, for bug reports."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import ClassVar

from gradtool._version import __version__
from gradtool.backends.choose import choose
from gradtool.declare import operation
from gradtool.engines.threads import default_threads
from gradtool.errors import BadInputError, GradtoolError, Problem, os_errors_about
from gradtool.ops.results import AnyResult
from gradtool.options import DoctorOptions
from gradtool.store.format.paths import require_local

# Each library with the extra that installs it, None if it is always installed.
_LIBRARIES = dict.fromkeys(("numpy", "safetensors", "typer", "rich"))
_LIBRARIES |= {"cupy-cuda12x": "cuda12", "cupy-cuda13x": "cuda13", "distributed": "dask"}
# The instruction sets that make a difference here, by numpy's names.
_FEATURES = ("SSE42", "AVX", "F16C", "FMA3", "AVX2", "AVX512F", "AVX512_SKX", "NEON", "ASIMD", "ASIMDHP", "SVE")
_DRIVER = Path("/proc/driver/nvidia/version")
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class LibraryRow:
    """A library that gradtool uses: its version, None if it is not installed, and the extra that installs it."""

    version: str | None
    extra: str | None
    name: str


@dataclass(frozen=True)
class DoctorResult(AnyResult):
    """Diagnostics; a field is None if the system does not report it.

    `cpu_backend` says whether the compiled kernels are used, and why not; `cpu_features` are the instruction sets that
    may make a difference. `settings` are the environment variables of gradtool. The fields from `path` on describe its
    folder.
    """

    headline: ClassVar[tuple[str, ...]] = (
        "gradtool", "location", "python", "executable", "system", "cpu_backend", "cpu_features", "default_threads",
        "gpu", "gpu_driver", "open_files", "settings",
        "path", "file_system", "free_bytes", "writable",
    )  # fmt: skip

    gradtool: str
    location: str
    python: str
    executable: str
    system: str
    cpu_backend: str
    cpu_features: str | None
    default_threads: int
    gpu: str
    gpu_driver: str | None
    open_files: int | None
    settings: str | None
    path: str
    file_system: str | None
    free_bytes: int
    writable: bool
    warnings: tuple[Problem, ...]
    per_library: tuple[LibraryRow, ...]


@operation(DoctorOptions)
def doctor(options: DoctorOptions) -> DoctorResult:
    """Print diagnostics about this machine and a folder, for bug reports.

    Nothing is written, and no data is read.

    Raises:
        UsageError: the path is empty.
        BadInputError: there is no such file or folder, or it is a URL.
        SystemRefusedError: the file system of the folder fails.
    """
    named = os.fspath(options.path)
    require_local([named])
    path = Path(named).resolve()
    if not path.exists():
        from gradtool.store.format.hints import no_such_file  # only needed for the error

        raise BadInputError.from_problems([no_such_file(named)])
    folder = path if path.is_dir() else path.parent
    with os_errors_about(folder):
        disk, writable = os.statvfs(folder), os.access(folder, os.W_OK | os.X_OK)
    cpu = choose("cpu")
    driver = re.search(r"\d+\.\d+(?:\.\d+)?", _content(_DRIVER))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    variables = sorted(os.environ.items())
    settings = [f"{name}={value}" for name, value in variables if name.startswith("GRADTOOL_") and value]
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    slow = Problem("slow", f"{cpu.why}, which is several times slower", hint=cpu.remedy)
    return DoctorResult(
        gradtool=__version__,
        location=str(Path(__file__).parent.parent),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        executable=sys.executable,
        system=", ".join(filter(None, [system, " ".join(platform.libc_ver()).strip()])),
        cpu_backend=_cpu_backend(cpu.why),
        cpu_features=_cpu_features(),
        default_threads=default_threads(),
        gpu=_gpu(),
        gpu_driver=driver and driver[0],
        open_files=None if limit == resource.RLIM_INFINITY else limit,
        settings=" ".join(settings) or None,
        path=str(folder),
        file_system=file_system_of(folder),
        free_bytes=disk.f_bavail * disk.f_frsize,
        writable=writable,
        warnings=(slow,) if cpu.remedy else (),
        per_library=tuple(LibraryRow(_version(name), extra, name) for name, extra in _LIBRARIES.items()),
    )


def _cpu_backend(why: str) -> str:
    """Say what computes, and for which processors it is compiled."""
    return why if why.startswith("numpy") else f"{why} ({import_module('gradtool.backends._kernels').levels()[0]})"


def _cpu_features() -> str | None:
    try:
        features = import_module("numpy._core._multiarray_umath").__cpu_features__
    except (ImportError, AttributeError):
        return None  # This is private to numpy, which may move it.
    return " ".join(name for name in _FEATURES if features.get(name))


def _gpu() -> str:
    """Return the GPU that the cuda backend uses, or why there is none."""
    try:
        return choose("cuda").why
    except GradtoolError as error:
        return f"none: {error.problems[0].message}"


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _content(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""


def file_system_of(folder: Path) -> str | None:
    """Return the type of the file system that a folder is on."""
    mounts: list[tuple[int, int, str]] = []
    for number, line in enumerate(_content(_MOUNTS).splitlines()):
        before, _, after = line.partition(" - ")
        # The kernel writes spaces as octal numbers.
        mount = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split()[4])
        if folder.is_relative_to(mount):
            mounts.append((len(mount), number, after.split()[0]))
    # The later of two mounts on one folder hides the other.
    return max(mounts)[2] if mounts else None
