"""What is installed is whole: the command, what is read at run time, the metadata, the kernels of a wheel."""

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sysconfig
from importlib import resources
from pathlib import Path

import pytest
from support import SAMPLES

import gradtool
from gradtool.backends.choose import choose
from gradtool.backends.cuda import compiler

pytestmark = pytest.mark.installed
METADATA = importlib.metadata.metadata("gradtool")


def test_the_command_is_on_the_path_and_has_the_version_of_the_package():
    command = Path(sysconfig.get_path("scripts")) / "gradtool"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"gradtool {METADATA['Version']}\n"
    assert METADATA["Version"] == gradtool.__version__


def test_what_is_read_at_run_time_is_there():
    assert resources.files(gradtool).joinpath("py.typed").is_file()
    assert "__global__" in compiler.source()


def test_the_description_is_the_readme_and_no_link_in_it_needs_the_repository():
    text = METADATA["Description"]
    links = re.findall(r"\]\(([^)#][^)]*)\)", text)
    assert text.startswith("# gradtool")
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.skipif(os.environ.get("GRADTOOL_KERNELS") != "required", reason="GRADTOOL_KERNELS=required asks for them")
def test_the_compiled_kernels_are_there():
    assert choose("cpu").why.startswith("compiled kernels")


@pytest.mark.parametrize("write", ["replace", "inplace"])
def test_clipping_has_the_same_bits_on_every_system(tmp_path, write):
    grads = shutil.copytree(SAMPLES / "sharded", tmp_path / "grads")
    result = gradtool.clip(grads, max_norm=1.0, write=write)
    assert (result.norm_before, result.norm_after) == (2.770171426938526, 0.9999996086865677)
    names = sorted(path.name for path in grads.iterdir())
    content = b"".join((grads / name).read_bytes() for name in names)
    assert hashlib.sha256(content).hexdigest() == "ee9df45cf58914822c9d4cccee3e60ca04ab870eb26452a8098270b6ffef5125"
    assert names == sorted(path.name for path in (SAMPLES / "sharded").iterdir())
