"""Calls that systems differ in, where Linux has them and where they are hidden: macOS's are made up, and recorded."""

import ctypes
import errno
import fcntl
import os
import posix
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import support

from gradtool.store import system

SOURCES = Path(support.gradtool.__code__.co_filename).parent.parent / "gradtool"
# Calls and names of the os module that macOS does not have.
LACKED = (
    "posix_fallocate", "posix_fadvise", "memfd_create", "sched_getaffinity", "getxattr", "listxattr", "setxattr",
    "removexattr", "O_PATH", "O_TMPFILE", "copy_file_range", "splice", "fdatasync", "eventfd", "/proc/", "FICLONE",
)  # fmt: skip
FULLFSYNC = 51


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


@pytest.fixture
def calls(monkeypatch):
    """The calls of macOS that are made, on a system without Linux's."""
    made = []

    def call(_fd, command, argument=0):
        made.append((command, argument))
        return 0

    for name in LACKED:
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", call)
    monkeypatch.setattr(os, "fsync", lambda _: made.append(("fsync", 0)))
    monkeypatch.setattr(posix, "_fcopyfile", lambda *arguments: made.append(("fcopyfile", arguments)), raising=False)
    return made


def failing(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def test_only_one_module_has_calls_that_not_every_system_has():
    # What Linux says of itself to doctor is read where it is there.
    known = {"store/system.py", "store/fs.py", "ops/doctor.py", "process.py"}
    found = {
        str(path.relative_to(SOURCES)): [name for name in LACKED if name in path.read_text()]
        for path in SOURCES.rglob("*.py")
        if str(path.relative_to(SOURCES)) not in known
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_space_is_reserved_before_it_is_written(fd):
    system.reserve(fd, 0, 1 << 20)
    assert os.fstat(fd).st_blocks * 512 >= 1 << 20


def test_macos_reserves_what_is_not_allocated_yet_from_the_end_of_the_file(fd, calls):
    os.pwrite(fd, bytes(8192), 0)
    allocated = os.fstat(fd).st_blocks * 512
    system.reserve(fd, 8192, 1 << 20)
    ((command, argument),) = calls
    # F_PREALLOCATE: all or nothing, from the end of what is allocated.
    assert (command, struct.unpack("Iiqqq", argument)) == (42, (4, 3, 0, (1 << 20) - allocated, 0))


def test_macos_reserves_more_behind_what_is_reserved_already(fd, calls, monkeypatch):
    monkeypatch.setattr(os, "fstat", lambda _: SimpleNamespace(st_size=5000, st_blocks=2048))
    system.reserve(fd, 2048 * 512, 4096 * 512)
    ((_, argument),) = calls
    assert struct.unpack("Iiqqq", argument)[3] == 2048 * 512


def test_macos_reserves_nothing_twice_and_nothing_behind_a_hole(fd, calls):
    os.pwrite(fd, bytes(8192), 0)
    system.reserve(fd, 0, 4096)
    system.reserve(fd, 1 << 20, 2 << 20)
    assert calls == []


def test_a_system_with_neither_call_reserves_nothing(fd, calls, monkeypatch):
    monkeypatch.delattr(fcntl, "F_FULLFSYNC")
    system.reserve(fd, 0, 1 << 20)
    assert calls == []
    assert os.fstat(fd).st_size == 0


def test_macos_syncs_the_disk_and_not_only_its_cache(fd, calls):
    system.sync(fd)
    assert calls == [(FULLFSYNC, 0)]


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOTTY, errno.EINVAL])
def test_where_the_disk_cannot_be_told_to_sync_an_fsync_must_do(fd, calls, monkeypatch, number):
    monkeypatch.setattr(fcntl, "fcntl", failing(number))
    system.sync(fd)
    assert calls == [("fsync", 0)]


