"""What NVRTC makes of the CUDA kernels, for GPUs that need not be there."""

import functools
import os
import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from gradtool.backends.cuda import compiler

nvrtc = pytest.importorskip(
    "cupy_backends.cuda.libs.nvrtc",
    reason="CuPy is not installed: pip install 'gradtool[test-cuda]'",
    exc_type=ImportError,
)
try:
    nvrtc.getVersion()
except RuntimeError as error:
    pytest.skip(f"NVRTC cannot be loaded: {error}", allow_module_level=True)

TYPED = [module for module in compiler.MODULES if module != "mixed"]
# Volta, Ampere, Hopper and Blackwell.
CAPABILITIES = [70, 80, 90, 100]
TILE_KERNELS = [
    f"{work}_{term}" for work in ("measure", "scale") for term in ("maximum", "absolute", "square", "power")
]
LAYER_KERNELS = ["row_sums", "layer_norm_sums", "layer_norm_grads", "add_groups"]
DIFFERENCE_KERNELS = ["differences", "differences_again"]
_USAGE = re.compile(
    r"entry function '(?P<kernel>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def usage(module, capability):
    """What each kernel of a module takes: its registers, and its bytes of local memory and of spills."""
    _, log = compiler.compile_module(module, capability, "--ptxas-options=-v")
    return {
        match["kernel"]: (int(match["registers"]), int(match["stack"]), int(match["stores"]) + int(match["loads"]))
        for match in _USAGE.finditer(log)
    }


@pytest.fixture(scope="module")
def usages():
    """The futures of all usages, for compiling uses every core."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            (module, capability): pool.submit(usage, module, capability)
            for capability in CAPABILITIES
            for module in compiler.MODULES
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def report(request):
    """Collects what is written to it, and shows it in the end, captured or not."""
    lines = []
    yield lines
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("module", compiler.MODULES)
def test_every_kernel_compiles_for_every_gpu_and_keeps_to_its_registers(module, capability, usages, report):
    kernels = usages[module, capability].result()
    again = [f"again_{term}" for term in ("power", "absolute", "square")[: 3 if module == "F64" else 1]]
    expected = (
        [*LAYER_KERNELS, *DIFFERENCE_KERNELS, "trimmed_means"]
        if module == "mixed"
        else [*TILE_KERNELS, *again, "accumulate", "histogram", "extremes", *LAYER_KERNELS]
    )
    assert sorted(kernels) == sorted(expected)
    for kernel, (registers, local, spilled) in kernels.items():
        if local or spilled:
            report.append(
                f"sm_{capability} {module} {kernel}: {registers} registers, {local} B local, {spilled} B spilled"
            )
        threads = 512 if "row" in kernel or "layer" in kernel else 256
        assert registers * threads <= 65_536, kernel
        # Mixed types are rare, and so is Volta; of one type, a few bytes may be spilled, none where speed is asked for.
        is_hot = kernel in ("measure_square", "scale_square") or (
            kernel == "layer_norm_grads" and capability in (80, 90)
        )
        is_rare = module == "mixed" or capability == 70
        assert spilled <= (4096 if is_rare else 0 if is_hot else 1024), kernel


@functools.cache
def ptx_of(module):
    """The intermediate code of a module, by kernel, and that of the functions out of line under their own names."""
    # The one fused operation that is asked for is taken out, so that any other shows.
    text = "static __device__ float unfused(float a, float b, float c) { return a * b + c; }\n"
    text += compiler.source().replace("fmaf(", "unfused(")
    program = nvrtc.createProgram(text, "gradtool.cu", [], [])
    try:
        nvrtc.compileProgram(program, ("-arch=compute_90", *compiler.options(module)))
        text = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    text = text if isinstance(text, str) else text.decode()
    parts = re.split(r"^(?:\.visible )?\.(?:entry|func)\s", text, flags=re.MULTILINE)[1:]
    return {re.search(r"(\w+)\(\s*$|(\w+)\(", part)[0].strip("( \n"): part for part in parts if "{" in part}


@pytest.mark.parametrize("module", TYPED)
def test_nothing_is_contracted_and_no_subnormal_is_flushed(module):
    for name, code in ptx_of(module).items():
        assert not re.search(r"\.ftz[\w.]*\.f32", code), name
        # Only x to the power of p is made of them, whose bits are not promised.
        if "pow" not in name:
            assert "fma." not in code, name


@pytest.mark.parametrize("module", [module for module in TYPED if not module.startswith("F8")])
def test_memory_is_accessed_16_bytes_at_a_time(module):
    code = ptx_of(module)
    width = "v2.u64" if module == "F64" else "v4.u32"
    assert f"ld.global.{width}" in code["measure_square"]
    assert f"ld.global.{width}" in code["scale_square"]
    assert f"st.global.{width}" in code["scale_square"]


def test_no_kernel_adds_floats_atomically():
    for module in compiler.MODULES:
        for name, code in ptx_of(module).items():
            assert not re.search(r"(atom|red)\.[\w.]*\.f(32|64)", code), (module, name)


@pytest.mark.parametrize("module", ["F32", "mixed"])
def test_machine_code_is_whole(module):
    """An ELF file: its tables of sections and of segments end where the file does, or before."""
    image, _ = compiler.compile_module(module, 90)
    segments, sections = struct.unpack_from("<QQ", image, 32)
    segment_bytes, segment_count, section_bytes, section_count = struct.unpack_from("<HHHH", image, 54)
    assert image.startswith(b"\x7fELF")
    assert max(segments + segment_bytes * segment_count, sections + section_bytes * section_count) <= len(image)


def test_a_gpu_that_nvrtc_does_not_know_yet_gets_code_for_its_driver_to_finish():
    image, _ = compiler.compile_module("mixed", 999)
    assert b".target sm_" in image
    assert b".entry layer_norm_grads" in image
