"""`--write inplace`: the same bytes as by replacement, through the same inodes, and back where it fails."""

import os
import shutil
import subprocess

import numpy as np
import pytest
from support import COMMAND, VALUE_TYPES, encode, gaussian, gradtool_json, read, snapshot, write, write_index
from tiers import EXHAUSTIVE

from gradtool import (
    BadInputError,
    NonFiniteError,
    SystemRefusedError,
    UsageError,
    accumulate,
    clip,
    layernorm_backward,
    norm,
    zero,
)


def both(tmp_path, **files):
    """The same files twice: to be replaced, and to be changed in place."""
    for file, tensors in files.items():
        write(tmp_path / "replaced" / f"{file}.safetensors", tensors)
    shutil.copytree(tmp_path / "replaced", tmp_path / "changed")
    return tmp_path / "replaced", tmp_path / "changed"


def content_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def check_alike(folders, operation, **options):
    """What both ways come to; that they come to the same, and the files in place are still the same files."""
    inodes = {path.name: path.stat().st_ino for path in folders[1].iterdir()}
    replaced = operation(folders[0], write="replace", **options)
    changed = operation(folders[1], write="inplace", **options)
    assert content_of(folders[0]) == content_of(folders[1])
    assert {path.name: path.stat().st_ino for path in folders[1].iterdir()} == inodes
    for fact in ("norm", "norm_before", "norm_after", "coef", "max_abs", "zeros", "nan", "inf", "files_written"):
        assert getattr(changed, fact, None) == getattr(replaced, fact, None), fact
    return changed


@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_clipping_in_place_gives_the_bytes_of_replacing(tmp_path, dtype, fsync):
    tensors = {f"t{k}": gaussian(size, dtype, seed=k) for k, size in enumerate((300_000, 7, 70_001))}
    folders = both(tmp_path, a=tensors, b={"other": gaussian(100_000, dtype)})
    result = check_alike(folders, clip, max_norm=1e-3, fsync=fsync)
    assert result.output.bytes_written == result.call.bytes
    assert result.norm_after == norm(folders[1]).norm


def test_only_what_is_selected_is_written(tmp_path):
    tensors = {f"t{k}": gaussian(3_000, "F32", seed=k) for k in range(9)}
    folders = both(tmp_path, a=tensors)
    result = check_alike(folders, clip, max_norm=1e-3, include=["[048]$"])
    assert result.output.bytes_written == 3 * 12_000


@pytest.mark.parametrize(
    "options",
    [
        {"max_value": 0.5},
        {"max_norm": 1e-3, "per_tensor": True},
        {"max_norm": 1.0, "unscale": 8.0},
        {"group": ["large:1e-3"]},
    ],
)
def test_every_way_of_clipping_can_be_done_in_place(tmp_path, options):
    tensors = {"small": gaussian(900, "F16") / 1000, "large": gaussian(90_000, "F16")}
    check_alike(both(tmp_path, a=tensors), clip, **options)


def test_a_norm_that_must_be_measured_again_is_that_of_what_was_written(tmp_path):
    folders = both(tmp_path, a={"t": np.array([3e200, 4e200, -1e-200])})
    result = check_alike(folders, clip, max_norm=1e190)
    assert result.norm_after == norm(folders[1]).norm == pytest.approx(1e190)
    # And where it is the norm before that must be: the old content is gone then.
    other = write(tmp_path / "other", {"t": np.array([1e200, 0.0, 0.0])})
    result = check_alike(folders, lambda folder, **options: accumulate(other, into=folder, **options))
    assert result.norm_before == pytest.approx(1e190)


