"""The CUDA kernels on the CPU: the same source compiled as C++, on memory that detects writes behind its end."""

import atexit
import ctypes
import itertools
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np

from gradtool.backends.cuda import compiler
from gradtool.errors import DeviceMemoryError

COMPILER = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
_HEADER = Path(__file__).parent / "shim" / "cuda.h"
_GUARD = b"\xa5" * 64


class ShimDevice:
    """A `gradtool.backends.cuda.device.Device` with `limit` bytes of memory.

    What a thread launches is done only when it waits. Memory that is changed or freed too early therefore shows.
    """

    def __init__(self, limit=1 << 40):
        self.name = "the processor"
        self.limit = limit
        self.allocated = self.refused = 0
        self.launches = []
        self._backwards = itertools.cycle([False, True])
        self._thread = threading.local()
        self._lock = threading.Lock()

    def ask(self, *work):
        if not hasattr(self._thread, "asked"):
            self._thread.asked = []
        self._thread.asked += work

    def memory(self, nbytes):
        return memoryview(bytearray(nbytes))

    def allocate(self, nbytes):
        with self._lock:
            if self.allocated + nbytes > self.limit:
                self.refused += 1
                raise DeviceMemoryError(f"the processor has no {nbytes} bytes left")
            self.allocated += nbytes
        return Allocation(self, nbytes)

    def free(self, nbytes):
        with self._lock:
            self.allocated -= nbytes

    def free_bytes(self):
        return self.limit - self.allocated

    def upload(self, address, content):
        raw = np.frombuffer(content, np.uint8) if memoryview(content).nbytes else np.empty(0, np.uint8)
        # Read-only content is copied at once, as the driver copies memory that is not page-locked.
        raw = raw if raw.flags.writeable else raw.copy()
        self.ask(lambda: ctypes.memmove(address, raw.ctypes.data, raw.nbytes))

    def download(self, address, content):
        raw = np.frombuffer(content, np.uint8) if memoryview(content).nbytes else np.empty(0, np.uint8)
        assert raw.flags.writeable
        self.ask(lambda: ctypes.memmove(raw.ctypes.data, address, raw.nbytes))

    def clear(self, address, nbytes):
        self.ask(lambda: ctypes.memset(address, 0, nbytes))

    def launch(self, module, kernel, blocks, threads, job):
        assert job.shape == (1,)
        assert blocks > 0
        self.launches.append((module, kernel, blocks))
        # Every other launch runs threads and blocks backwards, which shows missing barriers. The argument is copied.
        own, backwards = job.copy(), next(self._backwards)
        self.ask(lambda: run(module, kernel, own, blocks, threads, backwards=backwards))

    def wait(self):
        self.ask()
        while self._thread.asked:
            self._thread.asked.pop(0)()


class Allocation:
    """Memory filled with garbage, and with a guard behind its end."""

    def __init__(self, device, nbytes):
        self._device, self._nbytes = device, nbytes
        self._memory = np.full(nbytes + 256 + len(_GUARD), 0xA5, np.uint8)
        self.address = -(-self._memory.ctypes.data // 256) * 256

    def __del__(self):
        self._device.free(self._nbytes)
        memory, end = self._memory, self.address + self._nbytes - self._memory.ctypes.data

        def check():
            assert memory[end : end + len(_GUARD)].tobytes() == _GUARD, "a kernel wrote behind the end of its memory"

        # Checked only when all that this thread launched before is done.
        self._device.ask(check)


_libraries = {}
_lock = threading.Lock()


def run(module, kernel, job, blocks, threads, *, backwards):
    """Run a kernel of a module; one at a time, because all kernels share one copy of their shared memory."""
    with _lock:
        if module not in _libraries:
            _libraries[module] = _compile(module)
        library = _libraries[module]
        function = ctypes.cast(getattr(library, kernel), ctypes.c_void_p)
        library.shim_launch(function, ctypes.c_void_p(job.ctypes.data), blocks, threads, int(backwards))


def _compile(module):
    folder = Path(tempfile.mkdtemp(prefix="gradtool-shim-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    text, library = folder / f"{module}.cpp", folder / f"{module}.so"
    text.write_text(f'#include "{_HEADER}"\n{compiler.source()}')
    defines = [option for option in compiler.options(module) if option.startswith("-D")]
    # The options of NVRTC: no contraction, no flushing of subnormals.
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
    subprocess.run([COMPILER, *flags, *defines, "-o", library, text], check=True)
    return ctypes.CDLL(str(library))
