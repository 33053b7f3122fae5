"""The module that touches CuPy, against a CuPy made for the test: there is rarely a GPU where tests run.

What a real CuPy must have for it is checked by `test_a_real_cupy_has_what_is_asked_of_it`.
"""

import ctypes
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import shim_device
from support import block_of, gaussian

from gradtool.backends.cpu import NumpyBackend
from gradtool.backends.cuda import compiler, device
from gradtool.backends.cuda.backend import CudaBackend
from gradtool.backends.values import NormSpec
from gradtool.errors import BackendUnavailableError, DeviceMemoryError, SystemRefusedError


class FakeRuntimeError(Exception):
    def __init__(self, message, status=2):
        super().__init__(message)
        self.status = status


class FakeDriverError(FakeRuntimeError):
    pass


class FakeOutOfMemoryError(Exception):
    pass


class Memory:
    """Memory of the host, called that of a device."""

    def __init__(self, nbytes):
        self.array = np.zeros(nbytes + 1, np.uint8)
        self.ptr = self.array.ctypes.data


class FakeCupy:
    """As much of CuPy as is used, on the processor; kernels run on the shim."""

    __version__ = "14.0-fake"

    def __init__(self, count=2, limit=1 << 30):  # noqa: C901 - a whole module in a class
        self.streams, self.loaded = [], []
        cupy = self

        class Stream:
            def __init__(self, *, non_blocking):
                assert non_blocking
                self.ptr = len(cupy.streams)
                cupy.streams.append(self)

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def synchronize(self):
                pass

        class Pool:
            def malloc(self, nbytes):
                if nbytes > limit:
                    raise FakeOutOfMemoryError
                return Memory(nbytes)

            def free_bytes(self):
                return 100

        class Pinned:
            def malloc(self, nbytes):
                return bytearray(nbytes)

        class Device:
            compute_capability = "90"
            mem_info = (3 << 20, 5 << 20)

            def __init__(self, number):
                assert number < count

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

        class Module:
            def load(self, image):
                assert image.endswith(b"\0")
                self.name = image[:-1].decode()
                cupy.loaded.append(self.name)

            def get_function(self, kernel):
                return lambda grid, block, arguments: shim_device.run(
                    self.name, kernel, arguments[0], grid[0], block[0], backwards=False
                )

        def copy(target, source, nbytes, kind, stream):
            assert kind in (1, 2)
            assert stream < len(cupy.streams)
            ctypes.memmove(target, source, nbytes)

        self.cuda = SimpleNamespace(
            Module=Module,
            Device=Device,
            Stream=Stream,
            MemoryPool=Pool,
            PinnedMemoryPool=Pinned,
            memory=SimpleNamespace(OutOfMemoryError=FakeOutOfMemoryError),
            driver=SimpleNamespace(CUDADriverError=FakeDriverError),
            runtime=SimpleNamespace(
                CUDARuntimeError=FakeRuntimeError,
                getDeviceCount=lambda: count,
                getDeviceProperties=lambda number: {"name": f"GPU {number}".encode()},
                memcpyHostToDevice=1,
                memcpyDeviceToHost=2,
                memcpyAsync=copy,
                memsetAsync=lambda address, value, nbytes, _stream: ctypes.memset(address, value, nbytes),
            ),
        )


class FakeNvrtc(SimpleNamespace):
    """Makes a module of nothing but its name, and says how often."""

    def __init__(self):
        super().__init__(
            compiled=0,
            getVersion=lambda: (12, 9),
            getSupportedArchs=lambda: (70, 90),
            createProgram=lambda *_: {},
            compileProgram=self.compile,
            getCUBIN=lambda program: program["image"],
            getPTX=lambda program: program["image"],
            getProgramLog=lambda _: "",
            destroyProgram=lambda _: None,
        )

    def compile(self, program, options):
        self.compiled += 1
        (program["image"],) = (
            module.encode() for module in compiler.MODULES if options[1:] == compiler.options(module)
        )


@pytest.fixture
def nvrtc(monkeypatch, tmp_path):
    fake = FakeNvrtc()
    for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.libs"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(nvrtc=fake))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


@pytest.fixture
def cupy(monkeypatch, nvrtc):  # noqa: ARG001 - neither is asked for alone
    if shim_device.COMPILER is None:
        pytest.skip("no C++ compiler is found, which runs the kernels in a GPU's place")
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def check_norm(backend):
    block, pieces = block_of(gaussian(70_001, "BF16"), gaussian(37, "F32"))
    result = backend.scale(block, pieces, [0.5, 0.25], 1.0, NormSpec())
    return bytes(block), [part.tolist() for part in vars(result).values()]


def test_a_device_does_what_it_is_asked_for(cupy):
    opened = device.open_device(1)
    assert opened.name == "GPU 1, device 1, CuPy 14.0-fake"
    backend = CudaBackend(opened)
    assert check_norm(backend) == check_norm(NumpyBackend())
    assert opened.free_bytes() == (3 << 20) + 100
    assert len(cupy.streams) == 1
    view = opened.memory(100)
    assert (len(view), view.readonly, view.format) == (100, False, "B")


def test_each_thread_has_a_stream_and_leaves_it_to_the_next(cupy):
    backend = CudaBackend(device.open_device(0))
    barrier = threading.Barrier(2)

    def work():
        barrier.wait()
        check_norm(backend)
        barrier.wait()

    for _ in range(3):
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(cupy.streams) == 2


