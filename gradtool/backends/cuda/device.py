"""The GPU, through CuPy, which no other module uses, and its memory.

The tests have a device of their own, which runs the kernels on the CPU.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradtool.backends.cuda.compiler import cached_module
from gradtool.errors import BackendUnavailableError, DeviceMemoryError, SystemRefusedError, option, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_USE_CPU = option("backend", "cpu")
_INSTALL = say(
    "install gradtool[cuda12] or gradtool[cuda13], by the CUDA version that nvidia-smi shows, or use {}", _USE_CPU
)
# The number of this error in the runtime and in the driver.
_OUT_OF_MEMORY = 2
_ALIGNMENT = 256


def open_device(number: int) -> Device:
    """Open GPU `number`, from 0.

    Raises:
        BackendUnavailableError: CuPy, NVRTC, the driver or the device is not there.
    """
    try:
        import cupy
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise BackendUnavailableError(f"CuPy is not installed: {error}", hint=_INSTALL) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        message = f"CuPy finds no usable NVIDIA driver or GPU: {error}"
        raise BackendUnavailableError(message, hint=_INSTALL) from error
    if number >= count:
        raise BackendUnavailableError(f"there is no GPU number {number}: there are {count}, counted from 0")
    try:
        nvrtc.getVersion()
    except Exception as error:
        message = f"NVRTC, which compiles the kernels, cannot be loaded: {error}"
        raise BackendUnavailableError(message, hint=_INSTALL) from error
    try:
        return Device(cupy, number)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        # Its memory is full, or another process uses it exclusively.
        hint = say("use another with {}, or use {}", option("device"), _USE_CPU)
        raise BackendUnavailableError(f"GPU number {number} cannot be used: {error}", hint=hint) from error


class _Stream:
    """A thread's stream, which another thread may use when this thread ends."""

    def __init__(self, stream: Any, idle: list[Any]) -> None:
        self.stream, self._idle = stream, idle

    def __del__(self) -> None:
        self._idle.append(self.stream)


