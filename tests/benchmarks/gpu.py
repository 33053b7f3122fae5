"""How fast the CUDA kernels are beside a copy within the device's memory, and beside torch.

    python tests/benchmarks/gpu.py --json gpu.json

Needs an NVIDIA GPU and one of gradtool's extras cuda12 and cuda13; torch is compared with where it is installed.
Kernels are timed with events, after a warm-up, on inputs that are larger than any cache; bytes are counted and not
guessed. It takes a few minutes, and prints its table last.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import COMMAND, with_header

from gradtool.backends.cuda.backend import CudaBackend
from gradtool.backends.cuda.device import DeviceBlock
from gradtool.backends.storage import STORAGE
from gradtool.backends.values import NormSpec, Patch, Piece
from gradtool.reduction import total

ROUNDS = 15
PATCH = 1 << 18
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16"}


class Recorder:
    """A device that notes what is launched on it, and keeps its memory, so that it can be launched again."""

    def __init__(self, device):
        self._device = device
        self.launches, self.buffers = [], []

    def __getattr__(self, name):
        return getattr(self._device, name)

    def allocate(self, nbytes):
        self.buffers.append(self._device.allocate(nbytes))
        return self.buffers[-1]

    def launch(self, *launch):
        self.launches.append(launch)
        self._device.launch(*launch)


class Bench:
    """The device, what is measured on it, and how large."""

    def __init__(self, device, events, copy, *, scale):
        self.device, self.events, self.copy, self.scale = device, events, copy, scale
        self.rows, self.copy_bandwidth = [], math.nan

    def elements(self, count):
        return max(PATCH, int(count * self.scale))

    def filled(self, dtype, elements):
        """A block of normal values, the same few megabytes again and again."""
        codes = STORAGE[dtype].narrow_wide(np.random.default_rng(1).standard_normal(min(elements, 1 << 22)) * 1e-3)
        nbytes = elements * codes.itemsize
        buffer = self.device.allocate(nbytes)
        for at in range(0, nbytes, codes.nbytes):
            self.device.upload(buffer.address + at, codes[: (nbytes - at) // codes.itemsize])
        self.device.wait()
        return DeviceBlock(buffer, buffer.address, nbytes)

    def seconds(self, work):
        """The median time that the device takes for what is asked of it."""
        work()
        return statistics.median(self.events(work) for _ in range(ROUNDS))

    def replay(self, call):
        """The time of the kernels alone that a call of the backend launches."""
        recorder = Recorder(self.device)
        call(CudaBackend(recorder))

        def again():
            for launch in recorder.launches:
                self.device.launch(*launch)

        return self.seconds(again)

    def add(self, name, seconds, nbytes, *, target=None, peer=None):
        """One row: `nbytes` were moved; the peer's seconds for the same, where there is one."""
        bandwidth = nbytes / seconds
        row = {"what": name, "ms": seconds * 1e3, "GB/s": bandwidth / 1e9, "of copy": bandwidth / self.copy_bandwidth}
        if target is not None:
            row["target"] = target
        if peer is not None:
            row |= {"torch ms": peer * 1e3, "times torch": peer / seconds}
        self.rows.append(row)
        print(line(row), file=sys.stderr, flush=True)


def copy(bench):
    one = bench.filled("F32", bench.elements(1 << 30))
    other = bench.device.allocate(one.nbytes)
    seconds = bench.seconds(lambda: bench.copy(other.address, one.address, one.nbytes))
    bench.copy_bandwidth = 2 * one.nbytes / seconds
    bench.add("copy within the device, 4 GiB", seconds, 2 * one.nbytes)


