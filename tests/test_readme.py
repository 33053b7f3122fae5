"""The README cannot go stale: its examples are run and its output compared, its options and keys looked up."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import gradtool

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```console\n((?:\$ [^\n]*\n)+)(.*?)```", README, re.DOTALL)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the sample data, and the real command on the path."""
    shutil.copytree(ROOT / "sample_data", tmp_path / "checkout" / "sample_data")
    command = tmp_path / "bin" / "gradtool"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m gradtool "$@"\n')
    command.chmod(0o755)
    return tmp_path / "checkout", {"PATH": f"{command.parent}:{os.environ['PATH']}"}


def test_there_are_at_least_five_examples():
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize(("command", "output"), EXAMPLES)
def test_examples_print_what_the_readme_shows(checkout, command, output):
    folder, environment = checkout
    done = subprocess.run(
        ["bash", "-c", re.sub(r"^\$ ", "", command, flags=re.MULTILINE)],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    assert done.stdout == output


COMMANDS = ["norm", "clip", "accumulate", "zero", "layernorm-backward", "recover"]


def options_in(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def test_every_option_the_readme_names_exists_and_every_option_is_named():
    everything = set().union(*(options_in(gradtool(command, "--help").stdout) for command in COMMANDS))
    assert options_in(README) - {"--timing", "--version"} <= everything
    assert everything - options_in(README) == set()
    assert all(f"`gradtool {command}`" in README for command in COMMANDS)


def test_there_are_two_set_up_commands():
    assert len(re.findall(r"^```sh$", README, re.MULTILINE)) == 2
