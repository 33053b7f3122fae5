"""The engine of other processes, on a pool of them: the same bits, and nothing that they return is believed blindly."""

import base64
import contextlib
import json
import multiprocessing
import os
import pickle
import shutil
import zlib
from array import array
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from parts import strike_at
from same_results import content_of, facts_of, random_set, soon
from split import write_split
from support import SAMPLES, encode, sample, snapshot, write, write_back_in_time

import gradtool
from gradtool import tuning
from gradtool.arrays import float64s
from gradtool.backends.values import NormSpec
from gradtool.engines.cluster import engine, wire, work
from gradtool.engines.cluster.wire import to_tree
from gradtool.errors import Problem
from gradtool.ops.diff.comparison import Comparison
from gradtool.ops.passes import Measure, Rewrite
from gradtool.reduction import TILE
from gradtool.store.format.gradset import Selected
from gradtool.store.format.tensors import Tensor
from gradtool.store.io.destination import DISCARD
from gradtool.store.transaction.inputs import Inputs


class Pool:
    """Processes of this machine as a cluster; `change` is what happens to the answer of each job on its way."""

    name = "the pool"

    def __init__(self, pool, change):
        self._pool, self._change = pool, change

    def members(self):
        return {"here": 2}

    def submit(self, call, address):  # noqa: ARG002
        result = Future()
        change = self._change if b"Job" in call else lambda answer: answer

        def take(done):
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(change(done.result()))
                except BaseException as error:  # noqa: BLE001
                    result.set_exception(error)

        try:
            self._pool.submit(pickle.loads, call).add_done_callback(take)
        except BrokenProcessPool as error:
            # Of a worker that has died meanwhile, as a cluster would say later.
            result.set_exception(error)
        return result

    def why(self, error):
        return f"gave up: {type(error).__name__}: {error}", None

    def close(self):
        pass


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@contextlib.contextmanager
def workers(pool, change=lambda result: result):
    """Calls with these options run on a pool, in many small parts."""
    with (
        mock.patch.object(engine, "Dask", return_value=Pool(pool, change)),
        mock.patch.object(tuning, "PART_BYTES", 16 * TILE),
    ):
        yield {"engine": "dask:pool"}


def twice(tmp_path, seed):
    """Two copies of a random set."""
    sizes = random_set(tmp_path / "remote", seed)
    shutil.copytree(tmp_path / "remote", tmp_path / "local")
    return tmp_path / "remote", tmp_path / "local", sizes


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, np.inf, 600.0])
def test_norm_is_the_same_in_any_parts(tmp_path, pool, order):
    random_set(tmp_path / "set", 5)
    # Sums that are out of range take exponents of their own.
    rng = np.random.default_rng(0)
    extremes = {"huge": rng.random(9 * TILE + 5) * 1e300, "tiny": rng.random(9 * TILE) * 1e-200}
    write(tmp_path / "extreme.safetensors", {name: encode(values, "F64") for name, values in extremes.items()})
    with workers(pool) as there:
        for path in (tmp_path / "set", tmp_path / "extreme.safetensors"):
            result = gradtool.norm(path, norm_type=order, per_tensor=True, **there)
            assert facts_of(result) == facts_of(gradtool.norm(path, norm_type=order, per_tensor=True))
            assert (result.call.engine, result.call.hosts, result.call.retries) == ("dask:pool", 1, 0)
            assert result.call.workers in (1, 2)


def test_histograms_are_the_same_in_any_parts(tmp_path, pool):
    random_set(tmp_path / "set", 5)
    options = {"histogram": True, "per_tensor": True, "by_file": True}
    with workers(pool) as there:
        result = gradtool.norm(tmp_path / "set", **options, **there)
    assert facts_of(result) == facts_of(gradtool.norm(tmp_path / "set", **options))
    assert sum(row.count for row in result.histogram) == result.call.elements - result.zeros


