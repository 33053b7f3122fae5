"""Workers that come, go and answer when they like, on a cluster that does as it is told."""

from concurrent.futures import Future

import pytest
from support import sample

import gradtool
from gradtool.backends.values import NormSpec
from gradtool.engines.cluster import dask, engine
from gradtool.engines.cluster.engine import Membership, Workers
from gradtool.engines.cluster.wire import packed, packed_error
from gradtool.engines.cluster.work import Check, Report
from gradtool.ops.passes import Measure
from gradtool.options import NormOptions
from gradtool.store.transaction.inputs import Inputs

CHECK = Check("/data/x", 1, None, None, None)
FIT = packed(Report("cpu", "asked for"))
UNFIT = packed_error(gradtool.BackendUnavailableError("the worker on node does not see /data/x"))


class Told:
    """A cluster whose calls are done by the test."""

    name = "the cluster"

    def __init__(self):
        self.members_now, self.asked, self.tasks = {"a": 1}, [], []
        self.answers = {"a": FIT}

    def members(self):
        return dict(self.members_now)

    def submit(self, call, address):
        future = Future()
        if b"Job" in call:
            self.tasks.append((address, call, future))
            return future
        self.asked.append((address, future))
        if address in self.answers:
            future.set_result(self.answers[address])
        return future

    def why(self, error):
        return str(error), None

    def close(self):
        pass


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(engine, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(engine, "_HEARTBEAT_SECONDS", 0.0)
    return Told()


@pytest.fixture
def members(cluster):
    members = Membership(cluster, 0.1, CHECK)
    members.wait_until_fit()
    return members


def test_a_worker_that_joins_late_is_not_waited_for_and_gets_work_once_it_is_fit(cluster, members):
    cluster.members_now["b"] = 2
    members.watch()
    members.watch()
    assert members.fit == {"a": 1}
    ((_, answered),) = cluster.asked[1:]
    answered.set_result(packed(Report("cuda", "")))
    members.watch()
    assert members.fit == {"a": 1, "b": 2}
    assert members.reports == {"a": ("cpu", "asked for"), "b": ("cuda", "")}


def test_a_worker_that_joins_late_and_is_not_fit_is_refused(cluster, members):
    cluster.members_now["b"] = 1
    cluster.answers["b"] = UNFIT
    members.watch()
    with pytest.raises(gradtool.BackendUnavailableError, match="the worker on node does not see /data/x"):
        members.watch()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"answer": {"version": "0.0.1"}}', "the worker b has another version of gradtool"),
        (ModuleNotFoundError("No module named 'gradtool'"), "the worker b cannot load gradtool: No module named"),
    ],
)
def test_a_worker_without_this_gradtool_is_refused(cluster, members, answer, said):
    cluster.members_now["b"] = 1
    members.watch()
    ((_, answered),) = cluster.asked[1:]
    answered.set_result(answer) if type(answer) is bytes else answered.set_exception(answer)
    with pytest.raises(gradtool.BackendUnavailableError, match=said):
        members.watch()


def test_a_worker_that_does_not_answer_at_first_is_an_error(cluster, monkeypatch):
    monkeypatch.setattr(engine, "_GRACE_SECONDS", 0.0)
    cluster.answers.clear()
    with pytest.raises(gradtool.SystemRefusedError, match=r"the worker a has not answered for 0\.1 s"):
        Membership(cluster, 0.1, CHECK).wait_until_fit()


def test_a_wait_for_workers_is_told_once(cluster, monkeypatch):
    monkeypatch.setattr(dask, "_SILENT_SECONDS", 0.0)
    cluster.members_now, heard = {}, []

    def come(what):
        heard.append(what)
        cluster.members_now = {"a": 1, "b": 1}

    cluster.answers["b"] = FIT
    Membership(cluster, 60.0, CHECK).wait_until_fit(come)
    assert heard == ["the workers of the cluster"]


def test_a_worker_at_an_address_that_another_one_had_is_asked(cluster, members):
    cluster.members_now.clear()
    members.watch()
    cluster.members_now["a"] = 1
    cluster.answers["a"] = UNFIT
    members.watch()
    with pytest.raises(gradtool.BackendUnavailableError, match="does not see"):
        members.watch()


def test_the_answer_of_a_worker_that_is_gone_does_not_count(cluster, members):
    cluster.members_now["b"] = 1
    members.watch()
    del cluster.members_now["b"]
    members.watch()
    cluster.asked[1][1].set_result(UNFIT)
    members.watch()
    assert members.fit == cluster.members_now == {"a": 1}


def test_what_a_lost_worker_had_goes_to_others_but_not_without_end(cluster, tmp_path, monkeypatch):
    opened = Inputs([str(sample(tmp_path))]).open()
    monkeypatch.setattr(engine, "Dask", lambda *_: cluster)
    workers = Workers("dask:x", "x", NormOptions(["x"]))
    workers.prepare(None, opened.shards)
    submit = cluster.submit

    def lose(call, address):
        future = submit(call, address)
        if b"Job" in call:
            # It dies of its task, and another one comes.
            (number,) = cluster.members_now.values()
            cluster.members_now = {f"{address}'": number}
            cluster.answers = {f"{address}'": FIT}
        return future

    cluster.submit = lose
    assert workers.warnings == ()
    with pytest.raises(gradtool.SystemRefusedError, match="every worker that was given the task died"):
        workers.run(Measure(opened.selected, NormSpec()))
    assert [address for address, *_ in cluster.tasks] == ["a", "a'", "a''", "a'''"]
    # The last worker was asked for nothing more.
    (problem,) = workers.warnings
    assert (problem.code, problem.message) == ("worker-lost", "4 of 5 workers were lost; their work was done again")
