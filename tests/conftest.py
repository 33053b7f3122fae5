import pytest
import support
from hypothesis import settings

# The same examples every time: no test may depend on luck.
settings.register_profile("gradtool", derandomize=True, deadline=None)
settings.load_profile("gradtool")

_BACKENDS = support.backends()


@pytest.fixture(params=[backend for _, backend in _BACKENDS], ids=[name for name, _ in _BACKENDS])
def backend(request):
    """Each backend of this build in turn: the conformance tests run on all of them."""
    return request.param
