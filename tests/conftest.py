import collections
import importlib.util
import os
import subprocess
import sys


def _require_installed():
    """Stop unless the package that this process imports is the one that the command imports, which tests start."""
    code = "import importlib.util as util; spec = util.find_spec('gradtool'); print(spec and spec.origin)"
    # -P: not from the current folder, as `python -m pytest` does.
    installed = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    spec = importlib.util.find_spec("gradtool")
    if spec is None or spec.origin != installed.stdout.strip():
        raise SystemExit("gradtool is not built here: pip install -e '.[test]'")


if "PYTEST_XDIST_WORKER" not in os.environ:
    _require_installed()

import pytest  # noqa: E402 - not before it is known what is tested
import support  # noqa: E402
from hypothesis import settings  # noqa: E402

# Of whoever runs the tests; they ask for what they mean.
os.environ.pop("GRADTOOL_BACKEND", None)
os.environ.pop("GRADTOOL_ENGINE", None)
os.environ.pop("GRADTOOL_FORMAT", None)

# The same examples every time: no test may depend on luck.
settings.register_profile("gradtool", derandomize=True, deadline=None)
settings.load_profile("gradtool")


@pytest.fixture(autouse=True)
def _close_folders():
    yield
    support.close_folders()


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=24, metavar="N", help="Kill so many runs at random instants.")
    parser.addoption("--seed", type=int, metavar="N", help="Print and play one story (tests/stories).")


def pytest_terminal_summary(terminalreporter):
    """Count skipped tests by reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("skipped tests, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5}  {reason}")


def _parameter(name):
    # A GPU that is there is only used when it is asked for: pytest -m gpu.
    return pytest.param(name, marks=[pytest.mark.gpu] if name == "cuda" else [])


@pytest.fixture(scope="session", params=[_parameter(name) for name in support.backends()])
def backend(request):
    """Each backend in turn: the conformance tests run on all of them."""
    try:
        return support.backends()[request.param]()
    except ImportError as error:
        pytest.skip(str(error))
