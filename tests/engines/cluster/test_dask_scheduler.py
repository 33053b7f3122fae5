"""Schedulers that hang, are none, or are called by a wrong name: the command still ends, with one line."""

import contextlib
import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
import threading
import warnings
from functools import partial

import pytest
from support import COMMAND, gradtool, sample, snapshot

import gradtool as functions

pytest.importorskip("distributed", reason="Dask is not installed; pip install '.[test-dask]'")

import distributed  # noqa: F401 - its loggers exist
from dask_cluster import DaskCluster, is_stopped
from same_results import soon

from gradtool.engines.cluster.dask import Dask
from gradtool.engines.cluster.work import RemoteCall

CLIP = ["clip", "--max-norm", "1e-3"]


@pytest.fixture(params=[b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9], ids=["silent", "HTTP"])
def server(request):
    """The address of a server that is no scheduler."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept():
            with contextlib.ExitStack() as held, contextlib.suppress(OSError):
                while True:
                    held.enter_context(connection := listening.accept()[0])
                    connection.sendall(request.param)

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_server_that_is_no_scheduler_is_an_error(tmp_path, server):
    path = sample(tmp_path)
    before = snapshot(tmp_path)
    # Names without a scheme are addresses too.
    for address in (server, f"tcp://{server}"):
        done = gradtool(*CLIP, path, "--engine", f"dask:{address}", "--worker-timeout", "1", env=OWN)
        assert (done.returncode, done.stderr.count("gradtool: error: ")) == (5, 1), done
        assert f"the Dask scheduler at {address} does not answer" in done.stderr
    assert snapshot(tmp_path) == before


NO_FILE = {
    "object": (5, "is not the file of a Dask scheduler\n  hint: start one with"),
    "list": (5, "is not the file of a Dask scheduler\n  hint: start one with"),
    "brackets": (5, "is not the file of a Dask scheduler\n  hint: start one with"),
    "large": (3, "the file exceeds the limit of 1,048,576 bytes (it has 16,777,218)"),
    "device": (5, "no scheduler has written it for 0.1 s"),
    "FIFO": (5, "no scheduler has written it for 0.1 s"),
    "folder": (3, "is a folder, not a file"),
}


@pytest.mark.parametrize("kind", NO_FILE)
def test_a_file_that_is_no_scheduler_file_is_an_error(tmp_path, kind):
    path = tmp_path / "file"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        text = {"object": "{}", "list": '[{"address": 1}]', "brackets": "[" * 100_000, "large": " " * (1 << 24) + "{}"}
        path.write_text(text[kind])
    # Enough for Dask, and not for all of a device.
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (4 << 30, 4 << 30))
    done = subprocess.run(
        [*COMMAND, "norm", sample(tmp_path), "--engine", f"dask:{path}", "--worker-timeout", "0.1"],
        capture_output=True, text=True, check=False, timeout=60, preexec_fn=limit,
    )  # fmt: skip
    code, said = NO_FILE[kind]
    assert (done.returncode, done.stderr.count("gradtool: error: ")) == (code, 1), done
    assert f"{path}: {said}" in done.stderr


def test_ctrl_c_ends_a_command_whose_scheduler_hangs(tmp_path):
    path = sample(tmp_path)
    before = path.read_bytes()
    with DaskCluster(tmp_path / "cluster") as cluster:
        worker = cluster.worker(GRADTOOL_FAULT="SIGSTOP@2")
        run = subprocess.Popen(cluster.command(*CLIP, path), stderr=subprocess.PIPE, text=True)
        assert soon(lambda: is_stopped(worker) or run.poll() is not None)
        assert is_stopped(worker), run.communicate()
        cluster.scheduler.send_signal(signal.SIGSTOP)
        assert soon(lambda: is_stopped(cluster.scheduler))
        # It asks the scheduler once a second.
        with pytest.raises(subprocess.TimeoutExpired):
            run.communicate(timeout=2)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=15)
        assert (run.returncode, err) == (130, "gradtool: error: interrupted; no file was changed\n")
    assert path.read_bytes() == before


def test_logs_are_as_before_after_a_scheduler_that_is_not_there(tmp_path):
    logger = logging.getLogger("distributed.core")
    assert not logger.disabled
    with pytest.raises(functions.SystemRefusedError):
        Dask(str(tmp_path / "none.json"), 0.05)
    assert not logger.disabled


def test_a_large_call_is_made_without_a_warning(tmp_path):
    with DaskCluster(tmp_path / "cluster") as cluster, warnings.catch_warnings(action="error"):
        cluster.worker()
        dask = Dask(str(cluster.file), 30.0)
        try:
            (worker,) = dask.members()
            call = pickle.dumps(RemoteCall(len, bytes(11_000_000)))
            assert dask.submit(call, worker).result(timeout=30) == 11_000_000
        finally:
            dask.close()


# A process of its own, which the connection of a fork must not outlive.
OWN = {"PYTHONUTF8": "1"}
