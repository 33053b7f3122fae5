"""What a user who may only read is told of the files of another one."""

import math

import pytest
from neighbours import crash, folder_of, several
from support import encode, snapshot, write
from users import ALICE, MALLORY, run_as


def test_a_file_that_may_not_be_read_has_exit_code_5_and_does_not_hide_other_problems(root):
    folder = folder_of(ALICE, root / "folder", 0o755)
    several(ALICE, folder)
    (folder / "0.safetensors").chmod(0)
    write(folder / "x.safetensors", {"a": encode([math.nan], "F32")})
    answer = run_as(MALLORY, "check", folder)
    assert answer.code == 5
    assert "0.safetensors: Permission denied: cannot read this file" in answer.err
    assert "x.safetensors: tensor 'a': 1 NaN" in answer.err


@pytest.mark.parametrize("way", ["replace", "inplace"])
def test_another_user_may_check_a_folder_that_is_only_readable_and_see_what_a_crash_left(root, way):
    folder = folder_of(ALICE, root / "folder", 0o755)
    several(ALICE, folder)
    assert run_as(MALLORY, "check", folder).code == 0
    crash(folder, way)
    before = snapshot(folder)
    answer = run_as(MALLORY, "check", folder)
    assert answer.code == 1, answer
    assert f"has crashed and left files half changed\n  hint: run gradtool recover {folder}" in answer.err
    assert snapshot(folder) == before
    assert run_as(ALICE, "recover", folder).code == 0
    answer = run_as(MALLORY, "check", folder)
    assert answer.code == 0
    assert "crashed" not in answer.err
