"""The GPU's benchmark runs, small and on the processor; its figures mean nothing here."""

import ctypes
import importlib.util
import time
from pathlib import Path

import pytest
import support


def test_the_gpu_benchmark_runs_and_counts_its_bytes(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu", Path(__file__).parent / "gpu.py")
    gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    try:
        device = support.shim().device
    except ImportError as error:
        pytest.skip(str(error))

    def events(work):
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    monkeypatch.setattr(gpu, "ROUNDS", 1)
    bench = gpu.Bench(device, events, ctypes.memmove, scale=1e-9)
    gpu.run(bench, None, files=False)
    moved = {row["what"]: round(row["GB/s"] * 1e9 * row["ms"] / 1e3) for row in bench.rows}
    assert moved["tile sums, BF16, 4 GiB"] == 2 << 18
    assert moved["scale in place with sums, F32, 4 GiB"] == 8 << 18
    assert moved["RMS norm backward, 64 x 4096, BF16"] == 3 * 2 * 64 * 4096
    assert len(moved) == 21
