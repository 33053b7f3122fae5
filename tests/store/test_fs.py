"""What changes the disk passes one module, so that a fault can strike at each such call."""

import ast
import errno
import os
import pickle
from pathlib import Path

import pytest
from support import file_in

import gradtool
from gradtool import SystemRefusedError
from gradtool.store import fs, system
from gradtool.store.fs import Folder

PACKAGE = Path(gradtool.__file__).parent
# Every call of `os` that changes a file, a folder or what belongs to them.
CHANGING = {
    "chflags", "chmod", "chown", "copy_file_range", "fchmod", "fchown", "fdatasync", "fsync", "ftruncate", "lchflags",
    "lchmod", "lchown", "link", "makedirs", "mkdir", "mkfifo", "mknod", "posix_fallocate", "pwrite", "pwritev",
    "remove", "removedirs", "removexattr", "rename", "renames", "replace", "rmdir", "sendfile", "setxattr", "splice",
    "symlink", "sync", "truncate", "unlink", "utime", "write", "writev",
}  # fmt: skip
# Those that a Path has as well.
OF_PATHS = {"chmod", "hardlink_to", "lchmod", "mkdir", "rename", "rmdir", "symlink_to", "touch", "unlink"}
OF_PATHS |= {"write_bytes", "write_text"}
# The module itself; what differs by system, which it alone calls; and those that write no data of a user.
EXPECTED = {"store/fs.py", "store/system.py", "__main__.py", "backends/cuda/compiler.py"}


def changes_in(path):
    """The calls that change the disk in a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in {"os", "posix"} and node.attr in CHANGING:
                yield f"os.{node.attr}"
            elif node.value.id.endswith("path") and node.attr in OF_PATHS:
                yield f"Path.{node.attr}"


def test_only_one_module_changes_the_disk():
    changing = {path.relative_to(PACKAGE).as_posix(): set(changes_in(path)) for path in PACKAGE.rglob("*.py")}
    assert {name for name, calls in changing.items() if calls} <= EXPECTED
    assert {"os.fchown", "os.pwritev", "os.replace", "os.unlink"} <= changing["store/fs.py"]
    assert {"os.setxattr", "os.removexattr", "os.posix_fallocate"} <= changing["store/system.py"]


def test_what_differs_by_system_and_changes_the_disk_is_only_called_from_there():
    changing = {"reserve", "sync", "copy_attributes", "remove_acl"}
    for path in PACKAGE.rglob("*.py"):
        calls = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "system"
        }
        assert not calls & changing or path.name == "fs.py", path


CALLS = {
    "create": lambda folder, _: folder.create("new"),
    "make": lambda folder, _: folder.make("new"),
    "link": lambda folder, _: folder.link("x", "new"),
    "rename": lambda folder, _: folder.rename("x", "new"),
    "unlink": lambda folder, _: folder.unlink("x"),
    "remove_folder": lambda folder, _: folder.remove_folder("empty"),
    "sync": lambda folder, _: folder.sync(),
    "write_all": lambda _, fd: fs.write_all(fd, [b"new"], 0),
    "resize": lambda _, fd: fs.resize(fd, 1),
    "reserve": lambda _, fd: fs.reserve(fd, 0, 9),
    "change_mode": lambda _, fd: fs.change_mode(fd, 0o600),
    "change_owner": lambda _, fd: fs.change_owner(fd, 0, 0),
    "copy_attributes": lambda _, fd: fs.copy_attributes(fd, fd),
    "remove_acl": lambda _, fd: fs.remove_acl(fd),
    "sync of a file": lambda _, fd: fs.sync(fd),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_fault_strikes_before_each_of_them(tmp_path, monkeypatch, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x").write_bytes(b"content")
    before = sorted(path.name for path in tmp_path.iterdir()), (tmp_path / "x").stat().st_ctime_ns
    with Folder.at(tmp_path) as folder, (tmp_path / "x").open("r+b") as file:
        monkeypatch.setenv("GRADTOOL_FAULT", f"EIO@{next(fs.steps) + 1}")
        with pytest.raises(OSError, match="Input/output error"):
            CALLS[name](folder, file.fileno())
    assert (sorted(path.name for path in tmp_path.iterdir()), (tmp_path / "x").stat().st_ctime_ns) == before


def test_the_table_has_every_function_that_takes_a_step():
    tree = ast.parse(Path(fs.__file__).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    stepping = {
        function.name
        for function in functions
        if any(isinstance(node, ast.Name) and node.id == "step" for node in ast.walk(function))
    }
    assert stepping <= CALLS.keys()
    assert {name for name in system.__dict__ if name in stepping} == {
        "copy_attributes",
        "remove_acl",
        "reserve",
        "sync",
    }


def test_a_file_of_a_folder_is_the_same_in_another_process(tmp_path):
    (tmp_path / "x").write_bytes(b"content")
    with Folder.at(tmp_path) as folder:
        file = pickle.loads(pickle.dumps(file_in(folder, "x")))  # noqa: S301 - we made it
        with file.folder:
            assert file.path == tmp_path / "x"
            assert file.folder.identity == folder.identity
            assert file.is_there
            (tmp_path / "x").unlink()
            (tmp_path / "y").touch()
            assert not file.is_there


def test_a_folder_that_was_just_removed_is_named(tmp_path):
    (tmp_path / "gone").mkdir()
    with Folder.at(tmp_path / "gone") as folder:
        (tmp_path / "gone").rmdir()
        with pytest.raises(SystemRefusedError, match="it was just removed; write somewhere else") as caught:
            folder.create("new")
    assert (caught.value.errno, caught.value.problems[0].file) == (errno.ENOENT, str(tmp_path / "gone"))


def test_a_folder_that_cannot_be_opened_is_removed_again(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(fs, "open_folder", refuse)
    fd = os.open(tmp_path, os.O_RDONLY)
    with Folder(tmp_path, fd) as folder, pytest.raises(OSError, match="Too many open files"):
        folder.make("new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_has_files_stays_and_one_that_cannot_be_removed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()

    def refuse(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with Folder.at(tmp_path) as folder:
        for name in ("full", "missing", "full/x", "n" * 300):
            folder.remove_folder(name)
        monkeypatch.setattr(os, "rmdir", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            folder.remove_folder("full")
    assert (tmp_path / "full" / "x").exists()


def test_what_is_written_in_part_is_written_on_from_there(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADTOOL_FAULT", f"short@{next(fs.steps) + 1}")
    with (tmp_path / "x").open("w+b") as file:
        assert fs.write_all(file.fileno(), [b"abc", b"", b"defgh", b"ij"], 2) == 10
    assert (tmp_path / "x").read_bytes() == b"\0\0abcdefghij"


def test_no_range_is_reserved_in_no_step(tmp_path):
    before = next(fs.steps)
    with (tmp_path / "x").open("w+b") as file:
        fs.reserve(file.fileno(), 5, 5)
        assert os.fstat(file.fileno()).st_blocks == 0
    assert next(fs.steps) == before + 1
