"""What an engine of other processes costs, and how it scales where the file system does."""

import numpy as np
import pytest

pytest.importorskip("distributed", reason="Dask is not installed; pip install '.[test-dask]'")

from dask_cluster import DaskCluster
from support import write

GIB, MIB = 1 << 30, 1 << 20
# A worker whose file system gives it so many bytes a second, as one of many that share nothing but it.
SLOW = """
import os, time
def slow(call, count=lambda result, *_: result):
    def moved(*arguments):
        began = time.perf_counter()
        result = call(*arguments)
        time.sleep(max(0.0, count(result, *arguments) / {rate} - (time.perf_counter() - began)))
        return result
    return moved
os.preadv, os.pwritev = slow(os.preadv), slow(os.pwritev)
try:
    from gradtool.backends import _kernels
    _kernels.run = slow(_kernels.run, lambda _, block, *rest: block.report[0] if hasattr(block, "report") else 0)
except ImportError:
    pass
"""


@pytest.mark.parametrize("command", [["norm"], ["clip", "--max-norm", "1", "--no-fsync"]])
def test_an_engine_costs_little_on_one_worker(bench, gradtool_command, tmp_path, command):
    source = bench.file("f32", GIB, 48)
    work = str(bench.restored(source))
    ours = [*gradtool_command, command[0], work, *command[1:]]
    with DaskCluster(tmp_path) as cluster:
        cluster.worker()
        there, here = bench.in_turn([[*ours, *cluster.options], ours], source)
    more = there.median - here.median
    detail = f"{there.median:.3f} s, threads {here.median:.3f} s, {there.peak_mib:.0f} MiB"
    bench.note(f"engine, 1 worker, {command[0]} f32 1 GiB", f"+{more:.2f} s", "<= 1.5 s + 5 %", detail)
    assert not bench.timing or more <= 1.5 + 0.05 * here.median


@pytest.mark.parametrize("command", [["norm"], ["clip", "--max-norm", "1", "--no-fsync"]])
def test_workers_scale_with_the_file_system(bench, gradtool_command, tmp_path, command):
    nbytes, rate = (64 * MIB, 100 * MIB) if bench.timing else (MIB // 4, 1 << 40)
    folder = tmp_path / "set"
    folder.mkdir()
    content = bench.file("f32", nbytes if bench.timing else nbytes * 1000, 1).read_bytes()
    for number, letter in enumerate(b"abcdefghijklmnop"):
        # Each tensor has a name of its own.
        (folder / f"{number:02}.safetensors").write_bytes(content.replace(b'"t0"', b'"t%c"' % letter, 1))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLOW.format(rate=rate))
    seconds = {}
    for workers in (1, 2, 4) if bench.timing else (2,):
        with DaskCluster(tmp_path / f"cluster{workers}") as cluster:
            for _ in range(workers):
                cluster.worker(PYTHONPATH=str(tmp_path / "site"))
            elsewhere = ["--output-dir", str(tmp_path / "out")] if command[0] == "clip" else []
            ours = [*gradtool_command, command[0], str(folder), *command[1:], *elsewhere, "--threads", "1"]
            (run,) = bench.in_turn([[*ours, *cluster.options]])
            seconds[workers] = run.median
    for workers in (2, 4) if bench.timing else ():
        efficiency = seconds[1] / seconds[workers] / workers
        what = f"engine, {workers} workers, {command[0]}, slow files"
        bench.note(what, f"{efficiency:.0%}", ">= 85%", ", ".join(f"{n}: {one:.2f} s" for n, one in seconds.items()))
        assert not bench.timing or efficiency >= 0.85


@pytest.mark.parametrize("command", [["norm"], ["clip", "--max-norm", "1", "--no-fsync"]])
def test_the_command_stays_small_however_many_shards_there_are(bench, gradtool_command, tmp_path, command):
    count = 10_000 if bench.timing else 50
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(count):
        write(folder / f"{number:05}.safetensors", {f"t{number}": np.full(16, number + 1, np.float32)})
    elsewhere = ["--output-dir", str(tmp_path / "out")] if command[0] == "clip" else []
    bench.rounds = 1
    with DaskCluster(tmp_path / "cluster") as cluster:
        for _ in range(2):
            cluster.worker()
        ours = [*gradtool_command, command[0], str(folder), *command[1:], *elsewhere, *cluster.options]
        (run,) = bench.in_turn([ours])
    figure = f"{run.peak_mib:.0f} MiB"
    detail = f"{run.median:.1f} s, {run.median / count * 1e3:.1f} ms a shard"
    bench.note(f"engine, {count:,} small shards, {command[0]}", figure, "<= 300 MiB", detail)
    assert run.peak_mib <= 300
