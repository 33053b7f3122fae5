"""What doctor reports, against what Python, the system and the installed packages say themselves."""

import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support import gradtool as command
from support import gradtool_json, sample, snapshot
from terminal import on_terminal

import gradtool
from gradtool.ops import doctor as module

WITHOUT_KERNELS = "import sys; sys.modules['gradtool.backends._kernels'] = None; from gradtool.cli import main; main()"
MOUNTS = r"""22 1 0:21 / / rw - ext4 /dev/root rw
23 22 0:22 / /mnt/big\040disk rw,relatime shared:1 - xfs /dev/sdb rw
24 22 0:23 / /mnt/big rw - tmpfs none rw
25 24 0:24 / /mnt/big rw - nfs4 server:/grads rw,vers=4.2
"""


def test_the_facts_are_those_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADTOOL_DEBUG", "0")
    found = gradtool.doctor(tmp_path)
    assert found.gradtool == gradtool.__version__
    assert Path(found.location) == Path(gradtool.__file__).parent
    assert (found.python, found.executable) == (f"CPython {platform.python_version()}", sys.executable)
    assert found.system.startswith(f"{platform.system()} {platform.release()} {platform.machine()}")
    assert found.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found.settings == "GRADTOOL_DEBUG=0"
    assert found.path == str(tmp_path.resolve())
    assert found.free_bytes == pytest.approx(os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize, rel=0.5)
    assert found.writable


def test_the_libraries_are_those_that_are_installed_with_what_installs_the_others():
    rows = {row.name: row for row in gradtool.doctor().per_library}
    assert rows["numpy"].version == importlib.metadata.version("numpy")
    extras = importlib.metadata.metadata("gradtool").get_all("Provides-Extra")
    assert {row.extra for row in rows.values()} - {None} <= set(extras)
    needed = " ".join(importlib.metadata.requires("gradtool"))
    assert all(name in needed for name in rows)


def test_a_file_stands_for_its_folder_and_is_left_alone(tmp_path):
    path = sample(tmp_path)
    before = snapshot(tmp_path)
    (tmp_path / "link").symlink_to(path)
    assert gradtool.doctor(tmp_path / "link").path == str(tmp_path.resolve())
    (tmp_path / "link").unlink()
    assert snapshot(tmp_path) == before


def test_the_file_system_is_the_last_one_mounted_nearest_to_the_folder(tmp_path, monkeypatch):
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr(module, "_MOUNTS", tmp_path / "mounts")
    found = {path: module.file_system_of(Path(path)) for path in ("/", "/mnt/big disk/x", "/mnt/big", "/mnt/bigger")}
    assert found == {"/": "ext4", "/mnt/big disk/x": "xfs", "/mnt/big": "nfs4", "/mnt/bigger": "ext4"}


def test_the_instruction_sets_are_those_of_the_kernel(tmp_path):
    try:
        flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    except OSError:
        pytest.skip("this system has no /proc/cpuinfo")
    found = gradtool.doctor(tmp_path).cpu_features.split()
    names = {"SSE42": "sse4_2", "AVX": "avx", "F16C": "f16c", "FMA3": "fma", "AVX2": "avx2", "AVX512F": "avx512f"}
    assert {name for name in names if name in found} == {name for name, flag in names.items() if flag in flags}


def test_what_the_system_does_not_tell_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOUNTS", tmp_path / "missing")
    monkeypatch.setattr(module, "_DRIVER", tmp_path / "missing")
    monkeypatch.setitem(sys.modules, "numpy._core._multiarray_umath", None)
    found = gradtool.doctor(tmp_path)
    assert (found.file_system, found.gpu_driver, found.cpu_features) == (None, None, None)


def test_the_version_of_the_driver_is_the_one_of_its_kernel_module(tmp_path, monkeypatch):
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.2\n"
    )
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(module, "_DRIVER", tmp_path / "version")
    assert gradtool.doctor(tmp_path).gpu_driver == "550.54.15"


def test_missing_kernels_are_named_with_a_remedy(tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_KERNELS, "doctor", tmp_path], capture_output=True, text=True, check=True
    )
    assert "\ncpu_backend\tnumpy, because the compiled kernels are missing: " in done.stdout
    assert done.stderr.startswith("gradtool: warning: numpy, because the compiled kernels are missing: ")
    assert done.stderr.endswith(
        "which is several times slower\n  hint: install gradtool again on a machine with a C compiler\n"
    )


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("nope", 3, "nope: no such file"),
        ("", 2, "PATH is empty"),
        ("https://host/x", 3, "https://host/x: is a URL, which gradtool cannot read"),
    ],
)
def test_a_path_that_leads_nowhere_is_an_error(tmp_path, path, code, message):
    done = command("doctor", path, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"gradtool: error: {message}")
    assert done.stderr.count("gradtool: ") == 1


def test_the_keys_are_the_same_in_all_formats(tmp_path):
    data = gradtool_json("doctor", tmp_path)["data"]
    lines = [line.split("\t")[0] for line in command("doctor", tmp_path).stdout.splitlines()]
    known = [key for key, value in data.items() if value is not None and key not in {"warnings", "per_library"}]
    assert lines == known + ["library"] * len(data["per_library"])


@pytest.mark.parametrize("columns", [40, 80])
def test_no_line_is_wider_than_the_terminal(tmp_path, columns):
    code, shown = on_terminal("doctor", tmp_path, columns=columns)
    data = gradtool_json("doctor", tmp_path)["data"]
    assert code == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert max(map(len, lines)) <= columns
    labels = [line for line in lines if not line.startswith(" ")]
    shown_keys = [key for key in data if any(line.startswith(key.replace("_", " ")) for line in labels)]
    assert shown_keys == [key for key in data if data[key] not in (None, []) and key != "per_library"]
    assert "distributed" in shown