@pytest.mark.parametrize("seed", range(3))
def test_diff_is_the_same_for_any_shards_and_types(tmp_path, pool, seed):
    sizes = random_set(tmp_path / "a", seed)
    random_set(tmp_path / "b", seed + 50, like=sizes, prefix="other")
    options = {"per_tensor": True, "rtol": 0.1, "max_ulp": 3}
    with workers(pool) as there:
        result = gradtool.diff(tmp_path / "a", tmp_path / "b", **options, **there)
    assert facts_of(result) == facts_of(gradtool.diff(tmp_path / "a", tmp_path / "b", **options))
    assert result.call.engine == "dask:pool"


def test_digests_are_the_same_in_any_parts(tmp_path, pool):
    random_set(tmp_path / "set", 5)
    rng = np.random.default_rng(0)
    # Of several parts, of which each has several leaves or a piece of one.
    tensors = {"a": rng.standard_normal((1031, 517)), "b": rng.integers(0, 256, 70 * TILE + 1, np.uint8)}
    write(tmp_path / "big.safetensors", tensors)
    cuts = {"a": [[257, 258], [100, 333]], "b": [[3, 40 * TILE]]}
    write_split(tmp_path / "split", tensors, cuts)
    with workers(pool) as there:
        for path in ("set", "big.safetensors", "split"):
            result = gradtool.digest(tmp_path / path, **there)
            assert facts_of(result) == facts_of(gradtool.digest(tmp_path / path))
            assert result.call.engine == "dask:pool"
        listed = tmp_path / "listed"
        listed.write_text(json.dumps({"data": result.to_dict()}))
        assert gradtool.digest(tmp_path / "big.safetensors", check=listed, **there).same is True


@pytest.mark.parametrize("harm", [lambda words: words[:-32], lambda words: words * 2], ids=["shorter", "longer"])
def test_digests_of_other_tensors_are_not_believed(tmp_path, pool, harm):
    def change(answer):
        tree = json.loads(answer)
        typecode, text = tree["answer"][0][0]
        words = harm(zlib.decompress(base64.b64decode(text)))
        tree["answer"][0][0] = [typecode, base64.b64encode(zlib.compress(words)).decode()]
        return json.dumps(tree).encode()

    path = write(tmp_path / "x.safetensors", {"a": np.ones(20 * TILE, np.float32)})
    with workers(pool, change) as there, pytest.raises(gradtool.SystemRefusedError, match="unexpected result"):
        gradtool.digest(path, **there)


def test_the_first_nan_is_found_behind_the_beginning_of_a_part(tmp_path, pool):
    values = np.ones(40 * TILE, np.float32)
    values[[35 * TILE + 7, 39 * TILE]] = np.nan, np.inf
    path = write(tmp_path / "x.safetensors", {"a": values})
    with workers(pool) as there:
        (problem,) = gradtool.norm(path, **there).problems
    assert (problem.message, problem.file) == (f"1 NaN, 1 Inf, the first at [{35 * TILE + 7}]", str(path))


@pytest.mark.parametrize("seed", range(6))
def test_clip_is_the_same_for_any_shards_and_types(tmp_path, pool, seed):
    remote, local, _ = twice(tmp_path, seed)
    options = [{"max_norm": 1e-3}, {"max_value": 1e-4}, {"max_norm": 1e-4, "per_tensor": True}][seed % 3]
    options |= [{}, {"unscale": 8.0, "include": ["t0", "t1", "t7"]}][seed % 2]
    if seed == 0:
        options |= {"group": ["t[1-3]:1e-4"]}
    with workers(pool) as there:
        result = gradtool.clip(remote, **options, **there)
    assert facts_of(result) == facts_of(gradtool.clip(local, **options))
    assert content_of(remote) == content_of(local)


@pytest.mark.parametrize("dtype", ["F64", "BF16"])
def test_a_conversion_is_the_same_for_any_shards_and_types(tmp_path, pool, dtype):
    remote, local, _ = twice(tmp_path, 4)
    options = {"max_norm": 1e-3, "per_tensor": True, "dtype": dtype, "exclude": ["t2"]}
    with workers(pool) as there:
        result = gradtool.clip(remote, output_dir=tmp_path / "a", **options, **there)
        dry = gradtool.clip(remote, output_dir=tmp_path / "a", dry_run=True, **options, **there)
    expected = gradtool.clip(local, output_dir=tmp_path / "b", **options)
    assert facts_of(result) == facts_of(expected)
    assert [warning.code for warning in dry.call.warnings] == [warning.code for warning in expected.call.warnings]
    assert (dry.zeros, dry.norm_after) == (expected.zeros, expected.norm_after)
    assert content_of(tmp_path / "a") == content_of(tmp_path / "b")