def test_what_is_not_clipped_is_not_touched(tmp_path):
    write(tmp_path / "a.safetensors", {"t": np.ones(9, np.float32)})
    before = snapshot(tmp_path)
    assert clip(tmp_path, max_norm=100, write="inplace").output.files_written == 0
    assert clip(tmp_path, max_norm=1, write="inplace", dry_run=True).clipped
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "options", [{}, {"overwrite": True}, {"max_norm": 0.5, "into_weight": 0.9}, {"mean": True, "norm_type": 3.0}]
)
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F64"])
def test_adding_in_place_gives_the_bytes_of_replacing(tmp_path, dtype, options):
    sizes = {"a": 200_000, "b": 5, "c": 70_000}
    folders = both(tmp_path, x={name: gaussian(size, dtype, seed=size) for name, size in sizes.items()})
    grads = [
        write(tmp_path / f"g{k}", {name: gaussian(size, "BF16", seed=k) for name, size in sizes.items() if name != "b"})
        for k in range(2)
    ]
    check_alike(folders, lambda folder, **how: accumulate(grads, into=folder, missing="skip", **options, **how))


def test_zeros_are_written_in_place(tmp_path):
    tensors = {"a": gaussian(700_000, "F32"), "kept": gaussian(10, "F64"), "b": np.arange(9, dtype=np.int32)}
    folders = both(tmp_path, x=tensors)
    result = check_alike(folders, zero, exclude=["kept"])
    assert result.output.bytes_written == 2_800_036


def layers(folder, rows=6, **more):
    names = {"Y_grad": (rows, 40), "X": (rows, 40), "scale": (40,)} | more
    rng = np.random.default_rng(1)
    return write(folder / "x.safetensors", {name: rng.standard_normal(shape) for name, shape in names.items()})


def test_gradients_of_layers_that_have_a_place_are_written_in_place(tmp_path):
    path = layers(tmp_path, X_grad=(6, 40), scale_grad=(40,), bias_grad=(40,))
    (tmp_path / "replaced").mkdir()
    copy = shutil.copy(path, tmp_path / "replaced" / "x.safetensors")
    inode = path.stat().st_ino
    assert layernorm_backward(path, write="inplace").output.bytes_written == 8 * (240 + 40 + 40)
    layernorm_backward(copy)
    assert path.read_bytes() == (tmp_path / "replaced" / "x.safetensors").read_bytes()
    assert path.stat().st_ino == inode
    # What was read is read again: nothing of it was overwritten.
    layernorm_backward(path, write="inplace")
    assert path.read_bytes() == (tmp_path / "replaced" / "x.safetensors").read_bytes()