def test_a_sync_that_fails_is_an_error_and_is_not_tried_in_another_way(fd, calls, monkeypatch):
    monkeypatch.setattr(fcntl, "fcntl", failing(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        system.sync(fd)
    assert calls == []


def test_macos_copies_attributes_and_access_control_lists(fd, calls):
    system.copy_attributes(fd, fd)
    assert calls == [("fcopyfile", (fd, fd, 0b101))]


def test_attributes_that_macos_cannot_copy_are_an_error_unless_there_can_be_none(fd, calls, monkeypatch):
    monkeypatch.setattr(posix, "_fcopyfile", failing(errno.ENOTSUP))
    system.copy_attributes(fd, fd)
    monkeypatch.setattr(posix, "_fcopyfile", failing(errno.EACCES))
    with pytest.raises(OSError, match=os.strerror(errno.EACCES)):
        system.copy_attributes(fd, fd)
    monkeypatch.delattr(posix, "_fcopyfile")
    system.copy_attributes(fd, fd)
    assert calls == []


LINUX = pytest.mark.skipif(not hasattr(os, "setxattr"), reason="Python has extended attributes only on Linux")


@LINUX
@pytest.mark.parametrize(
    ("entries", "rights"),
    [
        ([(1, 6, -1), (2, 6, 1234), (4, 4, -1), (0x10, 6, -1), (0x20, 4, -1)], 4),
        ([(1, 6, -1), (2, 0, 1234), (4, 4, -1), (0x10, 4, -1), (0x20, 4, -1)], 0),
        ([(1, 6, -1), (4, 4, -1), (8, 6, 1234), (0x10, 2, -1), (0x20, 6, -1)], 0),
        ([(1, 0, -1), (4, 6, -1), (8, 7, 1234), (0x10, 7, -1), (0x20, 6, -1)], 6),
    ],
)
def test_the_rights_of_an_access_control_list_are_those_that_all_have_but_the_owner(fd, entries, rights):
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    assert system.acl_rights(fd) is None
    try:
        os.setxattr(fd, "system.posix_acl_access", packed)
    except OSError as error:
        pytest.skip(f"this file system has no access control lists: {error}")
    assert system.acl_rights(fd) == rights
    system.remove_acl(fd)
    assert system.acl_rights(fd) is None
    system.remove_acl(fd)


@LINUX
@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOSYS, errno.ENODATA])
def test_a_file_system_without_access_control_lists_has_none(fd, monkeypatch, number):
    for name in ("getxattr", "removexattr"):
        monkeypatch.setattr(os, name, failing(number))
    assert system.acl_rights(fd) is None
    system.remove_acl(fd)


@LINUX
def test_an_access_control_list_that_cannot_be_read_or_removed_is_an_error(fd, monkeypatch):
    for name, call in (("getxattr", system.acl_rights), ("removexattr", system.remove_acl)):
        monkeypatch.setattr(os, name, failing(errno.EIO))
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            call(fd)


class Lists:
    """What macOS's library has for access control lists, of a file with so many entries; None if it has no list."""

    def __init__(self, entries, *, refuses=False):
        self.entries, self.freed = entries, []
        # Attributes can be set on functions only, as on those of a library.
        self.acl_get_fd_np = lambda _fd, kind: 77 if kind == 0x100 and self.entries is not None else None
        self.acl_init = lambda _: 88
        self.acl_get_entry = lambda acl, first, _: 0 if (acl.value, first) == (77, 0) and self.entries else -1
        self.acl_set_fd_np = lambda _fd, acl, kind: -1 if refuses else self.set(acl.value, kind)
        self.acl_free = lambda acl: self.freed.append(acl.value)

    def set(self, acl, kind):
        assert (acl, kind) == (88, 0x100)
        self.entries = 0
        return 0


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("entries", [None, 0, 2])
def test_an_access_control_list_of_macos_gives_no_rights_and_is_removed(fd, monkeypatch, entries):
    lists = Lists(entries)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: lists)
    assert system.acl_rights(fd) == (0 if entries else None)
    system.remove_acl(fd)
    assert system.acl_rights(fd) is None
    # Each list that was read, and each that was made.
    assert sorted(lists.freed) == ([88] * 3 if entries is None else [77] * 3 + [88] * 3)


@pytest.mark.usefixtures("calls")
def test_an_access_control_list_that_macos_keeps_is_an_error(fd, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Lists(1, refuses=True))
    with pytest.raises(PermissionError, match="could not be removed"):
        system.remove_acl(fd)


@pytest.mark.usefixtures("calls")
def test_a_system_with_other_lists_has_none_that_are_known(fd, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    assert system.acl_rights(fd) is None
    system.remove_acl(fd)


def test_cores_are_those_of_this_process_or_of_the_machine(monkeypatch):
    if hasattr(os, "sched_getaffinity"):
        assert system.cores() == len(os.sched_getaffinity(0))
        monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert system.cores() == 12
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert system.cores() == 1


@pytest.fixture
def no_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(system, "_BOOT_ID", str(tmp_path / "missing"))
    system.boot_id.cache_clear()
    yield
    system.boot_id.cache_clear()


@pytest.mark.usefixtures("no_proc")
def test_a_boot_has_the_id_that_macos_gives_its_session(monkeypatch):
    def sysctlbyname(name, value, _size, new, length):
        assert (name, new, length) == (b"kern.bootsessionuuid", None, 0)
        value.value = b"7F2E62F6-0F3A-4B64-9C8C-1B1F9D3A2C55"
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(sysctlbyname=sysctlbyname))
    assert system.boot_id() == "7F2E62F6-0F3A-4B64-9C8C-1B1F9D3A2C55"


@pytest.mark.usefixtures("no_proc")
@pytest.mark.parametrize("library", [SimpleNamespace(), SimpleNamespace(sysctlbyname=lambda *_: -1)])
def test_a_boot_without_an_id_has_none(monkeypatch, library):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert system.boot_id() == ""


def test_folders_are_opened_to_be_searched_with_what_macos_has_for_it():
    code = "import os; del os.O_PATH; os.O_SEARCH = 123; from gradtool.store import system; print(system.TO_SEARCH)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import os; os.O_PATH = 1; " + code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "123\n"