def test_a_limit_that_learns_has_the_same_state(tmp_path, pool):
    remote, local, _ = twice(tmp_path, 3)
    with workers(pool) as there:
        for folder, engine in ((remote, there), (local, {})):
            for _ in range(3):
                state = tmp_path / f"{folder.name}.json"
                gradtool.clip(folder, limit="percentile=40", max_norm=0.5, state=state, **engine)
    assert content_of(remote) == content_of(local)
    assert (tmp_path / "remote.json").read_bytes() == (tmp_path / "local.json").read_bytes()


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path, pool):
    remote, _, sizes = twice(tmp_path, 2)
    random_set(tmp_path / "g", 7, like=sizes)
    before = snapshot(tmp_path)
    with workers(pool) as there:
        for operation, path, options in (
            (gradtool.clip, remote, {"max_norm": 1e-3}),
            (gradtool.accumulate, tmp_path / "g", {"into": remote, "max_norm": 1e-2}),
            (gradtool.accumulate, tmp_path / "g", {"output": remote / "new"}),
        ):
            result = operation(path, **options, **there, dry_run=True)
            assert facts_of(result) == facts_of(operation(path, **options, dry_run=True))
    assert snapshot(tmp_path) == before


def test_the_backend_that_the_environment_names_here_is_asked_of_workers(tmp_path, pool, monkeypatch):
    path = sample(tmp_path)
    with workers(pool) as there:
        monkeypatch.setenv("GRADTOOL_BACKEND", "vulkan")
        with pytest.raises(gradtool.UsageError, match="GRADTOOL_BACKEND must be auto, cpu or cuda, not 'vulkan'"):
            gradtool.norm(path, **there)
        # Without the variable, the workers would choose another one.
        monkeypatch.setenv("GRADTOOL_BACKEND", "cpu")
        assert gradtool.norm(path, **there).call.backend_why == "compiled kernels"


def test_progress_counts_workers_and_hosts(tmp_path, pool):
    titles = []
    with workers(pool) as there:
        gradtool.norm(sample(tmp_path), progress=lambda title, *_: titles.append(title), **there)
    assert titles == ["measuring, 1 worker, 1 host"]


def test_clip_into_a_folder_copies_what_does_not_change(tmp_path, pool):
    remote, _, _ = twice(tmp_path, 1)
    before = snapshot(remote)
    options = {"max_norm": 1e-3, "include": ["t0"]}
    with workers(pool) as there:
        gradtool.clip(remote, **options, output_dir=tmp_path / "a" / "b", **there)
    gradtool.clip(remote, **options, output_dir=tmp_path / "c")
    assert content_of(tmp_path / "a" / "b") == content_of(tmp_path / "c")
    assert snapshot(remote) == before


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="Python has extended attributes only on Linux")
def test_mode_and_attributes_of_a_replaced_file_are_kept(tmp_path, pool):
    path = sample(tmp_path)
    path.chmod(0o640)
    with contextlib.suppress(OSError):
        os.setxattr(path, "user.note", b"kept")
    attributes = os.listxattr(path)
    link = tmp_path / "link.safetensors"
    link.symlink_to(path.name)
    with workers(pool) as there:
        gradtool.clip(link, max_norm=1.0, **there)
    assert (path.stat().st_mode & 0o777, os.listxattr(path), link.is_symlink()) == (0o640, attributes, True)


ACCUMULATIONS = {
    "plain": {},
    "mean": {"mean": True, "weight": [0.3, -2.5]},
    "max-norm": {"max_norm": 1e-2},
    "clip-each": {"clip_each": 1e-2, "per_gradient": True, "nonfinite": "skip"},
    "overwrite": {"overwrite": True},
    "moving average": {"into_weight": 0.999, "weight": [0.001, -0.001]},
    "median": {"reduce": "median", "per_gradient": True},
    "mean of those that have it": {"mean": True, "missing": "skip", "weight": [0.3, -2.5], "per_gradient": True},
    "median with zeros": {"reduce": "median", "missing": "zero", "per_gradient": True},
    "no-update": {"update": False},
}


