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

from gradtool.engines.cluster import dask
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
        Dask(str(tmp_path / "none.json"), 0.05, 0.05)
    assert not logger.disabled


def test_a_large_call_is_made_without_a_warning(tmp_path):
    with DaskCluster(tmp_path / "cluster") as running, warnings.catch_warnings(action="error"):
        running.worker()
        cluster = Dask(str(running.file), 30.0, 30.0)
        try:
            (worker,) = cluster.members()
            call = pickle.dumps(RemoteCall(len, bytes(11_000_000)))
            assert cluster.submit(call, worker).result(timeout=30) == 11_000_000
        finally:
            cluster.close()


@pytest.fixture
def nobody():
    """The address of a port that is taken, and where nobody listens; listening on the socket changes that."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{bound.getsockname()[1]}", bound


def refusal(address, seconds):
    return (
        f"gradtool: error: the Dask scheduler at {address} does not answer: "
        f"the connection was refused for {seconds} s\n"
        "  hint: start one with `dask scheduler`, correct --engine, or wait longer with --worker-timeout\n"
    )


def test_a_port_where_nobody_listens_is_an_error_after_5_seconds_and_a_line(tmp_path, nobody):
    done = gradtool(*CLIP, sample(tmp_path), "--engine", f"dask:{nobody[0]}", env=OWN)
    note = f"gradtool: note: waiting for a scheduler at {nobody[0]}\n"
    assert (done.returncode, done.stderr) == (5, note + refusal(nobody[0], 5))


def test_quiet_commands_wait_as_long_as_they_are_told_to_and_in_silence(tmp_path, nobody):
    options = ["--engine", f"dask:{nobody[0]}", "--worker-timeout", "2.5", "--quiet"]
    done = gradtool(*CLIP, sample(tmp_path), *options, env=OWN)
    assert (done.returncode, done.stderr) == (5, refusal(nobody[0], 2.5))


def test_an_address_that_refuses_connections_is_tried_for_as_long_as_it_may_refuse_them(nobody, monkeypatch):
    monkeypatch.setattr(dask, "_SILENT_SECONDS", 0.5)
    address, bound = nobody
    heard = []
    with pytest.raises(functions.SystemRefusedError, match=r"the connection was refused for 0\.3 s"):
        Dask(address, 60.0, 0.3, heard.append)
    assert heard == []

    def listen(what):
        heard.append(what)
        bound.listen()

        def hang_up():
            with contextlib.suppress(OSError):
                while True:
                    bound.accept()[0].close()

        thread.append(threading.Thread(target=hang_up))
        thread[0].start()

    thread = []
    with pytest.raises(functions.SystemRefusedError, match="does not answer") as caught:
        Dask(address, 60.0, 60.0, listen)
    bound.shutdown(socket.SHUT_RDWR)
    thread[0].join()
    assert heard == [f"a scheduler at {address}"]
    # It was reached.
    assert "refused" not in str(caught.value)


@pytest.mark.parametrize(("progress", "lines"), [(None, 0), (True, 1), (print, 0)])
def test_functions_tell_of_a_wait_only_if_progress_is_asked_for(tmp_path, nobody, capsys, monkeypatch, progress, lines):
    monkeypatch.setattr(dask, "_SILENT_SECONDS", 0.0)
    with pytest.raises(functions.SystemRefusedError, match="was refused"):
        functions.norm(sample(tmp_path), engine=f"dask:{nobody[0]}", worker_timeout=0.5, progress=progress)
    note = f"gradtool: note: waiting for a scheduler at {nobody[0]}\n"
    assert capsys.readouterr() == ("", lines * note)


def test_the_wait_for_a_scheduler_file_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(dask, "_SILENT_SECONDS", 0.0)
    heard = []
    with pytest.raises(functions.SystemRefusedError, match="no scheduler has written it"):
        Dask(str(tmp_path / "none.json"), 0.5, 0.5, heard.append)
    assert heard == [f"a scheduler to write {tmp_path / 'none.json'}"]


# A process of its own, which the connection of a fork must not outlive.
OWN = {"PYTHONUTF8": "1"}
