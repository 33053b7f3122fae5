"""Tests of how the tests start and end."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SKIPPING = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_nothing(number):
    pytest.skip("no GPU")

@pytest.mark.skip(reason="not on this system")
def test_no_more():
    pass
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a few tests, and without a package of its own."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests").mkdir()
    shutil.copy(HERE / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_some.py").write_text(SKIPPING)
    return tmp_path


def run_tests(checkout):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def test_skipped_tests_are_counted_by_reason(checkout):
    done = run_tests(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "    3  no GPU\n    1  not on this system\n" in done.stdout


def test_a_checkout_that_is_not_installed_is_not_tested(checkout):
    (checkout / "gradtool").mkdir()
    (checkout / "gradtool" / "__init__.py").touch()
    done = run_tests(checkout)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gradtool is not built here: pip install -e '.[test]'\n"