@pytest.mark.parametrize("name", ACCUMULATIONS)
@pytest.mark.parametrize("where", ["into", "output", "output_dir"])
def test_accumulate_is_the_same_for_any_shards_and_types(tmp_path, pool, name, where):
    remote, local, sizes = twice(tmp_path, 3)
    for seed in (11, 12):
        lacks_some = seed == 12 and "missing" in ACCUMULATIONS[name]
        random_set(tmp_path / f"g{seed}", seed, like=sizes[:4] if lacks_some else sizes)
    gradients = [tmp_path / "g11", tmp_path / "g12"]
    options = dict(ACCUMULATIONS[name])
    if where != "into":
        remote, local = remote / "new", local / "new"
        options |= {"dtype": "BF16"} | ({"max_shard_size": 100_000} if where == "output_dir" else {})
        options = {name: value for name, value in options.items() if name not in ("overwrite", "into_weight")}
    with workers(pool) as there:
        result = gradtool.accumulate(gradients, **{where: remote}, **options, **there)
    assert facts_of(result) == facts_of(gradtool.accumulate(gradients, **{where: local}, **options))
    if where == "output_dir" and remote.exists():
        assert content_of(remote) == content_of(local)
    elif where != "output_dir":
        assert content_of(tmp_path / "remote") == content_of(tmp_path / "local")


