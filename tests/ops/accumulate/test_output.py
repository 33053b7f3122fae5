import math
from itertools import groupby

import numpy as np
import pytest
from buffers import f32, lay_out, refused
from support import build, encode, read, snapshot, write, write_index

from gradtool import BadInputError, NonFiniteError, UsageError, accumulate


def test_what_is_not_added_to_stays_byte_for_byte(tmp_path):
    payload = np.array([0x7FA0_1234, 0x3F80_0000], np.uint32).view(np.float32)
    tensors = {"z": f32(3), "ids": np.arange(5, dtype=np.int32), "a": f32(4), "odd": payload}
    path = write(tmp_path / "x", tensors, {"step": "7", "note": "é"}, padding=5)
    grads = [write(tmp_path / "g", {"a": f32(1), "z": f32(2), "extra": f32(1)})]
    result = accumulate(grads, into=path, missing="skip", exclude=["ids"])
    assert path.read_bytes() == build(tensors | {"z": f32(5), "a": f32(5)}, {"step": "7", "note": "é"}, padding=5)
    assert math.isnan(result.norm_after)
    assert result.nan == 1


def test_shards_that_nothing_is_added_to_are_not_touched(tmp_path):
    write_index(tmp_path / "buffer", {"1.safetensors": {"a": f32(1)}, "2.safetensors": {"b": f32(1)}})
    grad = write(tmp_path / "g", {"a": f32(1)})
    kept = snapshot(tmp_path)[tmp_path / "buffer" / "2.safetensors"]
    result = accumulate(grad, into=tmp_path / "buffer", missing="skip")
    assert (result.output.files_written, result.norm_after) == (1, math.sqrt(5))
    assert snapshot(tmp_path)[tmp_path / "buffer" / "2.safetensors"] == kept


def test_without_update_nothing_is_written_and_that_is_reported(tmp_path):
    path, grads = lay_out(tmp_path, f32(3, 4), f32(math.nan, 1))
    before = snapshot(tmp_path)
    result = accumulate(grads, into=path, update=False, per_gradient=True)
    assert snapshot(tmp_path) == before
    assert (result.updated, result.norm_before, result.norm_after) == (False, 5.0, 5.0)
    assert (result.taken, result.output.files_written, result.output.bytes_written) == (0, 0, 0)
    assert not result.per_gradient[0].taken
    path, grads = lay_out(tmp_path, f32(3, 4), {"b": f32(1)})
    assert len(refused(BadInputError, tmp_path, path, grads, update=False)) == 2


def test_dry_run_says_the_same_and_writes_nothing(tmp_path):
    path, grads = lay_out(tmp_path, encode([3, 4], "BF16"), f32(0.1, 0.2))
    before = snapshot(tmp_path)
    dry = accumulate(grads, into=path, max_norm=1, dry_run=True)
    assert snapshot(tmp_path) == before
    wet = accumulate(grads, into=path, max_norm=1)
    assert (dry.norm_before, dry.norm_after, dry.sum_norm, dry.coef, dry.clipped) == (
        wet.norm_before, wet.norm_after, wet.sum_norm, wet.coef, wet.clipped,
    )  # fmt: skip
    assert (dry.output.dry_run, dry.output.files_written, dry.output.bytes_written) == (True, 0, 0)


def test_output_leaves_the_buffer_alone(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), f32(2))
    before = snapshot(tmp_path)
    accumulate(grads, into=path, output=tmp_path / "out")
    assert read(tmp_path / "out")["a"].tolist() == [3]
    (tmp_path / "out").unlink()
    assert snapshot(tmp_path) == before
    for target in (path, grads[0]):
        refused(UsageError, tmp_path, path, grads, output=target)
    with pytest.raises(NonFiniteError):
        accumulate(grads, into=path, weight=[1e39], output=tmp_path / "out")
    assert snapshot(tmp_path) == before


def test_output_dir_takes_every_file_of_the_buffer_and_the_index_and_no_gradient(tmp_path):
    shards = {"1.safetensors": {"a": f32(1)}, "2.safetensors": {"ids": np.ones(3, np.int32)}}
    index = write_index(tmp_path / "in", shards)
    write(tmp_path / "g" / "3.safetensors", {"a": f32(2)})
    before = snapshot(tmp_path)
    result = accumulate(tmp_path / "g", into=index, exclude=["ids"], output_dir=tmp_path / "new" / "out")
    out = tmp_path / "new" / "out"
    assert sorted(path.name for path in out.iterdir()) == ["1.safetensors", "2.safetensors", index.name]
    assert read(out / "1.safetensors")["a"].tolist() == [3]
    assert (out / "2.safetensors").read_bytes() == (tmp_path / "in" / "2.safetensors").read_bytes()
    assert (out / index.name).read_bytes() == index.read_bytes()
    assert (result.output.files_written, result.norm_after) == (2, 3.0)
    assert {path: kept for path, kept in snapshot(tmp_path).items() if path in before} == before


def test_output_is_written_though_nothing_is_added(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), {"a": f32(2)})
    accumulate(grads, into=path, update=False, output=tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == path.read_bytes()
    before = snapshot(tmp_path)
    result = accumulate(grads, into=path, update=False, per_gradient=True)
    assert (result.updated, result.output.files_written, result.taken, result.norm_after) == (False, 0, 0, 1.0)
    assert snapshot(tmp_path) == before


def test_progress_only_grows_and_ends_with_all_bytes(tmp_path):
    path, grads = lay_out(tmp_path, np.ones((3, 70_000), np.float32), np.ones(70_000), np.ones((3, 1)))
    for options in ({}, {"max_norm": 1, "clip_each": 1}, {"output": tmp_path / "out"}):
        told = []
        accumulate(grads, into=path, progress=lambda *one, told=told: told.append(one), **options)
        for (title, _), of_pass in groupby(told, key=lambda one: (one[0], one[2])):
            done = [(now, whole) for _, now, whole in of_pass]
            assert done == sorted(done), title
            assert all(now <= whole for now, whole in done), title
            assert done[-1][0] == done[-1][1] > 0, title
        assert told[-1][0] == "adding"


def test_an_index_that_is_read_is_not_written_over(tmp_path):
    for name, file in (("buffer", "1.safetensors"), ("grad", "2.safetensors")):
        write_index(tmp_path / name, {file: {"a": f32(1)}})
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match="is an input"):
        accumulate(tmp_path / "grad", into=tmp_path / "buffer", output_dir=tmp_path / "grad")
    assert snapshot(tmp_path) == before


def test_progress_knows_from_the_first_what_is_copied(tmp_path):
    path, grads = lay_out(tmp_path, {"big": np.ones(3_000_000, np.float32), "s": f32(1)}, {"s": f32(2)})
    seen = []
    accumulate(grads, into=path, missing="skip", output=tmp_path / "out", progress=lambda *told: seen.append(told))
    assert all(whole >= path.stat().st_size for title, _, whole in seen if title == "adding")
    assert len(seen) > 3


def test_a_folder_that_was_made_in_vain_goes_again(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), f32(math.nan))
    assert refused(NonFiniteError, tmp_path, path, grads, output_dir=tmp_path / "new" / "sub")[0][0] == "nonfinite"
    assert not (tmp_path / "new").exists()
