"""Pages, and the schema, that are made from the code are up to date."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from gradtool.cli import COMMANDS
from gradtool.declare import ARGUMENTS, OPTIONS, PYTHON

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("script", "made"),
    [
        ("docs/make_cli.py", "docs/cli.md"),
        ("docs/make_api.py", "docs/api.md"),
        ("docs/make_schema.py", "gradtool/schema.json"),
        ("docs/make_man.py", "docs/gradtool.1"),
        ("docs/make_terminal.py", "docs/terminal.svg"),
    ],
)
def test_what_is_made_from_the_code_is_up_to_date(script, made):
    command = [sys.executable, "-P", ROOT / script]
    done = subprocess.run(command, capture_output=True, check=True, env=os.environ | {"PYTHONUTF8": "1"})
    assert (ROOT / made).read_bytes() == done.stdout, f"python {script} > {made} makes it anew"


def test_the_page_on_python_leaves_the_meaning_of_options_to_the_page_on_commands():
    page = " ".join((ROOT / "docs/api.md").read_text().split())
    meanings = {str(declared.text) for command in COMMANDS.values() for declared in command.declared}
    assert [text for text in meanings if len(text.split()) > 4 and text in page] == []
    assert all(f"(cli.md#gradtool-{name})" in page for name in COMMANDS)


def test_the_picture_of_the_terminal_loads_nothing_and_is_light_or_dark():
    picture = (ROOT / "docs/terminal.svg").read_text()
    assert ET.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314 - our own
    assert re.findall(r"https?://|@import|@font-face|href|url\(", picture) == ["http://"]
    assert "prefers-color-scheme: dark" in picture


def test_the_man_page_has_every_command_and_every_option():
    page = (ROOT / "docs/gradtool.1").read_text().replace("\\-", "-")
    for name, command in COMMANDS.items():
        section = page.split(f".SS gradtool {name}\n")[1].split("\n.SS ")[0]
        for one in command.declared:
            if one.group == OPTIONS:
                assert f"\\fB{one.flags[-1]}\\fR" in section, one.flags[-1]
            elif one.group not in {ARGUMENTS, PYTHON}:
                assert f"\\fB{one.flags[-1]}\\fR" in page, one.flags[-1]


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_a_checker_of_man_pages_finds_nothing_but_the_date_that_it_does_not_have():
    done = subprocess.run(["mandoc", "-Tlint", ROOT / "docs/gradtool.1"], capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if "missing date" not in line] == []