def test_a_nan_in_a_gradient_is_named_and_nothing_is_written(tmp_path, pool):
    remote, _, sizes = twice(tmp_path, 3)
    random_set(tmp_path / "g", 4, like=sizes)
    bad = write(tmp_path / "bad.safetensors", {"t0": np.full(sizes[0], np.nan, np.float32)})
    before = snapshot(tmp_path)
    with workers(pool) as there, pytest.raises(gradtool.NonFiniteError) as error:
        gradtool.accumulate([tmp_path / "g", bad], into=remote, missing="skip", **there)
    assert [(problem.file, problem.tensor) for problem in error.value.problems] == [(str(bad), "t0")]
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("change", [os.utime, lambda path: write_back_in_time(path, b"foreign")])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_file_that_a_worker_sees_changed_is_an_error_that_names_it_as_the_call_did(
    tmp_path, pool, monkeypatch, nth, change
):
    sample(tmp_path)
    monkeypatch.chdir(tmp_path)
    with workers(pool) as there:
        path, calls = Path("x.safetensors"), iter(range(1, 100))

        def touch(result):
            if next(calls) == nth:
                change(path)
            return result

        with workers(pool, touch), pytest.raises(gradtool.SystemRefusedError) as error:
            gradtool.clip(path, max_norm=1.0, output_dir="out", **there)
    (problem,) = error.value.problems
    assert (problem.code, problem.file) == ("changed", "x.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_path_with_two_dots_behind_a_link_is_the_same_for_workers(tmp_path, pool, monkeypatch):
    sample(tmp_path)
    (tmp_path / "deeper/still").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("link").symlink_to("../deeper")
    with workers(pool) as there:
        assert gradtool.norm("link/../x.safetensors", **there).norm == gradtool.norm(tmp_path / "x.safetensors").norm


def test_an_input_that_is_replaced_while_a_worker_reads_it_is_an_error(tmp_path, monkeypatch):
    path = sample(tmp_path)
    opened = Inputs([str(path)]).open()
    (part,) = Measure(opened.selected, NormSpec()).parts(DISCARD)
    call = work.call_for(work.Job(part, None, None, 1, None))
    run = work.Threads.run

    def replaced_behind_it(self, *arguments):
        found = run(self, *arguments)
        shutil.copy2(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)
        return found

    monkeypatch.setattr(work.Threads, "run", replaced_behind_it)
    with pytest.raises(gradtool.SystemRefusedError, match="was changed by another program"):
        wire.unpacked(pickle.loads(call), work.empty_outcome(part))  # noqa: S301 - of this process


def with_part(place, value):
    """A change of one value in what a worker reports, as a hostile or mistaken one would make it."""

    def lie(tree):
        *outer, last = place
        for at in outer:
            tree = tree[at]
        if tree is not None:
            tree[last] = value(tree[last]) if callable(value) else value

    return lie


# Where things are in an answer, and in the measurement in it.
FOUND, READ, CLOCK, HOST, _, WAITS = range(6)
SUMS, _, NAN, _, _, FIRST, _, _ = range(8)
NUMBERS, VALUES, EXPONENTS = range(3)
LIES = {
    "another host": with_part([HOST], 7),
    "a host without end": with_part([HOST], "x" * 100_000),
    "no files": with_part([READ], []),
    "other files": with_part([READ, 0], "0" * 32),
    "a file that is no text": with_part([READ, 0], 3),
    "a count of 5,000 digits": with_part([WAITS], int("9" * 4000)),
    "a count below zero": with_part([WAITS], -1),
    "seconds that never end": with_part([CLOCK, 0], float("inf")),
    "nothing found": with_part([FOUND], None),
    "sums of another type": with_part([FOUND, SUMS, 0, VALUES], lambda sums: ["q", sums[1]]),
    "sums that are text": with_part([FOUND, SUMS, 0, VALUES, 1], "sums"),
    "sums that inflate": with_part([FOUND, SUMS, 0, VALUES], lambda _: to_tree(float64s((1 << 22) + 1))),
    "a sum below zero": with_part([FOUND, SUMS, 0, VALUES], lambda sums: to_tree(array("d", [-1.0] * count_in(sums)))),
    "sums without tensors": with_part([FOUND, SUMS, 0, NUMBERS], lambda _: to_tree(array("q"))),
    "sums of another tensor": with_part(
        [FOUND, SUMS, 0, NUMBERS], lambda numbers: to_tree(array("q", [99] * count_in(numbers)))
    ),
    "exponents without end": with_part(
        [FOUND, SUMS, 0, EXPONENTS], lambda them: to_tree(array("i", [(1 << 31) - 1] * count_in(them)))
    ),
    "NaN below zero": with_part([FOUND, NAN], lambda them: to_tree(array("q", [-1] * count_in(them)))),
    "places below zero": with_part([FOUND, SUMS, 0, NUMBERS], lambda them: to_tree(array("q", [-1] * count_in(them)))),
    "too few places": with_part([FOUND, FIRST], lambda _: to_tree(array("q"))),
}
RAW_LIES = {
    "a pickle": pickle.dumps(None),
    "no result": None,
    "no bytes": {"answer": []},
    "nothing": b"",
    "no object": b"7",
    "another object": b"{}",
    "digits": b'{"answer": ' + b"9" * 5000 + b"}",
    "brackets": b'{"answer": ' + b"[" * 100_000,
    "an error without problems": b'{"error": ["SystemRefusedError", null, []]}',
    "an error of another kind": b'{"error": ["SystemExit", null, [["a", "b", null, null]]]}',
}


def count_in(packed):
    """How many values a packed array has."""
    typecode, text = packed
    return len(array(typecode, zlib.decompress(base64.b64decode(text))))


@pytest.mark.parametrize("lie", [*LIES, *RAW_LIES])
def test_a_worker_that_lies_is_not_believed(tmp_path, pool, lie):
    random_set(tmp_path, 1)
    before, told = snapshot(tmp_path), []

    def change(result):
        tree = json.loads(result)
        if lie in LIES:
            LIES[lie](tree["answer"])
        told.append(lie)
        return RAW_LIES[lie] if lie in RAW_LIES else json.dumps(tree).encode()

    with workers(pool, change) as there, pytest.raises(gradtool.SystemRefusedError) as error:
        gradtool.clip(tmp_path, max_norm=1e-3, **there)
    assert error.value.problems[0].code in {"engine", "changed"}
    assert told
    assert soon(lambda: snapshot(tmp_path) == before)


@pytest.mark.parametrize("place", ["differing", "max_abs_diff_index"])
def test_a_difference_has_no_count_below_zero(place):
    compared = Comparison([None])
    answer = wire.packed(compared)
    assert getattr(wire.unpacked(answer, Comparison([None])), place) == getattr(compared, place)
    getattr(compared, place)[0] = -1
    with pytest.raises(ValueError, match="a number out of range"):
        wire.unpacked(wire.packed(compared), Comparison([None]))


@pytest.mark.parametrize("error", wire.ERRORS.values())
def test_an_error_of_a_worker_is_the_same_here(error):
    sent = error.from_problems(
        [Problem("code", "what \udcff", "file", None), Problem("code", "other", None, "tensor")], "remedy"
    )
    with pytest.raises(error) as read:
        wire.unpacked(wire.packed_error(sent), None)
    assert (type(read.value), list(read.value.problems), str(read.value)) == (error, list(sent.problems), str(sent))


def test_nothing_is_committed_unless_all_files_were_written(tmp_path, pool):
    path = sample(tmp_path)
    before = snapshot(tmp_path)
    nothing = mock.patch.object(Rewrite, "parts", return_value=iter(()))
    with workers(pool) as there, nothing, pytest.raises(AssertionError, match="a new file was not written"):
        gradtool.clip(path, max_norm=1e-3, **there)
    assert snapshot(tmp_path) == before


def test_a_worker_that_dies_ends_the_call_with_one_error(tmp_path):
    random_set(tmp_path, 1)
    before = snapshot(tmp_path)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=strike_at, initargs=("kill@2",))
    with pool, contextlib.ExitStack() as stack:
        there = stack.enter_context(workers(pool))
        with pytest.raises(gradtool.SystemRefusedError, match="gave up: BrokenProcessPool"):
            gradtool.clip(tmp_path, max_norm=1e-3, **there)
    assert snapshot(tmp_path) == before


