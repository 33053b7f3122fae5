"""The GPU itself, through CuPy; the only module that touches it."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtool.backends.storage import STORAGE
from gradtool.errors import BackendUnavailableError, DeviceMemoryError, SystemRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gradtool.backends.cuda.backend import Buffer

_FILES = ("_device.cuh", "_codes.h", "_storage.cuh", "_tiles.cuh", "_sums.cuh", "_layer_norm.cuh")
# CuPy's own way to compile flushes subnormals to zero, whatever it is asked; so NVRTC is asked here.
_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
_REMEDY = (
    "; install gradtool[cuda12] or gradtool[cuda13], by the CUDA version that nvidia-smi shows, or use --backend cpu"
)
# As the runtime and the driver both number it.
_OUT_OF_MEMORY = 2
MODULES = (*STORAGE, "mixed")


def source() -> str:
    """The text of all kernels."""
    backends = resources.files("gradtool.backends")
    # Of these, one is shared with the C kernels.
    homes = {name: backends if name.endswith(".h") else backends / "cuda" for name in _FILES}
    return "".join((home / name).read_text(encoding="utf-8") for name, home in homes.items())


def options(module: str) -> tuple[str, ...]:
    """What the kernels of a module are compiled with: a storage type, or "mixed"."""
    return _OPTIONS if module == "mixed" else (*_OPTIONS, f"-DGRADTOOL_STORAGE={STORAGE[module].code}")


def compile_module(module: str, capability: int, *extra: str) -> tuple[bytes, str]:
    """A module for a compute capability (90 for sm_90), and the compiler's log. Needs neither a GPU nor a driver.

    The module is machine code, or where NVRTC is older than the GPU, PTX.

    Raises:
        BackendUnavailableError: the GPU is too old for NVRTC.
    """
    from cupy_backends.cuda.libs import nvrtc

    known = [arch for arch in nvrtc.getSupportedArchs() if arch <= capability]
    if not known:
        version = ".".join(map(str, nvrtc.getVersion()))
        raise BackendUnavailableError(
            f"NVRTC {version} knows no GPU as old as sm_{capability}; install gradtool[cuda12], or use --backend cpu"
        )
    is_known = capability in known
    arch = f"-arch=sm_{capability}" if is_known else f"-arch=compute_{max(known)}"
    program = nvrtc.createProgram(source(), "gradtool.cu", [], [])
    try:
        nvrtc.compileProgram(program, (arch, *options(module), *extra))
        # CuPy takes the last byte off, which of a text is its NUL; machine code is not whole without it.
        image = nvrtc.getCUBIN(program) + b"\0" if is_known else nvrtc.getPTX(program)
        return image.encode() if isinstance(image, str) else image, nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def open_device(number: int) -> CupyDevice:
    """GPU `number`, from 0.

    Raises:
        BackendUnavailableError: CuPy, NVRTC, the driver or the device is not there.
    """
    try:
        import cupy
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise BackendUnavailableError(f"CuPy is not installed ({error}){_REMEDY}") from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendUnavailableError(f"no NVIDIA driver, or no GPU, that CuPy can use ({error}){_REMEDY}") from error
    if number >= count:
        raise BackendUnavailableError(f"there is no GPU number {number}; there are {count}, counted from 0")
    try:
        nvrtc.getVersion()
    except Exception as error:
        message = f"NVRTC, which compiles the kernels, cannot be loaded ({error}){_REMEDY}"
        raise BackendUnavailableError(message) from error
    try:
        return CupyDevice(cupy, number)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        # Its memory is full, or another process has it to itself.
        message = f"GPU number {number} cannot be used ({error}); use --device for another, or --backend cpu"
        raise BackendUnavailableError(message) from error


class _Stream:
    """A stream that a thread has to itself, and gives back when it ends."""

    def __init__(self, stream: Any, idle: list[Any]) -> None:
        self.stream, self._idle = stream, idle

    def __del__(self) -> None:
        self._idle.append(self.stream)


class CupyDevice:
    """As `gradtool.backends.cuda.backend.Device` says; each thread has its own stream."""

    def __init__(self, cupy: Any, number: int) -> None:
        self.number = number
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self._device = cupy.cuda.Device(number)
        name = self._runtime.getDeviceProperties(number)["name"].decode()
        self.name = f"{name}, device {number}, CuPy {cupy.__version__}"
        self._capability = int(self._device.compute_capability)
        # Pools of our own: those of a program that uses CuPy too are left alone.
        self._pool = cupy.cuda.MemoryPool()
        self._pinned = cupy.cuda.PinnedMemoryPool()
        with self._device:
            # Made here, so that a GPU that cannot be used is found out before any file is read.
            self._idle = [cupy.cuda.Stream(non_blocking=True)]
        self._thread = threading.local()
        self._lock = threading.Lock()
        self._modules: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], Any] = {}

    def memory(self, nbytes: int) -> memoryview:
        """Page-locked memory."""
        try:
            with self._current():
                return np.frombuffer(self._pinned.malloc(nbytes), np.uint8, nbytes).data
        except DeviceMemoryError as error:
            # It is the machine's memory, not the GPU's.
            raise MemoryError(f"{nbytes >> 20} MiB of page-locked memory") from error

    def allocate(self, nbytes: int) -> Buffer:
        """Memory of the device."""
        try:
            with self._current():
                return _Allocation(self._pool.malloc(nbytes))
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise self._full() from error

    def free_bytes(self) -> int:
        """How much memory may still be allocated."""
        with self._current():
            return int(self._device.mem_info[0]) + int(self._pool.free_bytes())

    def upload(self, address: int, content: Any) -> None:
        """Copy to the device."""
        host, nbytes = _host(content)
        if nbytes:
            with self._current() as stream:
                self._runtime.memcpyAsync(address, host, nbytes, self._runtime.memcpyHostToDevice, stream.ptr)

    def download(self, address: int, content: Any) -> None:
        """Copy from the device."""
        host, nbytes = _host(content)
        if nbytes:
            with self._current() as stream:
                self._runtime.memcpyAsync(host, address, nbytes, self._runtime.memcpyDeviceToHost, stream.ptr)

    def clear(self, address: int, nbytes: int) -> None:
        """Fill with zeros."""
        if nbytes:
            with self._current() as stream:
                self._runtime.memsetAsync(address, 0, nbytes, stream.ptr)

    def launch(self, module: str, kernel: str, blocks: int, threads: int, job: NDArray[Any]) -> None:
        """Run a kernel; CuPy passes an array of one element by value."""
        with self._current():
            self._kernel(module, kernel)((blocks,), (threads,), (job,))

    def wait(self) -> None:
        """Until everything that this thread asked for is done."""
        with self._current() as stream:
            stream.synchronize()

    @contextmanager
    def _current(self) -> Iterator[Any]:
        """This thread's stream, for as long as it takes: a program may have CuPy work on another, or another device.

        What CUDA says is wrong meanwhile is raised as an error of ours.
        """
        try:
            with self._device:
                kept = getattr(self._thread, "kept", None)
                if kept is None:
                    with self._lock:
                        stream = self._idle.pop() if self._idle else self._cupy.cuda.Stream(non_blocking=True)
                        kept = self._thread.kept = _Stream(stream, self._idle)
                with kept.stream:
                    yield kept.stream
        except (self._runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError) as error:
            if error.status == _OUT_OF_MEMORY:
                raise self._full() from error
            raise SystemRefusedError(f"{self.name}: {error}; --backend cpu does without it", code="gpu") from error

    def _full(self) -> DeviceMemoryError:
        with self._device:
            free, total = (nbytes >> 20 for nbytes in self._device.mem_info)
        return DeviceMemoryError(
            f"the memory of {self.name} is full: {free} of {total} MiB are free; free some, lower --threads, or use "
            "--backend cpu"
        )

    def _kernel(self, module: str, name: str) -> Any:
        with self._lock:
            if (module, name) not in self._kernels:
                if module not in self._modules:
                    self._modules[module] = self._load(module)
                self._kernels[module, name] = self._modules[module].get_function(name)
            return self._kernels[module, name]

    def _load(self, name: str) -> Any:
        """A module, compiled once for all calls where there is a folder for caches."""
        from cupy_backends.cuda.libs import nvrtc

        key = repr((source(), options(name), self._capability, nvrtc.getVersion()))
        path = _cache_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        image = _cached(path)
        if image is None:
            image, _ = compile_module(name, self._capability)
            # Without a place for it, it is compiled again the next time.
            with suppress(OSError):
                _write(path, hashlib.sha256(image).digest() + image)
        module = self._cupy.cuda.Module()
        module.load(image)
        return module


class _Allocation:
    """Memory of a pool, which goes back there."""

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer
        self.address = int(pointer.ptr)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # Not Path.home(), which raises where there is none.
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "gradtool"  # noqa: PTH111, PTH117


def _cached(path: Path) -> bytes | None:
    """What was written there, if it is there and whole."""
    if not path.is_absolute():
        return None
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, image = content[:32], content[32:]
    return image if hashlib.sha256(image).digest() == digest else None


def _write(path: Path, content: bytes) -> None:
    """A file that is whole or not there, whoever writes it at the same time."""
    if not path.is_absolute():
        raise FileNotFoundError(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _host(content: Any) -> tuple[int, int]:
    """The address and the size of a buffer of the host."""
    if not memoryview(content).nbytes:
        return 0, 0
    array = np.frombuffer(content, np.uint8)
    return int(array.__array_interface__["data"][0]), array.nbytes
