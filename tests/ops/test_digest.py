"""`digest` against the definition in docs/numerics.md, on bytes that a naive reader has read."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support import SAMPLES, write

from gradtool import digest

PAGE = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
DEFINITION = {}
exec(re.search(r"## Digests\n.*?```python\n(.*?)```", PAGE, re.DOTALL)[1], DEFINITION)  # noqa: S102 - our own page


def truth(*paths):
    """The digests of tensors, and that of the set, by the definition."""
    digests = {}
    for path in paths:
        data = Path(path).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                content = data[start + begin : start + end]
                digests[name] = DEFINITION["tensor_digest"](entry["dtype"], entry["shape"], content)
    return {name: value.hex() for name, value in digests.items()}, DEFINITION["set_digest"](digests).hex()


def digests_of(result):
    return {row.name: row.digest for row in result.per_tensor}, result.digest


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_digests_are_as_defined(tmp_path, threads):
    sizes = [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5 * (1 << 20) + 3]
    rng = np.random.default_rng(0)
    tensors = {f"t{size}": rng.integers(0, 256, size, np.uint8) for size in sizes}
    path = write(tmp_path / "x", tensors | {"s": np.array(7.0), "e": np.zeros((3, 0, 2), np.float32)})
    assert digests_of(digest(path, threads=threads)) == truth(path)


def test_digests_of_a_sharded_set():
    assert digests_of(digest(SAMPLES / "sharded")) == truth(*sorted((SAMPLES / "sharded").glob("*.safetensors")))