def tiles(bench, torch):
    for dtype in ("BF16", "F32", "F16", "F64", "F8_E4M3"):
        itemsize = STORAGE[dtype].itemsize
        elements = bench.elements((4 << 30) // itemsize)
        block = bench.filled(dtype, elements)
        pieces = [Piece(dtype, 0, elements)]
        asked = dtype in ("BF16", "F32")
        peer = None
        if torch and asked:
            values = torch.empty(elements, dtype=getattr(torch, TORCH_NAMES[dtype]), device="cuda").normal_()
            peer = bench.seconds(lambda values=values: torch._foreach_norm([values]))  # noqa: SLF001 - the fastest that torch has
            del values
        seconds = bench.replay(lambda backend, b=block, p=pieces: backend.tile_sums(b, p, NormSpec()))
        bench.add(
            f"tile sums, {dtype}, 4 GiB", seconds, block.nbytes, target="85 %, 1.5x" if asked else None, peer=peer
        )
        seconds = bench.replay(lambda backend, b=block, p=pieces: backend.scale(b, p, [1.0], math.inf, NormSpec()))
        bench.add(
            f"scale in place with sums, {dtype}, 4 GiB", seconds, 2 * block.nbytes, target="85 %" if asked else None
        )
        del block


def norm_and_clip(bench):
    elements = bench.elements(1_500_000_000)
    block, backend = bench.filled("BF16", elements), CudaBackend(bench.device)
    pieces = [Piece("BF16", 0, elements)]

    def work():
        norm = math.sqrt(total(backend.tile_sums(block, pieces, NormSpec()).sums))
        written = backend.scale(block, pieces, [min(1.0, norm / (norm + 1e-6))], math.inf, NormSpec())
        return math.sqrt(total(written.sums))

    seconds = wall(work)
    bench.add("norm and clip, 1.5 G bf16 elements, by the clock", seconds, 3 * block.nbytes, target="2.5 TB/s")


def many_tensors(bench, torch):
    rng = np.random.default_rng(2)
    sizes = rng.dirichlet(np.full(500, 0.3)) * bench.elements(225_000_000)
    sizes = [max(1, int(size)) for size in sizes]
    pieces, at = [], 0
    for number, size in enumerate(sizes):
        dtype = ("F32", "BF16")[number % 2]
        pieces.append(Piece(dtype, at, size))
        at += -(-size * STORAGE[dtype].itemsize // 16) * 16
    buffer, backend = bench.device.allocate(at), CudaBackend(bench.device)
    bench.device.clear(buffer.address, at)
    block = DeviceBlock(buffer, buffer.address, at)

    def work():
        norm = math.sqrt(total(backend.tile_sums(block, pieces, NormSpec()).sums))
        backend.scale(block, pieces, [1 / (norm + 1)] * len(pieces), math.inf, NormSpec())

    peer = None
    if torch:
        parameters = []
        for number, size in enumerate(sizes):
            dtype = (torch.float32, torch.bfloat16)[number % 2]
            parameters.append(torch.nn.Parameter(torch.zeros(1, dtype=dtype, device="cuda")))
            parameters[-1].data = torch.empty(size, dtype=dtype, device="cuda")
            parameters[-1].grad = torch.ones(size, dtype=dtype, device="cuda")

        def clip():
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            torch.cuda.synchronize()

        peer = wall(clip)
    bench.add("norm and clip, 500 mixed tensors, by the clock", wall(work), 3 * at, target="3x", peer=peer)


def layer_norms(bench, torch):
    for rows, columns in ((8192, 4096), (4096, 16384)):
        rows_here = max(64, int(rows * bench.scale))
        for dtype in ("F32", "BF16"):
            for rms in (False, True):
                patch = patch_of(bench, rows_here, columns, dtype, rms=rms)
                out = bench.device.allocate(patch.x.nbytes)
                x_grad = DeviceBlock(out, out.address, patch.x.nbytes)
                totals = np.zeros((2, columns))

                def call(backend, patch=patch, x_grad=x_grad, totals=totals):
                    backend.add_groups(totals, backend.layer_norm_grads(patch, None, x_grad, patch.x_dtype))

                seconds = bench.replay(call)
                peer = torch_layer_norm(bench, torch, rows, columns, dtype) if torch and not rms else None
                name = f"{'RMS' if rms else 'layer'} norm backward, {rows_here} x {columns}, {dtype}"
                target = "75 %" if rms else "75 %, 1.5x"
                bench.add(name, seconds, 3 * patch.x.nbytes, target=target, peer=peer)


def patch_of(bench, rows, columns, dtype, *, rms):
    return Patch(
        rows,
        columns,
        max(1, PATCH // columns),
        bench.filled(dtype, rows * columns),
        dtype,
        bench.filled(dtype, rows * columns),
        dtype,
        mean=np.zeros(rows),
        inv_std_dev=np.ones(rows),
        scale=np.ones(columns),
        rms=rms,
    )


def torch_layer_norm(bench, torch, rows, columns, dtype):
    kind = getattr(torch, TORCH_NAMES[dtype])
    x, y_grad = (torch.empty(rows, columns, dtype=kind, device="cuda").normal_() for _ in range(2))
    weight, bias = (torch.ones(columns, dtype=kind, device="cuda") for _ in range(2))
    _, mean, rstd = torch.native_layer_norm(x, [columns], weight, bias, 1e-5)
    return bench.seconds(
        lambda: torch.ops.aten.native_layer_norm_backward(
            y_grad, x, [columns], mean, rstd, weight, bias, [True, True, True]
        )
    )


def whole_file(bench):
    """Clip a file in the page cache, on the GPU and on the CPU, as whole processes in turn."""
    elements = bench.elements((8 << 30) // 4)
    with tempfile.TemporaryDirectory() as folder:
        path, target = Path(folder) / "x.safetensors", Path(folder) / "clipped.safetensors"
        chunk = (np.random.default_rng(3).standard_normal(min(elements, 1 << 24)) * 1e-3).astype(np.float32).tobytes()
        with path.open("wb") as file:
            file.write(with_header({"x": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}))
            for at in range(0, 4 * elements, len(chunk)):
                file.write(chunk[: 4 * elements - at])
        seconds = {"cuda": [], "cpu": []}
        for _ in range(4):
            for backend, found in seconds.items():
                command = [*COMMAND, "clip", path, "--max-norm", "1", "--output", target, "--no-fsync", "--quiet"]
                began = time.perf_counter()
                subprocess.run([*map(str, command), "--backend", backend], check=True)
                found.append(time.perf_counter() - began)
                target.unlink()
    # The first of each warms up caches, that of compiled kernels too.
    for backend, found in seconds.items():
        bench.add(
            f"clip of an 8 GiB file, whole process, --backend {backend}", statistics.median(found[1:]), 12 * elements
        )


def wall(work):
    """The median time by the clock of work that waits for its result."""
    work()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def line(row):
    numbers = f"{row['ms']:9.3f} ms {row['GB/s']:8.1f} GB/s {row['of copy']:6.0%} of copy"
    peer = f"  {row['times torch']:5.2f}x torch ({row['torch ms']:.3f} ms)" if "torch ms" in row else ""
    target = f"  [target {row['target']}]" if "target" in row else ""
    return f"{row['what']:60}{numbers}{peer}{target}"


def machine(device, torch):
    facts = {"gpu": device.name, "python": platform.python_version(), "numpy": np.__version__, "cores": os.cpu_count()}
    if torch:
        facts["torch"] = torch.__version__
    return facts


def cuda_events(device):
    """The seconds that the stream of this thread takes for some work, of ours or of torch's."""
    import cupy

    def seconds(work):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        with device.current_stream() as stream:
            begin.record(stream)
            work()
            end.record(stream)
            end.synchronize()
        return cupy.cuda.get_elapsed_time(begin, end) / 1e3

    return seconds


def device_copy(device):
    """What copies within the device."""
    import cupy

    runtime = cupy.cuda.runtime

    def copy(target, source, nbytes):
        with device.current_stream() as stream:
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

    return copy


def load_torch(device):
    """torch, made to work on our stream, so that the same events time it; None where it is missing."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    with device.current_stream() as stream:
        torch.cuda.set_stream(torch.cuda.ExternalStream(stream.ptr, device=device.number))
    return torch


def run(bench, torch, *, files=True):
    """All of it; the rows are in the bench."""
    copy(bench)
    tiles(bench, torch)
    norm_and_clip(bench)
    many_tensors(bench, torch)
    layer_norms(bench, torch)
    if files:
        whole_file(bench)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    from gradtool.backends.cuda.device import open_device
    from gradtool.errors import GradtoolError

    try:
        device = open_device(arguments.device)
    except GradtoolError as error:
        sys.exit(f"gpu.py: {error}")
    torch = load_torch(device)
    bench = Bench(device, cuda_events(device), device_copy(device), scale=1.0)
    run(bench, torch)
    facts = machine(device, torch)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": facts, "rows": bench.rows}, indent=1) + "\n")
    print("\n".join([", ".join(f"{key} {value}" for key, value in facts.items()), *map(line, bench.rows)]))


if __name__ == "__main__":
    main()