def test_gradients_of_layers_that_have_no_place_yet_are_refused(tmp_path):
    path = layers(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(BadInputError, match="is not in the file yet, and cannot be added in place"):
        layernorm_backward(path, write="inplace")
    with pytest.raises(BadInputError, match='leave out write="inplace" the first time'):
        layernorm_backward(path, write="inplace", x_grad_in_place=True)
    assert snapshot(tmp_path) == before


def test_an_input_of_a_layer_is_not_overwritten_while_it_is_read(tmp_path):
    path = layers(tmp_path, X_grad=(6, 40), scale_grad=(40,), bias_grad=(40,))
    before = snapshot(tmp_path)
    with pytest.raises(BadInputError, match="is an input, and would be overwritten"):
        layernorm_backward(path, write="inplace", y_grad="X_grad")
    assert snapshot(tmp_path) == before


def test_second_names_and_links_stay(tmp_path):
    path = write(tmp_path / "a.safetensors", {"t": np.ones(9, np.float32)})
    os.link(path, tmp_path / "hard.safetensors")
    (tmp_path / "link.safetensors").symlink_to("a.safetensors")
    clip(tmp_path / "link.safetensors", max_norm=1, write="inplace")
    assert (tmp_path / "link.safetensors").is_symlink()
    assert (tmp_path / "hard.safetensors").read_bytes() == path.read_bytes()
    assert norm(tmp_path / "hard.safetensors").norm == pytest.approx(1)


def check_undone(folder, operation, error, match=None):
    before = content_of(folder)
    with pytest.raises(error, match=match) as caught:
        operation()
    assert content_of(folder) == before
    return caught.value


def test_a_result_beyond_its_type_is_put_back(tmp_path):
    tensors = {"a": gaussian(300_000, "F32"), "b": encode([6e4, 1.0], "F16")}
    folder = write(tmp_path / "x" / "a.safetensors", tensors).parent
    error = check_undone(
        folder,
        lambda: clip(folder, max_norm=1e30, unscale=0.01, write="inplace"),
        NonFiniteError,
        "results overflow their type",
    )
    assert error.__notes__ == ["no file was changed"]


@pytest.mark.parametrize("where", ["buffer", "gradient"])
def test_what_is_not_finite_is_put_back_and_named_where_it_was(tmp_path, where):
    finite = {"a": np.ones(100_000, np.float32), "b": np.ones(2, np.float32)}
    nan = finite | {"b": np.array([1.0, np.nan], np.float32)}
    paths = {name: write(tmp_path / name / "x", nan if name == where else finite) for name in ("buffer", "gradient")}
    error = check_undone(
        tmp_path / "buffer",
        lambda: accumulate(paths["gradient"], into=paths["buffer"], write="inplace"),
        NonFiniteError,
        "input contains NaN or Inf",
    )
    assert [(one.file, one.tensor) for one in error.problems] == [(str(paths[where]), "b")]


def test_a_sum_beyond_its_type_is_put_back_and_is_no_fault_of_the_buffer(tmp_path):
    path = write(tmp_path / "x" / "buffer", {"a": encode([6e4, 1.0], "F16")})
    gradient = write(tmp_path / "gradient", {"a": encode([6e4, 1.0], "F16")})
    error = check_undone(
        path.parent,
        lambda: accumulate(gradient, into=path, write="inplace"),
        NonFiniteError,
        "sums overflow their type",
    )
    assert [one.code for one in error.problems] == ["overflow"]


def test_an_interruption_puts_everything_back(tmp_path):
    folder = write(tmp_path / "x" / "a.safetensors", {"a": gaussian(3_000_000, "F32")}).parent

    def interrupt(title, done, whole):
        if title == "clipping" and done > whole * 0.6:
            raise KeyboardInterrupt

    check_undone(folder, lambda: clip(folder, max_norm=1, write="inplace", progress=interrupt), KeyboardInterrupt)


def test_a_disk_without_room_for_a_redo_log_is_known_before_work_starts(tmp_path, monkeypatch):
    folder = write(tmp_path / "x" / "a.safetensors", {"a": gaussian(3_000, "F32")}).parent
    disk = os.statvfs(folder)
    fields = [1, 1, *disk[2:4], 12_239, *disk[5:]]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    check_undone(
        folder,
        lambda: clip(folder, max_norm=1e-3, write="inplace"),
        SystemRefusedError,
        "writing in place needs 12,240 bytes here for a redo log and filled holes, 12,239 are free",
    )


def test_a_sparse_file_is_refused_where_its_holes_cannot_be_filled(tmp_path, monkeypatch):
    path = tmp_path / "x" / "sparse.safetensors"
    write(path, {"a": np.zeros(3_000_000, np.float32)})
    header = path.stat().st_size - 12_000_000
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(header)
        file.truncate(header + 12_000_000)
    assert path.read_bytes() == content
    if path.stat().st_blocks * 512 >= 12_000_000:
        pytest.skip("this file system has no holes")
    disk = os.statvfs(tmp_path)
    # Enough for the redo log, and not for the holes as well.
    fields = [1, 1, *disk[2:4], 13_000_000, *disk[5:]]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    gradient = write(tmp_path / "gradient", {"a": np.ones(3_000_000, np.float32)})
    check_undone(
        path.parent,
        lambda: accumulate(gradient, into=path, write="inplace"),
        SystemRefusedError,
        "for a redo log and filled holes",
    )


# As the shell's ulimit: of kibibytes in a file, or of open files.
@pytest.mark.parametrize("limit", ["-f 100", "-f 300", "-f 1100", "-f 1200", "-n 40"])
@pytest.mark.parametrize("overflows", [False, pytest.param(True, marks=EXHAUSTIVE)])
def test_a_limit_on_files_leaves_all_old_or_all_new_and_nothing_else(tmp_path, limit, overflows):
    for number in range(60):
        values = np.full(600_000 if number == 30 and limit[1] == "f" else 900, 6e4, np.float16)
        write(tmp_path / "buffer" / f"{number:02}.safetensors", {f"t{number:02}": values})
        write(tmp_path / "gradient" / f"{number:02}.safetensors", {f"t{number:02}": -values / 2})
    if overflows:
        write(tmp_path / "gradient" / "59.safetensors", {"t59": np.full(900, 6e4, np.float16)})
    old = content_of(tmp_path / "buffer")
    command = f'ulimit {limit}; exec "$@"'
    arguments = [
        *COMMAND,
        "accumulate",
        tmp_path / "gradient",
        "--into",
        tmp_path / "buffer",
        "--write",
        "inplace",
        "--quiet",
    ]
    done = subprocess.run(["bash", "-c", command, "-", *arguments], capture_output=True, text=True, check=False)
    now = content_of(tmp_path / "buffer")
    assert now.keys() == old.keys(), done.stderr
    assert (now == old) == (done.returncode != 0), done.stderr
    assert done.returncode in ((1, 5) if overflows else (0, 5)), done.stderr
    assert done.returncode != 5 or "ulimit -f" in done.stderr


@pytest.mark.parametrize("option", ["output", "output_dir"])
def test_there_must_be_something_to_change(tmp_path, option):
    path = write(tmp_path / "a.safetensors", {"a": np.ones(3, np.float32)})
    for call in (accumulate, lambda path, **options: clip(path, max_norm=1, **options)):
        with pytest.raises(UsageError, match='write="inplace" cannot be combined with output or output_dir'):
            call(path, write="inplace", **{option: tmp_path / "out"})
    with pytest.raises(UsageError, match="write must be one of replace, inplace"):
        clip(path, max_norm=1, write="over")


def test_a_file_that_another_program_changes_before_is_left_alone(tmp_path):
    path = write(tmp_path / "a.safetensors", {"a": gaussian(2_000_000, "F32")})
    before = path.read_bytes()

    def change(title, done, whole):
        # When all is measured, and nothing is written yet.
        if title == "measuring" and done == whole:
            os.utime(path, ns=(0, 0))

    with pytest.raises(SystemRefusedError, match="changed by another program"):
        clip(path, max_norm=1, write="inplace", progress=change, threads=1)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_set_with_an_index_is_changed_in_place(tmp_path):
    write_index(tmp_path, {"a.safetensors": {"a": gaussian(100, "F32")}, "b.safetensors": {"b": gaussian(9, "BF16")}})
    inodes = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    answer = gradtool_json("clip", tmp_path, "--max-norm", "1e-3", "--write", "inplace")
    assert answer["data"]["files_written"] == 2
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == inodes
    assert np.abs(read(tmp_path / "a.safetensors")["a"]).max() <= 1e-3


def test_a_file_that_takes_the_place_of_one_that_is_changed_is_left_alone(tmp_path):
    first, second = (write(tmp_path / f"{i}.safetensors", {f"t{i}": gaussian(2_000_000, "F32")}) for i in range(2))
    old, theirs = first.read_bytes(), tmp_path / "theirs"
    theirs.write_bytes(b"something else altogether")

    def replace(title, done, whole):
        if title == "clipping" and done > whole * 0.2 and theirs.exists():
            theirs.replace(second)

    with pytest.raises(SystemRefusedError, match="changed by another program"):
        clip([first, second], max_norm=1, write="inplace", progress=replace, threads=1)
    assert first.read_bytes() == old
    assert second.read_bytes() == b"something else altogether"
    assert sorted(tmp_path.iterdir()) == [first, second]
