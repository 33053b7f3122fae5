"""Pages, and the schema, that are made from the code are up to date."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("script", "made"), [("docs/make_cli.py", "docs/cli.md"), ("docs/make_schema.py", "gradtool/schema.json")]
)
def test_what_is_made_from_the_code_is_up_to_date(script, made):
    command = [sys.executable, "-P", ROOT / script]
    done = subprocess.run(command, capture_output=True, check=True, env=os.environ | {"PYTHONUTF8": "1"})
    assert (ROOT / made).read_bytes() == done.stdout, f"python {script} > {made} makes it anew"