def test_a_module_is_compiled_once_and_kept(cupy, nvrtc, tmp_path):
    for _ in range(2):
        check_norm(CudaBackend(device.open_device(0)))
    assert nvrtc.compiled == 2
    assert len(cupy.loaded) == 4
    cached = sorted((tmp_path / "cache" / "gradtool").iterdir())
    assert [path.name.split("-")[0] for path in cached] == ["BF16", "F32"]
    assert [path.read_bytes()[32:] for path in cached] == [b"BF16\0", b"F32\0"]


@pytest.mark.parametrize("damage", [b"", b"BF16\0", b"\0" * 32 + b"BF16\0"])
def test_a_damaged_module_is_compiled_again(cupy, nvrtc, tmp_path, damage):
    check_norm(CudaBackend(device.open_device(0)))
    for path in (tmp_path / "cache" / "gradtool").iterdir():
        path.write_bytes(damage)
    for _ in range(2):
        check_norm(CudaBackend(device.open_device(0)))
    assert (nvrtc.compiled, len(cupy.loaded)) == (4, 6)


def test_without_a_place_to_keep_modules_they_are_compiled_each_time(cupy, nvrtc, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    for _ in range(2):
        check_norm(CudaBackend(device.open_device(0)))
    assert (nvrtc.compiled, len(cupy.loaded)) == (4, 4)


def test_without_a_home_there_is_no_cache(cupy, monkeypatch, tmp_path):  # noqa: ARG001
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(compiler.os.path, "expanduser", lambda path: path)
    check_norm(CudaBackend(device.open_device(0)))
    assert list(tmp_path.iterdir()) == []


def test_page_locked_memory_may_be_short(cupy):
    def fails(*_):
        raise FakeRuntimeError("cudaErrorMemoryAllocation")

    cupy.cuda.PinnedMemoryPool.malloc = fails
    opened = device.open_device(0)
    with pytest.raises(MemoryError, match="3 MiB of page-locked memory"):
        opened.memory(3 << 20)
    assert len(cupy.streams) == 1


def test_a_gpu_that_is_full_or_taken_is_not_available(cupy):
    def fails(**_):
        raise FakeRuntimeError("cudaErrorDevicesUnavailable")

    cupy.cuda.Stream = fails
    with pytest.raises(BackendUnavailableError, match=r"GPU number 1 cannot be used.*use another with device"):
        device.open_device(1)


def test_a_gpu_that_nvrtc_has_forgotten_is_not_available(nvrtc):
    nvrtc.getSupportedArchs = lambda: (75, 90)
    with pytest.raises(BackendUnavailableError, match=r"NVRTC 12.9 does not support a GPU as old as sm_70; .*cuda12"):
        compiler.compile_module("F32", 70)


def test_full_memory_is_an_error_that_says_how_much(cupy):  # noqa: ARG001
    opened = device.open_device(0)
    with pytest.raises(DeviceMemoryError, match=r"GPU 0, .* is full: 3 of 5 MiB are free.*backend=\"cpu\""):
        opened.allocate(2 << 30)


@pytest.mark.parametrize("kind", [FakeRuntimeError, FakeDriverError])
@pytest.mark.parametrize(("status", "raised"), [(2, DeviceMemoryError), (719, SystemRefusedError)])
def test_what_cuda_says_is_wrong_is_an_error_of_ours(cupy, kind, status, raised):
    opened = device.open_device(0)

    def fails(*_):
        raise kind("cudaErrorOfSomeKind", status)

    cupy.cuda.runtime.memcpyAsync = fails
    with pytest.raises(raised) as caught:
        opened.upload(0, b"x")
    assert type(caught.value) is raised
    assert caught.value.exit_code == 5
    assert "GPU 0" in str(caught.value)


def test_what_is_missing_is_named_with_its_remedy(monkeypatch, nvrtc):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        BackendUnavailableError, match=r"CuPy is not installed.*gradtool\[cuda12\] or gradtool\[cuda13\]"
    ):
        device.open_device(0)
    fake = FakeCupy(count=2)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    with pytest.raises(BackendUnavailableError, match="no GPU number 2: there are 2, counted from 0"):
        device.open_device(2)

    def no_library():
        raise RuntimeError("libnvrtc.so.12: no such file")

    nvrtc.getVersion = no_library
    with pytest.raises(BackendUnavailableError, match=r"NVRTC.* cannot be loaded: libnvrtc.*\[cuda12\]"):
        device.open_device(0)

    def no_driver():
        raise FakeRuntimeError("cudaErrorNoDevice")

    fake.cuda.runtime.getDeviceCount = no_driver
    with pytest.raises(BackendUnavailableError, match=r"no usable NVIDIA driver or GPU: cudaErrorNoDevice"):
        device.open_device(0)


def test_a_real_cupy_has_what_is_asked_of_it():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: pip install 'gradtool[test-cuda]'")
    fake = FakeCupy()
    for name, part in vars(fake.cuda).items():
        real = getattr(cupy.cuda, name)
        wanted = [key for key in vars(part) if key[0] != "_" or key in ("__enter__", "__exit__")]
        for attribute in wanted:
            assert hasattr(real, attribute), f"cupy.cuda.{name}.{attribute}"
    assert cupy.cuda.runtime.CUDARuntimeError(2).status == 2
    from cupy_backends.cuda.libs import nvrtc

    for attribute in vars(FakeNvrtc()):
        assert attribute == "compiled" or hasattr(nvrtc, attribute), attribute
