"""New names by --map; what they match is tested where they are used."""

import numpy as np
import pytest
from support import write

from gradtool import BadInputError
from gradtool.store.format.gradset import open_sets
from gradtool.store.format.selection import Renames

ONES = np.ones(2, np.float32)


def renamed(path, *rules):
    (one,) = Renames.parse(rules, slice(None)).applied(open_sets([path]))
    return [tensor.name for shard in one.shards for tensor in shard.tensors]


@pytest.mark.parametrize(
    ("rule", "code", "why"),
    [
        ("^a$=__metadata__", "input", "map makes the new name '__metadata__', which the format reserves"),
        ("^a$=" + "n" * 4097, "limit", "exceeds the limit of 4,096 characters (it has 4,097)"),
        ("^a$=b", "duplicate-name", "map gives the name 'b' to it and to 'b'"),
    ],
)
def test_a_name_that_no_tensor_can_have_is_refused(tmp_path, rule, code, why):
    path = write(tmp_path / "x", {"b": ONES, "a": ONES})
    with pytest.raises(BadInputError) as caught:
        renamed(path, rule)
    (problem,) = caught.value.problems
    assert (problem.code, problem.file) == (code, str(path))
    assert problem.tensor in ("a", "b")
    assert why in problem.message


def test_only_the_last_new_name_of_a_tensor_counts(tmp_path):
    path = write(tmp_path / "x", {"b": ONES, "a": ONES})
    assert sorted(renamed(path, "^a$=__metadata__", "^__metadata__$=" + "n" * 4096)) == ["b", "n" * 4096]
