"""Pages that are made from the code are up to date."""

import os
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_of_commands_and_options_is_up_to_date():
    command = [sys.executable, "-P", DOCS / "make_cli.py"]
    done = subprocess.run(command, capture_output=True, check=True, env=os.environ | {"PYTHONUTF8": "1"})
    assert (DOCS / "cli.md").read_bytes() == done.stdout, "python docs/make_cli.py > docs/cli.md makes it anew"