def test_what_is_sent_holds_no_open_file_and_little_else(tmp_path, pool):
    arrays = {f"t{i}": np.ones(3, np.float32) for i in range(2000)}
    write(tmp_path / "x.safetensors", arrays, {"note": "n" * 10_000})
    sent = []
    dumps = pickle.dumps

    def count(value, *rest):
        sent.append(len(dumps(value, *rest)))
        return dumps(value, *rest)

    with mock.patch("gradtool.engines.cluster.work.pickle.dumps", count), workers(pool) as there:
        gradtool.norm(tmp_path, include=["^t7$"], **there)
    assert max(sent) < 2000


@pytest.mark.parametrize(("engine", "said"), [("spark", "'spark'"), ("dask", "'dask'"), ("dask:", "'dask:'")])
def test_an_engine_that_is_unknown_is_a_usage_error(tmp_path, engine, said):
    with pytest.raises(gradtool.UsageError, match=f"engine must be threads or dask:ADDRESS, not {said}"):
        gradtool.norm(sample(tmp_path), engine=engine)


def test_what_one_machine_must_do_is_refused_or_done_here(tmp_path, monkeypatch):
    path = sample(tmp_path)
    with pytest.raises(gradtool.UsageError, match="a redo log protects what one machine overwrites"):
        gradtool.clip(path, max_norm=1.0, write="inplace", engine="dask:x")
    with pytest.raises(gradtool.UsageError, match=r"gradtool.layernorm_backward\(\) runs on one machine"):
        gradtool.layernorm_backward(SAMPLES / "layernorm.safetensors", output=tmp_path / "y", engine="dask:x")
    monkeypatch.setenv("GRADTOOL_ENGINE", "dask:x")
    assert gradtool.zero(path).call.engine == "threads"


def test_a_task_and_what_it_finds_are_small_to_send(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": encode([], "F32")})
    tensor = Tensor("a", "F32", (1 << 28,), 0, 1 << 30)
    shard = Inputs([str(path)]).open().shards[0]
    measure = Measure([Selected(shard, tensor)], NormSpec())
    (part,) = measure.parts(DISCARD)
    assert len(work.call_for(work.Job(part._replace(places=()), None, None, None, None))) < 800
    tally = measure.tally()
    tally.tile_sums[0].extend([0] * 4096, np.random.default_rng(1).random(4096), [0] * 4096)
    assert len(wire.packed(tally)) > 40_000
    assert len(wire.packed(tally.compact())) < 1_100
