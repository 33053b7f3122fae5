import subprocess
import sys

import pytest

from gradtool import BackendUnavailableError, UsageError
from gradtool.backends import choose

WITHOUT_KERNELS = """
import sys
sys.modules["gradtool.backends._kernels"] = None
from gradtool.backends import choose
choice = choose("auto")
print(type(choice.backend).__name__, choice.backend.name, choice.why)
"""


def test_auto_and_cpu_take_the_cpu_and_say_why():
    for name in ("auto", "cpu"):
        choice = choose(name)
        assert choice.backend.name == "cpu"
        assert choice.why


def test_without_compiled_kernels_numpy_does_the_work_and_says_so():
    done = subprocess.run([sys.executable, "-c", WITHOUT_KERNELS], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("NumpyBackend cpu numpy, for the compiled kernels are missing: ")


def test_an_explicit_backend_that_is_missing_is_an_error():
    with pytest.raises(BackendUnavailableError) as caught:
        choose("cuda")
    assert caught.value.exit_code == 4


def test_an_unknown_backend_is_a_usage_error():
    with pytest.raises(UsageError, match="tpu"):
        choose("tpu")
