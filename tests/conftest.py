import os

import pytest
import support
from hypothesis import settings

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
