"""What is said of a file system, against what its own tools and the calls themselves say."""

import errno
import os
import shutil
import subprocess

import pytest
from support import gradtool, gradtool_json

from gradtool.store import fs
from gradtool.store.fs import Folder
from gradtool.store.transaction import abilities as module
from gradtool.store.transaction.abilities import Abilities, abilities


@pytest.fixture
def folder(tmp_path):
    with Folder.at(tmp_path) as folder:
        yield folder
    assert list(tmp_path.iterdir()) == [], "something was left"


def failing(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def test_what_this_file_system_does_is_said_of_it(folder, tmp_path):
    found = abilities(folder)
    (tmp_path / "a").write_bytes(b"x" * 4096)
    os.link(tmp_path / "a", tmp_path / "b")
    with (tmp_path / "c").open("wb") as sparse:
        sparse.truncate(1 << 20)
    assert found.writable
    assert found.hard_links
    assert found.locks
    assert found.holes == ((tmp_path / "c").stat().st_blocks * 512 < 1 << 20)
    assert found.fsync_seconds > 0
    for path in tmp_path.iterdir():
        path.unlink()


@pytest.mark.skipif(shutil.which("cp") is None, reason="cp is not installed")
def test_reflinks_are_there_where_cp_can_make_them(folder, tmp_path):
    found = abilities(folder).reflinks
    (tmp_path / "a").write_bytes(b"x" * (1 << 20))
    copied = subprocess.run(
        ["cp", "--reflink=always", tmp_path / "a", tmp_path / "b"], capture_output=True, check=False
    )
    for path in tmp_path.iterdir():
        path.unlink()
    if b"illegal option" in copied.stderr:
        pytest.skip("this cp makes no reflinks")
    assert found is (copied.returncode == 0)


def test_what_a_file_system_does_not_do_is_said_of_it(folder, monkeypatch):
    monkeypatch.setattr(module, "lock", lambda _: None)
    monkeypatch.setattr(fs, "clone", lambda *_: False)
    monkeypatch.setattr(fs, "reserve", lambda *_: None)
    monkeypatch.setattr(module, "_space", lambda _: 0)
    monkeypatch.setattr(Folder, "link", failing(errno.EPERM))
    monkeypatch.setattr(os, "setxattr", failing(errno.EOPNOTSUPP), raising=False)
    found = abilities(folder)
    assert (found.locks, found.reflinks, found.reserves, found.hard_links) == (False, False, False, False)
    assert found.holes
    assert not found.attributes


def test_a_lock_that_keeps_nobody_out_is_no_lock(folder, monkeypatch):
    monkeypatch.setattr(module, "lock", lambda _: True)
    assert abilities(folder).locks is False


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOENT])
def test_where_no_file_can_be_made_nothing_else_is_known(folder, monkeypatch, number):
    monkeypatch.setattr(Folder, "create", failing(number))
    assert abilities(folder) == Abilities(writable=False)


@pytest.mark.parametrize("call", ["reserve", "write_all"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_error_but_what_is_to_be_said(folder, monkeypatch, call, number):
    monkeypatch.setattr(fs, call, failing(number))
    assert abilities(folder) == Abilities(writable=False)


@pytest.mark.parametrize("call", ["resize", "reserve", "write_all", "sync", "clone"])
def test_a_file_system_that_fails_is_an_error(folder, monkeypatch, call):
    monkeypatch.setattr(fs, call, failing(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        abilities(folder)


def test_a_killed_call_leaves_what_recover_removes(tmp_path):
    for step in range(1, 12):
        done = gradtool("doctor", tmp_path, env={"GRADTOOL_FAULT": f"kill@{step}"})
        assert done.returncode == -9
    assert list(tmp_path.iterdir())
    assert gradtool_json("recover", tmp_path)["data"]["removed"] > 0
    assert list(tmp_path.iterdir()) == []
