"""Pages that are made from the code are up to date."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradtool.command import COMMANDS, declared_of
from gradtool.signatures import ARGUMENTS, OPTIONS, PYTHON

DOCS = Path(__file__).parent.parent / "docs"


def made_by(script):
    command = [sys.executable, "-P", DOCS / script]
    return subprocess.run(command, capture_output=True, check=True, env=os.environ | {"PYTHONUTF8": "1"}).stdout


def test_the_page_of_commands_and_options_is_up_to_date():
    made = made_by("make_cli.py")
    assert (DOCS / "cli.md").read_bytes() == made, "python docs/make_cli.py > docs/cli.md makes it anew"


def test_the_man_page_is_up_to_date():
    made = made_by("make_man.py")
    assert (DOCS / "gradtool.1").read_bytes() == made, "python docs/make_man.py > docs/gradtool.1 makes it anew"


def test_the_man_page_has_every_command_and_every_option():
    page = (DOCS / "gradtool.1").read_text().replace("\\-", "-")
    for name in COMMANDS:
        section = page.split(f".SS gradtool {name}\n")[1].split("\n.SS ")[0]
        for one in declared_of(name):
            if one.group == OPTIONS:
                assert f"\\fB{one.flag}\\fR" in section, one.flag
            elif one.group not in {ARGUMENTS, PYTHON}:
                assert f"\\fB{one.flag}\\fR" in page, one.flag


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_a_checker_of_man_pages_finds_nothing_but_the_date_that_it_does_not_have():
    done = subprocess.run(["mandoc", "-Tlint", DOCS / "gradtool.1"], capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if "missing date" not in line] == []
