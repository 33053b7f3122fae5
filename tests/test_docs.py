"""Pages that are made from the code are up to date."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", ["cli", "api"])
def test_a_page_that_is_made_is_up_to_date(name):
    command = [sys.executable, "-P", DOCS / f"make_{name}.py"]
    done = subprocess.run(command, capture_output=True, check=True, env=os.environ | {"PYTHONUTF8": "1"})
    assert (DOCS / f"{name}.md").read_bytes() == done.stdout, (
        f"python docs/make_{name}.py > docs/{name}.md makes it anew"
    )
