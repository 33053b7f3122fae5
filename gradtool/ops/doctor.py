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
from typing import TYPE_CHECKING, Any, ClassVar

from gradtool._version import __version__
from gradtool.backends.choose import choose
from gradtool.declare import operation
from gradtool.errors import BadInputError, GradtoolError, Problem, os_errors_about
from gradtool.options import DoctorOptions
from gradtool.store.format.paths import require_local
from gradtool.store.io.workers import default_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Each with the extra that installs it, if it is optional.
_LIBRARIES = {
    "numpy": None,
    "safetensors": None,
    "typer": None,
    "rich": None,
    "cupy-cuda12x": "cuda12",
    "cupy-cuda13x": "cuda13",
    "distributed": "dask",
}
# Of the instruction sets, by numpy's names, those that make a difference here.
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
class DoctorResult:
    """What was found. A fact that this system does not tell is None.

    `cpu_backend` says whether the compiled kernels are used, and why not; `cpu_features` are the instruction sets that
    may make a difference. `settings` are the environment variables of gradtool. From `path` on, the facts are about its
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
    cpu = choose("cpu")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings = [
        f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("GRADTOOL_") and value
    ]
    slow = f"{cpu.why}, which is several times slower; {cpu.remedy}"
    return DoctorResult(
        gradtool=__version__,
        location=str(Path(__file__).parent.parent),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        executable=sys.executable,
        system=_system(),
        cpu_backend=_cpu_backend(cpu.why),
        cpu_features=_cpu_features(),
        default_threads=default_threads(),
        gpu=_gpu(),
        gpu_driver=_gpu_driver(),
        open_files=None if limit == resource.RLIM_INFINITY else limit,
        settings=" ".join(settings) or None,
        **_folder_facts(named),
        warnings=(Problem("slow", slow),) if cpu.remedy else (),
        per_library=tuple(_libraries()),
    )


def _system() -> str:
    """The operating system, its processor, and its C library."""
    libc = " ".join(platform.libc_ver()).strip()
    parts = [platform.system(), platform.release(), platform.machine()]
    return " ".join(parts) + (f", {libc}" if libc else "")


def _cpu_backend(why: str) -> str:
    """What computes, and for which processors it is compiled."""
    if why.startswith("numpy"):
        return why
    return f"{why} ({import_module('gradtool.backends._kernels').levels()[0]})"


def _cpu_features() -> str | None:
    try:
        there = import_module("numpy._core._multiarray_umath").__cpu_features__
    except (ImportError, AttributeError):
        return None  # numpy has it for its own use, and may move it.
    return " ".join(name for name in _FEATURES if there.get(name))


def _gpu() -> str:
    """The GPU that --backend cuda takes, or why there is none."""
    try:
        return choose("cuda").why
    except GradtoolError as error:
        return f"none: {str(error).partition(';')[0]}"


def _gpu_driver() -> str | None:
    try:
        version = re.search(r"\d+\.\d+(?:\.\d+)?", _DRIVER.read_text())
    except OSError:
        return None
    return None if version is None else version[0]


def _libraries() -> Iterator[LibraryRow]:
    for name, extra in _LIBRARIES.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        yield LibraryRow(version, extra, name)


def _folder_facts(named: str) -> Mapping[str, Any]:
    """What there is to say of the folder of a path."""
    place = Path(named).resolve()
    if not place.exists():
        from gradtool.store.format.hints import no_such_file  # only needed for the error

        raise BadInputError.from_problems([no_such_file(named)])
    path = place if place.is_dir() else place.parent
    with os_errors_about(path):
        disk = os.statvfs(path)
        return {
            "path": str(path),
            "file_system": _file_system(path),
            "free_bytes": disk.f_bavail * disk.f_frsize,
            "writable": os.access(path, os.W_OK | os.X_OK),
        }


def _file_system(path: Path) -> str | None:
    """The type of the file system that a folder is on."""
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    found = None
    length = 0
    for line in lines:
        before, _, after = line.partition(" - ")
        # Spaces are written as octal numbers there.
        mount = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split()[4])
        # Of two on the same folder, the later one is seen.
        if path.is_relative_to(mount) and len(mount) >= length:
            found, length = after.split()[0], len(mount)
    return found
