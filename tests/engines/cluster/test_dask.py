"""Real Dask workers on this machine: the same bits as threads, and what becomes of files when something fails."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from same_results import content_of, facts_of, random_set, soon
from schema import checked
from split import write_split
from support import gradtool, gradtool_json, read, sample, snapshot, write_index
from tiers import EXHAUSTIVE, numbers

pytest.importorskip("distributed", reason="Dask is not installed; pip install '.[test-dask]'")

import distributed
import numpy as np
from dask_cluster import LOST, DaskCluster, is_stopped, without_notes

CLIP = ["--max-norm", "1e-3"]
# Nothing fails these.
SCREEN = ["--screen", "readable", "--screen", "complete", "--screen", "norm<=9x", "--screen", "cosine>=-1"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with DaskCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.worker()
        cluster.worker()
        yield cluster


@pytest.fixture
def alone(tmp_path):
    """A cluster for one test, still without workers, that gives a task up when its first worker dies."""
    with DaskCluster(tmp_path / "cluster", DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES="0") as cluster:
        yield cluster


@pytest.fixture
def shards(tmp_path):
    """Three shards, and what clipping makes of them."""
    folder = tmp_path / "set"
    write_index(folder, {f"{i}.safetensors": {f"t{i}": np.full(3000, i + 1, np.float32)} for i in range(3)})
    shutil.copytree(folder, tmp_path / "new")
    assert gradtool("clip", tmp_path / "new", *CLIP).returncode == 0
    return folder


def old_and_new(shards):
    """The content of the shards, before and after they are clipped."""
    return content_of(shards), content_of(shards.parent / "new")


def one_line(done, code):
    assert (done.returncode, done.stderr.count("gradtool: error: ")) == (code, 1), done.stderr
    return done.stderr


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_operation_has_the_same_bits_on_any_number_of_workers(tmp_path, workers):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    sizes = random_set(ours, workers)
    random_set(tmp_path / "g1", 10 + workers, like=sizes)
    random_set(tmp_path / "g2", 20 + workers, like=sizes)
    shutil.copytree(ours, theirs)
    gradients = [tmp_path / "g1", tmp_path / "g2"]
    with DaskCluster(tmp_path / "cluster") as cluster:
        for _ in range(workers):
            cluster.worker()
        for command, *rest in (
            ["norm", "--per-tensor", "--histogram"],
            ["digest"],
            ["clip", "--max-norm", "1e-3", "--per-tensor"],
            ["accumulate", *gradients, "--mean", "--weight", "2", "--weight", "0.3", "--max-norm", "1e-2", "--into"],
            ["accumulate", *gradients, *SCREEN, "--weight", "2", "--weight", "0.3", "--clip-each", "1e-2", "--into"],
        ):
            done = cluster.run(command, *rest, ours, "--json")
            here = gradtool(command, *rest, theirs, "--json")
            # A warning of underflow, which is the same.
            assert (done.returncode, done.stderr) == (0, here.stderr), done
            data = checked(done.stdout)["data"]
            assert facts_of(data) == facts_of(checked(here.stdout)["data"])
            assert content_of(ours) == content_of(theirs)
            assert 1 <= data["workers"] <= workers
            assert (data["hosts"], data["retries"], data["engine"]) == (1, 0, cluster.options[1])


def test_workers_copy_integers_to_a_new_set(tmp_path, cluster):
    ids, mask = np.arange(40, dtype=np.int32).reshape(5, 8), np.arange(9, dtype=np.uint8)
    for rank in range(2):
        content = {"a": np.full(70_000, rank + 1, np.float32), "ids": ids + rank, "b": np.ones(3, np.float32)}
        write_index(tmp_path / f"g{rank}", {"0.safetensors": content, "1.safetensors": {"mask": mask}})
    write_split(tmp_path / "pieces", {"grid": ids}, {"grid": [(2,), (3,)]})
    grads = [tmp_path / "g0", tmp_path / "g1", tmp_path / "pieces"]
    options = ["--others", "copy", "--missing", "skip", "--max-shard-size", "170B", "--output-dir"]
    done = cluster.run("accumulate", *grads, *options, tmp_path / "there", "--json")
    assert done.returncode == 0, done.stderr
    here = gradtool_json("accumulate", *grads, *options, tmp_path / "here")["data"]
    there = checked(done.stdout)["data"]
    assert facts_of(there) == facts_of(here)
    assert (there["copied"], there["files_written"], there["tensors"]) == (3, 4, 2)
    assert content_of(tmp_path / "there") == content_of(tmp_path / "here")
    found = {name: array for path in (tmp_path / "there").glob("*.safetensors") for name, array in read(path).items()}
    assert (found["ids"].tolist(), found["grid"].tolist()) == (ids.tolist(), ids.tolist())
    assert (found["mask"].tobytes(), found["a"].tolist()) == (mask.tobytes(), [3] * 70_000)


def test_workers_record_ids_with_the_data(tmp_path, cluster):
    zeros = {f"{i}.safetensors": {f"t{i}": np.zeros(70_000, np.float32)} for i in range(3)}
    for name in ("here", "there"):
        write_index(tmp_path / name, zeros)
    write_index(tmp_path / "g", {"0.safetensors": {"t0": np.ones(70_000, np.float32)}})
    # The workers copy the files to which nothing is added.
    command = ["accumulate", tmp_path / "g", "--missing", "skip", "--once", "step 1", "--into"]
    for is_done in (False, True):
        done = cluster.run(*command, tmp_path / "there", "--json")
        assert done.returncode == 0, done.stderr
        here = gradtool_json(*command, tmp_path / "here")["data"]
        there = checked(done.stdout)["data"]
        assert (here["already_done"], there["already_done"]) == (is_done, is_done)
        assert there["files_written"] == here["files_written"] == 3 * (not is_done)
        assert content_of(tmp_path / "there") == content_of(tmp_path / "here")
    assert read(tmp_path / "there" / "0.safetensors")["t0"].tolist() == [1] * 70_000
    clip = ["clip", tmp_path / "there", *CLIP, "--once", "step 1", "--json"]
    assert [checked(cluster.run(*clip).stdout)["data"]["already_done"] for _ in range(2)] == [False, True]


def test_an_address_and_the_environment_name_an_engine(tmp_path, cluster):
    address = json.loads(cluster.file.read_text())["address"]
    data = gradtool_json("norm", sample(tmp_path), env={"GRADTOOL_ENGINE": f"dask:{address}"})["data"]
    assert (data["norm"], data["engine"], data["workers"]) == (5.0, f"dask:{address}", 1)


def test_nan_is_found_and_nothing_is_written(tmp_path, cluster):
    write_index(tmp_path, {"0.safetensors": {"a": np.ones(9, np.float32)}, "1.safetensors": {"b": np.full(9, np.nan)}})
    before = snapshot(tmp_path)
    done = cluster.run("clip", tmp_path, *CLIP)
    assert done.returncode == 1
    assert "tensor 'b': 9 NaN, 0 Inf, the first at [0]" in done.stderr
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("part", ["sample", pytest.param("rest", marks=EXHAUSTIVE)])
def test_a_worker_that_is_killed_at_any_step_is_replaced_by_another_one(tmp_path, shards, part):
    old, new = old_and_new(shards)
    with DaskCluster(tmp_path / "cluster") as cluster:
        for step in numbers(part):
            mortal = cluster.worker(GRADTOOL_FAULT=f"kill@{step}")
            run = begun(cluster, shards)
            assert soon(lambda: run.poll() is not None or mortal.poll() is not None)  # noqa: B023
            died = mortal.poll() is not None
            successor = cluster.worker() if died else mortal
            done = ended(run)
            assert (done.returncode, done.stderr) == (0, LOST if died else ""), (step, done)
            assert soon(lambda: content_of(shards) == new), step
            put_back(shards, old)
            cluster.retire(successor)
            if not died:
                break
    assert step > 5


def test_a_lost_worker_is_a_warning_in_json_too(tmp_path, shards):
    with DaskCluster(tmp_path / "cluster") as cluster:
        mortal = cluster.worker(GRADTOOL_FAULT="kill@2")
        command = [*cluster.command("clip", shards, *CLIP), "--json"]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert soon(lambda: mortal.poll() is not None)
        cluster.worker()
        done = checked(ended(run).stdout)
    (warning,) = done["data"]["warnings"]
    assert (done["exit_code"], warning["code"]) == (0, "worker-lost")
    assert warning["message"] == "1 of 2 workers was lost; its work was done again"


def begun(cluster, shards):
    command = cluster.command("clip", shards, *CLIP)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def put_back(shards, old):
    for name, content in old.items():
        (shards / name).write_bytes(content)


def test_a_task_whose_worker_dies_for_good_leaves_all_old(shards, alone):
    old, _ = old_and_new(shards)
    alone.worker(GRADTOOL_FAULT="kill@2")
    done = alone.run("clip", shards, *CLIP, "--worker-timeout", "20")
    assert "every worker that was given the task died" in one_line(done, 5)
    assert soon(lambda: content_of(shards) == old)


def test_no_worker_for_too_long_ends_the_run(shards, tmp_path):
    old, _ = old_and_new(shards)
    with DaskCluster(tmp_path / "cluster") as cluster:
        done = cluster.run("clip", shards, *CLIP, "--worker-timeout", "1")
        assert "has had no worker for 1 s\n  hint: start some, or wait longer with --worker-timeout" in one_line(
            done, 5
        )
        cluster.worker(GRADTOOL_FAULT="kill@2")
        done = cluster.run("clip", shards, *CLIP, "--worker-timeout", "1")
        assert "has had no worker for 1 s" in one_line(done, 5)
    assert soon(lambda: content_of(shards) == old)


def test_a_worker_that_is_busy_with_something_else_is_an_error(shards, alone):
    old, _ = old_and_new(shards)
    alone.worker()
    with distributed.Client(scheduler_file=str(alone.file), set_as_default=False) as other:
        busy = other.submit(time.sleep, 60)
        assert soon(lambda: any(other.processing().values()))
        done = alone.run("clip", shards, *CLIP, "--worker-timeout", "1")
        busy.cancel()
    assert "has not answered for 1 s\n  hint: stop it, or wait longer with --worker-timeout" in one_line(done, 5)
    assert content_of(shards) == old


def test_a_worker_that_wakes_up_after_the_commit_harms_nothing(tmp_path, shards):
    _, new = old_and_new(shards)
    with DaskCluster(tmp_path / "cluster", DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL="1s") as cluster:
        zombie = cluster.worker(GRADTOOL_FAULT="SIGSTOP@2")
        run = hanging(cluster, shards, zombie)
        cluster.worker()
        done = ended(run)
        assert (done.returncode, done.stderr) == (0, LOST)
        assert content_of(shards) == new
        before = snapshot(shards)
        assert is_stopped(zombie)
        zombie.send_signal(signal.SIGCONT)
        # It goes on, finds that its work is not wanted any more, and says so to its own log.
        assert soon(
            lambda: b"SystemRefusedError" in (cluster.folder / "1.log").read_bytes() or zombie.poll() is not None
        )
        cluster.retire(zombie)
        assert snapshot(shards) == before


def hanging(cluster, shards, stopped):
    """A run whose only worker has been stopped in the middle of it."""
    run = begun(cluster, shards)
    assert soon(lambda: is_stopped(stopped)), ended(run)
    return run


def ended(run):
    out, err = run.communicate(timeout=60)
    return subprocess.CompletedProcess(run.args, run.returncode, out, without_notes(err))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_whose_worker_hangs(shards, alone, number):
    old, _ = old_and_new(shards)
    stopped = alone.worker(GRADTOOL_FAULT="SIGSTOP@2")
    run = hanging(alone, shards, stopped)
    run.send_signal(number)
    assert "no file was changed" in one_line(ended(run), 128 + number)
    assert content_of(shards) == old
    stopped.send_signal(signal.SIGCONT)
    alone.retire(stopped)
    assert content_of(shards) == old


def test_a_scheduler_that_dies_ends_the_run(shards, alone):
    old, _ = old_and_new(shards)
    stopped = alone.worker(GRADTOOL_FAULT="SIGSTOP@2")
    run = hanging(alone, shards, stopped)
    alone.scheduler.kill()
    assert "is lost\n  hint: start it and its workers again, and run the command again" in one_line(ended(run), 5)
    assert content_of(shards) == old


def test_a_worker_with_a_full_disk_ends_the_run(shards, alone):
    old, _ = old_and_new(shards)
    alone.worker(GRADTOOL_FAULT="ENOSPC@1+")
    done = alone.run("clip", shards, *CLIP)
    message = one_line(done, 5)
    assert "hint: free some space" in message
    assert f"(worker on {os.uname().nodename})\n" in message
    assert soon(lambda: content_of(shards) == old)


@pytest.mark.parametrize("part", ["sample", pytest.param("rest", marks=EXHAUSTIVE)])
def test_a_command_that_is_killed_at_any_step_is_recovered(cluster, shards, part):
    old, new = old_and_new(shards)
    states = set()
    for step in numbers(part):
        done = cluster.run("clip", shards, *CLIP, env={"GRADTOOL_FAULT": f"kill@{step}"})
        if done.returncode == 0:
            assert content_of(shards) == new
            break
        assert done.returncode == -signal.SIGKILL, done
        assert soon(lambda: gradtool("recover", shards).returncode == 0)
        # A worker may be about to remove what it has made.
        assert soon(lambda: content_of(shards) in (old, new)), (step, content_of(shards).keys())
        states.add("old" if content_of(shards) == old else "new")
        put_back(shards, old)
    assert states == {"old", "new"}


def site(folder, code):
    """An environment in which Python does something at its start."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


