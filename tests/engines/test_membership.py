"""Workers that come, go and answer when they like, on a cluster that does as it is told."""

from concurrent.futures import Future

import pytest
from support import sample

import gradtool
from gradtool._version import __version__
from gradtool.backends.protocol import NormSpec
from gradtool.engines import membership
from gradtool.engines.executor import Workers
from gradtool.engines.membership import Membership
from gradtool.engines.protocol import WorkerInfo
from gradtool.engines.wire import packed
from gradtool.ops.passes import Measure
from gradtool.store.transaction.inputs import Inputs

FIT = {
    "version": __version__,
    "host": "node",
    "process": "1",
    "sees": True,
    "refused": [""] * 4,
    "user": 0,
    "error": "",
}
FIT |= {"backend": "cpu", "why": ""}


class Told:
    """A cluster whose calls are done by the test."""

    name = "the cluster"

    def __init__(self):
        self.addresses, self.asked, self.tasks = ["a"], [], []
        self.answers = {"a": FIT}

    def members(self):
        return {address: WorkerInfo(address, 1) for address in self.addresses}

    def submit(self, call, address=None, *, only=False):  # noqa: ARG002
        future = Future()
        if not only:
            self.tasks.append(future)
            return future
        self.asked.append((address, future))
        if address in self.answers:
            future.set_result(packed(self.answers[address]))
        return future

    def stranded(self):
        return ()

    def why(self, error):
        return str(error), None

    def close(self):
        pass


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(membership, "_LOOK_SECONDS", 0.0)
    return Told()


@pytest.fixture
def members(cluster, tmp_path):
    members = Membership(cluster, None, None, 0.1)
    members.require_readable(Inputs([str(sample(tmp_path))]).open().shards[0])
    return members


def test_a_worker_that_joins_late_is_not_waited_for(cluster, members):
    cluster.addresses.append("b")
    members.watch()
    members.settle(0.3)
    members.watch()
    ((_, answered),) = cluster.asked[1:]
    answered.set_result(packed(FIT | {"host": "late"}))
    members.watch()
    assert members.addresses == {("node", "1"): "a", ("late", "1"): "b"}


def test_a_worker_that_joins_late_and_is_not_fit_is_refused(cluster, members):
    cluster.addresses.append("b")
    cluster.answers["b"] = FIT | {"version": "0.0.1"}
    with pytest.raises(gradtool.BackendUnavailableError, match=r"has gradtool 0\.0\.1"):
        members.settle(5.0)


def test_a_worker_that_does_not_answer_at_first_is_an_error(cluster, tmp_path):
    cluster.answers.clear()
    with pytest.raises(gradtool.SystemRefusedError, match=r"the worker a has not answered for 0\.1 s"):
        Membership(cluster, None, None, 0.1).require_readable(Inputs([str(sample(tmp_path))]).open().shards[0])


def test_a_worker_at_an_address_that_another_one_had_is_asked(cluster, members):
    cluster.addresses.clear()
    members.watch()
    cluster.addresses.append("a")
    cluster.answers["a"] = FIT | {"user": 1, "sees": False}
    with pytest.raises(gradtool.BackendUnavailableError, match="does not see"):
        members.settle(5.0)


def test_the_answer_of_a_worker_that_is_gone_does_not_count(cluster, members):
    cluster.addresses.append("b")
    members.watch()
    cluster.addresses.remove("b")
    members.watch()
    cluster.asked[1][1].set_result(packed(FIT | {"version": "0.0.1"}))
    members.settle(0.0)
    assert members.addresses == {("node", "1"): "a"}


def test_a_task_that_fails_on_a_worker_that_is_not_fit_is_explained_by_that(cluster, tmp_path, monkeypatch):
    opened = Inputs([str(sample(tmp_path))]).open()
    engine = Workers("dask:x", lambda: cluster)
    engine.prepare(None, opened.shards)
    submit = cluster.submit

    def fail(call, address=None, *, only=False):
        future = submit(call, address, only=only)
        if not only:
            cluster.addresses.append("b")
            future.set_exception(ModuleNotFoundError("No module named 'gradtool'"))
        return future

    monkeypatch.setattr(cluster, "submit", fail)
    cluster.answers["b"] = FIT | {"sees": False}
    with pytest.raises(gradtool.BackendUnavailableError, match="mount the same file system there"):
        engine.run(Measure(opened.selected, NormSpec()))
