"""Passes are values: other processes can run parts of them, and get the same bits."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import numpy as np
import pytest
from parts import run_part, targets_of
from support import encode, read, write, write_index

import gradtool
from gradtool import backends, tuning
from gradtool.backends import NormSpec, Rule
from gradtool.engines.threads import Threads
from gradtool.ops.accumulate.add import Add
from gradtool.ops.accumulate.match import match
from gradtool.ops.diff.compare import Compare
from gradtool.ops.exponents import Profile
from gradtool.ops.passes import Measure, Rewrite
from gradtool.ops.totals import Total
from gradtool.store.transaction.destination import DISCARD, NewFile, Overwritten
from gradtool.store.transaction.inputs import Inputs
from gradtool.store.transaction.open import open_to_write
from gradtool.store.transaction.output_options import OutputOptions

TENSORS = {"a": (70_000, "F32"), "b": (200_001, "BF16"), "c": (5, "F64"), "d": (131_072, "F16"), "e": (3000, "F32")}
SPEC = NormSpec()


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def gradient_set(folder, seed):
    rng = np.random.default_rng(seed)
    arrays = {name: encode(rng.standard_normal(size) * 9, dtype) for name, (size, dtype) in TENSORS.items()}
    names = list(arrays)
    return write_index(folder, {f"{i}.safetensors": {name: arrays[name] for name in names[i::3]} for i in range(3)})


def run_in(pool, one, destination=DISCARD):
    count = len({selected.shard for selected in targets_of(one)})
    jobs = [pool.submit(run_part, one, destination, number) for number in range(count)]
    found = one.empty()
    for job in jobs:
        found.merge(job.result())
    return found


def facts(found):
    return [
        found.norms(per_tensor=True),
        *(getattr(found, fact).tolist() for fact in ("max_abs", "nan", "inf", "zeros")),
    ]


def values_in(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: array.tobytes() for file in files for name, array in read(file).items()}


def test_the_passes_of_clip_in_other_processes(tmp_path, pool):
    paths = [gradient_set(tmp_path / "ours", 1), gradient_set(tmp_path / "theirs", 1)]
    result = gradtool.clip(paths[0], max_norm=1.0)
    with open_to_write(Inputs([str(paths[1])]), OutputOptions()) as (opened, output):
        before = run_in(pool, Measure(opened.selected, SPEC))
        assert before.norms().whole == result.norm_before
        rewrite = Rewrite(opened.selected, SPEC, [result.coef] * len(opened.selected), np.inf)
        expected = Threads(backends.choose("cpu").backend).run(rewrite)
        with output.writing(output.files(opened.selected)) as destination:
            written = run_in(pool, rewrite, destination)
    assert facts(written) == facts(expected)
    assert written.norms().whole == result.norm_after
    assert values_in(tmp_path / "theirs") == values_in(tmp_path / "ours")


def test_the_passes_of_accumulate_in_other_processes(tmp_path, pool):
    paths = [gradient_set(tmp_path / "ours", 1), gradient_set(tmp_path / "theirs", 1)]
    grads = [gradient_set(tmp_path / f"g{seed}", seed) for seed in (2, 3)]
    result = gradtool.accumulate(paths[0], grads, weight=[0.3, -2.0], max_norm=1.0)
    inputs = Inputs([str(path) for path in (paths[1], *grads)])
    with open_to_write(inputs, OutputOptions(), writes=1) as (opened, output):
        targets = opened.selected_in(output.shards)
        offered = [(one, opened.selected_in(one.shards)) for one in opened.sets[1:]]
        adding = Add(
            targets,
            match(targets, offered, [Total(0.3), Total(-2.0)], skip=False),
            Rule(rounds=False),
            SPEC,
            measures_before=True,
        )
        sums = run_in(pool, adding)
        assert (sums.before.norms().whole, sums.after.norms().whole) == (result.norm_before, result.sum_norm)
        adding = adding._replace(rule=Rule(factor=result.coef), measures_before=False)
        with output.writing(output.files(targets)) as destination:
            found = run_in(pool, adding, destination)
    assert found.after.norms().whole == result.norm_after
    assert values_in(tmp_path / "theirs") == values_in(tmp_path / "ours")


def test_only_a_pass_that_writes_nothing_has_a_backend_read_for_itself(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": np.ones(5 << 20, np.float32)})
    opened = Inputs([str(path)]).open()
    measure = Measure(opened.selected, SPEC)
    backend = mock.Mock(block_bytes=tuning.BLOCK_BYTES)
    in_place = Overwritten({opened.shards[0]: (NewFile(opened.shards[0], 0), None)}, None)
    counts = {}
    passes = measure, Profile(measure), Compare(opened.selected, opened.selected)
    for name, reads, destination in (("reads", True, DISCARD), ("writes", True, in_place), ("cannot", False, DISCARD)):
        backend.reads_files.return_value = reads
        counts[name] = [len(list(one.tasks(backend, destination))) for one in passes]
    assert counts == {"reads": [3, 3, 5], "writes": [10, 10, 10], "cannot": [10, 10, 10]}