UNFIT = {
    "another version": (
        "import gradtool._version as one\none.__version__ = '0.0.1'",
        "has gradtool 0.0.1, this is 0.1.0\n  hint: install the same version there",
    ),
    "no gradtool": ("import sys\nsys.modules['gradtool'] = None", "cannot load gradtool"),
    "another user": ("import os\nuser = os.geteuid()\nos.geteuid = lambda: user + 1", "start the workers as the user"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_worker_that_is_not_fit_is_refused_by_name(tmp_path, shards, alone, name):
    old, _ = old_and_new(shards)
    code, said = UNFIT[name]
    alone.worker()
    alone.worker(**site(tmp_path / "site", code))
    message = one_line(alone.run("clip", shards, *CLIP), 4)
    assert said in message
    assert content_of(shards) == old


def test_a_worker_without_the_mount_is_refused_by_name(shards, alone):
    hidden = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs none "{shards}" && exec "$@"', "sh"]
    try:
        subprocess.run([*hidden, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespaces here: {error}")
    alone.worker()
    alone.worker(before=hidden)
    host = os.uname().nodename
    for command in (["clip", shards, *CLIP], ["norm", shards]):
        message = one_line(alone.run(*command), 4)
        assert f"the worker on {host} does not see {shards}" in message
        assert "mount the same file system there, at the same path" in message


def test_dask_that_is_not_installed_is_named_with_the_remedy(tmp_path):
    env = site(tmp_path / "site", "import sys\nsys.modules['distributed'] = None")
    done = gradtool("norm", sample(tmp_path), "--engine", "dask:tcp://127.0.0.1:1", env=env)
    assert "pip install 'gradtool[dask]'" in one_line(done, 4)


def test_a_scheduler_that_does_not_answer_is_an_error(tmp_path):
    done = gradtool(
        "norm", sample(tmp_path), "--engine", "dask:tcp://127.0.0.1:9", "--worker-timeout", "1", env=NO_FORK
    )
    assert "does not answer" in one_line(done, 5)
    done = gradtool("norm", sample(tmp_path), "--engine", "dask:none.json", "--worker-timeout", "0.1")
    assert "no scheduler has written it for 0.1 s" in one_line(done, 5)


# A process of its own, which the connection of a fork must not outlive.
NO_FORK = {"PYTHONUTF8": "1"}
