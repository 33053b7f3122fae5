import os
import shutil
import tempfile
from pathlib import Path

import pytest
from crashes import FAST


@pytest.fixture
def root():
    """A folder that everybody can pass through, of which only root can change the names."""
    if os.geteuid() != 0:
        pytest.skip("only root can be two other users")
    path = Path(tempfile.mkdtemp(prefix="gradtool-users-", dir=FAST))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