class Device:
    """A GPU. What a thread launches is done in order; copies and kernels are asynchronous until `wait`.

    Each thread has a stream of its own.
    """

    def __init__(self, cupy: Any, number: int) -> None:
        self.number = number
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self._device = cupy.cuda.Device(number)
        name = self._runtime.getDeviceProperties(number)["name"].decode()
        self.name = f"{name}, device {number}, CuPy {cupy.__version__}"
        self._capability = int(self._device.compute_capability)
        # Not CuPy's default pools, which a program that imports gradtool may use.
        self._pool = cupy.cuda.MemoryPool()
        self._pinned = cupy.cuda.PinnedMemoryPool()
        with self._device:
            # Fails on a GPU that cannot be used, before any file is read.
            self._idle = [cupy.cuda.Stream(non_blocking=True)]
        self._thread = threading.local()
        self._lock = threading.Lock()
        self._modules: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], Any] = {}

    def memory(self, nbytes: int) -> memoryview:
        """Allocate page-locked memory of the host, which is copied from and to the device at full speed."""
        try:
            with self.current_stream():
                return np.frombuffer(self._pinned.malloc(nbytes), np.uint8, nbytes).data
        except DeviceMemoryError as error:
            # The host's memory is full, not the GPU's.
            raise MemoryError(f"{nbytes >> 20} MiB of page-locked memory") from error

    def allocate(self, nbytes: int) -> Buffer:
        """Allocate memory of the device, aligned for every type; or raise `DeviceMemoryError`."""
        try:
            with self.current_stream():
                return Buffer(self._pool.malloc(nbytes))
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise self._full() from error

    def free_bytes(self) -> int:
        """Return about how many bytes can still be allocated."""
        with self.current_stream():
            return int(self._device.mem_info[0]) + int(self._pool.free_bytes())

    def upload(self, address: int, content: Any) -> None:
        """Copy a host buffer to the device. It must not change before `wait` returns."""
        host, nbytes = _host(content)
        if nbytes:
            with self.current_stream() as stream:
                self._runtime.memcpyAsync(address, host, nbytes, self._runtime.memcpyHostToDevice, stream.ptr)

    def download(self, address: int, content: Any) -> None:
        """Copy to a host buffer."""
        host, nbytes = _host(content)
        if nbytes:
            with self.current_stream() as stream:
                self._runtime.memcpyAsync(host, address, nbytes, self._runtime.memcpyDeviceToHost, stream.ptr)

    def clear(self, address: int, nbytes: int) -> None:
        """Fill with zeros."""
        if nbytes:
            with self.current_stream() as stream:
                self._runtime.memsetAsync(address, 0, nbytes, stream.ptr)

    def launch(self, module: str, kernel: str, blocks: int, threads: int, job: NDArray[Any]) -> None:
        """Run a kernel of a module on blocks of threads; `job` is its argument."""
        # CuPy passes an array of one element by value.
        with self.current_stream():
            self._kernel(module, kernel)((blocks,), (threads,), (job,))

    def wait(self) -> None:
        """Wait until everything that this thread launched is done."""
        with self.current_stream() as stream:
            stream.synchronize()

    @contextmanager
    def current_stream(self) -> Iterator[Any]:
        """Make CuPy use this device and this thread's stream in a `with` block, whatever the program uses elsewhere.

        CUDA's errors become gradtool's.
        """
        try:
            with self._device:
                holder = getattr(self._thread, "stream", None)
                if holder is None:
                    with self._lock:
                        stream = self._idle.pop() if self._idle else self._cupy.cuda.Stream(non_blocking=True)
                        holder = self._thread.stream = _Stream(stream, self._idle)
                with holder.stream:
                    yield holder.stream
        except (self._runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError) as error:
            if error.status == _OUT_OF_MEMORY:
                raise self._full() from error
            hint = say("use {} to do without it", _USE_CPU)
            raise SystemRefusedError(f"{self.name}: {error}", code="gpu", hint=hint) from error

    def _full(self) -> DeviceMemoryError:
        with self._device:
            free, total = (nbytes >> 20 for nbytes in self._device.mem_info)
        message = f"the memory of {self.name} is full: {free} of {total} MiB are free"
        return DeviceMemoryError(message, hint=say("free some, lower {}, or use {}", option("threads"), _USE_CPU))

    def _kernel(self, module: str, name: str) -> Any:
        with self._lock:
            if (module, name) not in self._kernels:
                if module not in self._modules:
                    self._modules[module] = self._cupy.cuda.Module()
                    self._modules[module].load(cached_module(module, self._capability))
                self._kernels[module, name] = self._modules[module].get_function(name)
            return self._kernels[module, name]


class Buffer:
    """Memory of a device, given back to its pool when it is dropped."""

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer
        self.address = int(pointer.ptr)


def _host(content: Any) -> tuple[int, int]:
    """Return the address and the size of a host buffer."""
    if not memoryview(content).nbytes:
        return 0, 0
    raw = np.frombuffer(content, np.uint8)
    return int(raw.__array_interface__["data"][0]), raw.nbytes


class DeviceBlock(NamedTuple):
    """A block in the device's memory."""

    buffer: Buffer
    address: int
    nbytes: int


def allocate_block(device: Device, nbytes: int, align: int = 0) -> DeviceBlock:
    """Allocate a block whose byte `align` is aligned."""
    buffer = device.allocate(nbytes + _ALIGNMENT)
    return DeviceBlock(buffer, buffer.address + -align % _ALIGNMENT, nbytes)


def allocate_zeros(device: Device, words: int) -> Buffer:
    """Allocate room for results of 8 bytes, all zero."""
    buffer = device.allocate(8 * words + 1)
    device.clear(buffer.address, 8 * words)
    return buffer


def download_words(device: Device, buffer: Buffer, count: int) -> NDArray[np.int64]:
    """Copy results from the device, and wait for them."""
    words = np.empty(count, np.int64)
    device.download(buffer.address, words)
    device.wait()
    return words
