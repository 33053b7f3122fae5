"""Every operation, on files, gives the same bytes and the same numbers on every backend."""

import contextlib
import gc
import os
import weakref

import numpy as np
import pytest
import support
from support import VALUE_TYPES, gaussian, snapshot, write, write_index

import gradtool
from gradtool import tuning
from gradtool.backends.choose import Choice
from gradtool.errors import DeviceMemoryError, SystemRefusedError
from gradtool.store.io import blocks
from gradtool.store.io.channel import Channel

TILE = 65_536


@pytest.fixture
def use(monkeypatch):
    """Have all operations use a backend."""

    def use(backend):
        monkeypatch.setattr("gradtool.engines.choose.choose_backend", lambda *_: Choice(backend, "for a test"))
        return backend

    return use


@pytest.fixture
def shim():
    """A new shim, for tests that watch it; limited as its options say."""

    def make(**options):
        try:
            return support.shim(**options)
        except ImportError as error:
            pytest.skip(str(error))

    return make


def grads(folder, seed=0):
    """Two shards with tensors of every type and of odd sizes, some larger than a tile."""
    sizes = [5, 70_001, 1, 2 * TILE, 0, 2049]
    # Every size in three types, and every type in three sizes.
    tensors = {f"t{i}": gaussian(sizes[(i + i // 6) % 6], VALUE_TYPES[i % 6], seed + i) for i in range(18)}
    names = list(tensors)
    return write_index(
        folder,
        {
            "a.safetensors": {name: tensors[name] for name in names[:7]},
            "b.safetensors": {name: tensors[name] for name in names[7:]},
        },
    )


def layers(folder, dtype="F32"):
    # Three groups of rows, of 238 each at most.
    shape = (700, 1100)
    return write(
        folder / "layers.safetensors",
        {
            "ln.X": gaussian(700 * 1100, dtype, 1).reshape(shape),
            "ln.Y_grad": gaussian(700 * 1100, dtype, 2).reshape(shape),
            "ln.scale": gaussian(1100, "F32", 3),
        },
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def told(result):
    """What a result says of the numbers in it."""
    facts = vars(result)
    told = ("norm", "max_abs", "nan", "inf", "zeros", "coef", "histogram", "subnormal", "saturated", "per_dtype")
    # Findings name their files.
    findings = {key: repr(facts[key]).replace("/expected/", "/found/") for key in facts if key == "per_finding"}
    return {key: facts[key] for key in facts if key.startswith(told)} | findings


CALLS = {
    "clip": lambda folder, **options: gradtool.clip(grads(folder / "g"), max_norm=1.0, **options),
    "clip by value": lambda folder, **options: gradtool.clip(grads(folder / "g"), max_value=0.25, **options),
    "clip by tensor": lambda folder, **options: gradtool.clip(
        grads(folder / "g"), max_norm=0.5, per_tensor=True, unscale=3.0, **options
    ),
    "norm 3": lambda folder, **options: gradtool.norm(grads(folder / "g"), norm_type=3.0, **options),
    "norm with a histogram": lambda folder, **options: gradtool.norm(grads(folder / "g"), histogram=True, **options),
    "accumulate": lambda folder, **options: gradtool.accumulate(
        [grads(folder / "h", 100), grads(folder / "i", 200)],
        into=grads(folder / "g"),
        into_weight=0.9,
        weight=[0.5, -1.5],
        mean=False,
        **options,
    ),
    "accumulate a clipped mean": lambda folder, **options: gradtool.accumulate(
        [grads(folder / "h", 100), grads(folder / "i", 200)],
        into=grads(folder / "g"),
        mean=True,
        max_norm=1.0,
        unscale=3.0,
        **options,
    ),
    "check": lambda folder, **options: gradtool.check(grads(folder / "g"), **options),
    "zero": lambda folder, **options: gradtool.zero(grads(folder / "g"), include=["t1"], **options),
    "layernorm": lambda folder, **options: gradtool.layernorm_backward(layers(folder), **options),
    "layernorm without weights": lambda folder, **options: gradtool.layernorm_backward(
        layers(folder), affine=False, **options
    ),
    "rmsnorm": lambda folder, **options: gradtool.layernorm_backward(layers(folder, "BF16"), kind="rmsnorm", **options),
}


@pytest.mark.parametrize("call", CALLS)
def test_files_and_numbers_are_those_of_the_reference(tmp_path, use, backend, call):
    use(support.NumpyBackend())
    expected = CALLS[call](tmp_path / "expected", threads=1)
    use(backend)
    result = CALLS[call](tmp_path / "found", threads=3)
    assert contents(tmp_path / "found") == contents(tmp_path / "expected")
    norms, truth = told(result), told(expected)
    if call == "norm 3":
        assert norms.pop("norm") == pytest.approx(truth.pop("norm"), rel=1e-12)
    assert norms == truth
    assert getattr(result, "call", result).backend == backend.name


def test_wide_rows_give_the_same_bytes_on_every_backend(tmp_path, use, backend):
    rows, columns = 3, (1 << 18) + 5
    files = [
        write(
            tmp_path / name / "wide.safetensors",
            {
                "ln.X": gaussian(rows * columns, "BF16", 1).reshape(rows, columns),
                "ln.Y_grad": gaussian(rows * columns, "BF16", 2).reshape(rows, columns),
                "ln.scale": gaussian(columns, "F32", 3),
            },
        )
        for name in ("expected", "found")
    ]
    for one, path in zip((support.NumpyBackend(), backend), files, strict=True):
        use(one)
        gradtool.layernorm_backward(path)
    assert files[1].read_bytes() == files[0].read_bytes()


def test_what_stays_on_the_gpu_is_read_once(tmp_path, use, shim):
    use(shim())
    path = grads(tmp_path)
    result = gradtool.clip(path, max_norm=1.0)
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    assert result.call.timings.read_bytes == sum(file.stat().st_size for file in files)
    use(shim(limit=4 << 30))
    grads(tmp_path)
    result = gradtool.clip(path, max_norm=1.0)
    assert result.call.timings.read_bytes > result.call.bytes + sum(file.stat().st_size for file in files) // 2


def test_a_file_that_changes_between_the_passes_is_found_out_though_nothing_is_read_again(tmp_path, use, shim):
    use(shim())
    path = grads(tmp_path)

    def change(title, done, whole):
        if title == "measuring" and done == whole:
            os.utime(tmp_path / "b.safetensors", ns=(0, 0))

    for dry_run in (True, False):
        grads(tmp_path)
        with pytest.raises(SystemRefusedError, match="was changed by another program"):
            gradtool.clip(path, max_norm=1.0, dry_run=dry_run, progress=change)


def test_progress_ends_at_the_whole_though_less_is_read(tmp_path, use, shim):
    use(shim())
    seen = []
    gradtool.clip(grads(tmp_path), max_norm=1.0, progress=lambda *now: seen.append(now))
    assert [one[0] for one in seen] == sorted((one[0] for one in seen), reverse=True)
    assert seen[-1][1] == seen[-1][2]


def test_a_block_on_the_gpu_is_not_left_there(tmp_path, use, shim):
    backend = use(shim())
    for max_norm in (1.0, 1e9):
        gradtool.clip(grads(tmp_path), max_norm=max_norm)
    gradtool.layernorm_backward(layers(tmp_path))
    assert backend.device.allocated == 0


@pytest.mark.parametrize("call", CALLS)
def test_a_call_leaves_its_backend_free_to_go(tmp_path, monkeypatch, call):
    """The memory of a GPU goes with it, and must not wait for Python to look for cycles."""
    only = [support.NumpyBackend()]
    gone = weakref.ref(only[0])
    monkeypatch.setattr("gradtool.engines.choose.choose_backend", lambda *_: Choice(only.pop(), "for a test"))
    gc.disable()
    try:
        CALLS[call](tmp_path)
        assert gone() is None
    finally:
        gc.enable()


# Room for a tile, or for a group of rows, and what its work takes beside it, but not for all of a file.
SCARCE = {
    "clip": 700_000,
    "clip by value": 700_000,
    "clip by tensor": 700_000,
    "norm 3": 700_000,
    "check": 700_000,
    "accumulate": 2_500_000,
    "accumulate a clipped mean": 2_500_000,
    "layernorm": 5_000_000,
    "rmsnorm": 2_500_000,
}


@pytest.mark.parametrize("call", SCARCE)
def test_full_memory_is_met_by_smaller_blocks(tmp_path, use, shim, call):
    use(support.NumpyBackend())
    expected = CALLS[call](tmp_path / "expected")
    backend = use(shim(limit=SCARCE[call]))
    found = CALLS[call](tmp_path / "found", threads=1)
    if call == "check":
        assert told(found) == told(expected)
    elif not call.startswith("norm"):
        assert found.output.bytes_written == expected.output.bytes_written
    assert contents(tmp_path / "found") == contents(tmp_path / "expected")
    assert backend.device.refused


@pytest.mark.parametrize("call", CALLS)
def test_a_task_uses_no_memory_that_it_does_not_own(tmp_path, use, monkeypatch, backend, call):
    use(support.NumpyBackend())
    expected = CALLS[call](tmp_path / "expected", threads=1)
    owned = Channel.memory

    @contextlib.contextmanager
    def memory(channel, nbytes):
        with owned(channel, nbytes) as view:
            view[:] = b"\xa5" * nbytes
            yield view
            view[:] = b"\x5a" * nbytes

    monkeypatch.setattr(Channel, "memory", memory)
    use(backend)
    found = CALLS[call](tmp_path / "found", threads=3)
    if call not in ("norm 3", "check"):
        assert told(found) == told(expected)
    assert contents(tmp_path / "found") == contents(tmp_path / "expected")


@pytest.mark.parametrize("call", SCARCE)
def test_memory_that_is_too_small_for_a_tile_is_an_error_and_changes_nothing(tmp_path, use, shim, call):
    use(support.NumpyBackend())
    CALLS[call](tmp_path / "untouched", **({} if call.startswith(("norm", "check")) else {"dry_run": True}))
    use(shim(limit=1000))
    with pytest.raises(DeviceMemoryError) as caught:
        CALLS[call](tmp_path / "found")
    assert caught.value.exit_code == 5
    assert contents(tmp_path / "found") == contents(tmp_path / "untouched")
    assert not [path for path in (tmp_path / "found").rglob("*") if path.name.startswith(".gradtool")]


def test_an_error_of_the_gpu_leaves_the_files_as_they_were(tmp_path, use, shim, monkeypatch):
    backend = use(shim())
    path = grads(tmp_path)
    before = snapshot(tmp_path)

    def fails(*_arguments, **_options):
        raise DeviceMemoryError("full")

    monkeypatch.setattr(backend, "scale", fails)
    with pytest.raises(DeviceMemoryError):
        gradtool.clip(path, max_norm=1.0)
    assert snapshot(tmp_path) == before


def test_many_small_tensors_are_a_few_launches(tmp_path, use, shim, monkeypatch):
    # So many tensors are in a block at most; each is measured, and then scaled.
    monkeypatch.setattr(tuning, "BLOCK_SPANS", 400)
    backend = use(shim())
    path = write(tmp_path / "x.safetensors", {f"t{i}": gaussian(37, "BF16", i) for i in range(500)})
    gradtool.clip(path, max_norm=1.0)
    assert len(backend.device.launches) == 4
    assert sum(blocks_ for _, _, blocks_ in backend.device.launches) == 1000


@pytest.mark.parametrize("unit", [8, 64])
def test_blocks_are_halved_between_tensors_and_at_tiles(tmp_path, unit):
    arrays = {f"t{i}": np.zeros(n, np.float32) for i, n in enumerate([100, 3, 64, 7])}
    shard = blocks_of(write(tmp_path / "x.safetensors", arrays))
    (whole,) = blocks.plan(shard, enumerate(shard.tensors), unit, tuning.BLOCK_BYTES)
    pending, smallest = [whole], []
    while pending:
        block = pending.pop()
        halves = blocks.halved(block, unit)
        if halves:
            assert [halves[0].begin, halves[0].end, halves[1].end] == [block.begin, halves[1].begin, block.end]
            pending += halves
        else:
            smallest.append(block)
    done = sorted((span.tensor, span.start, span.elements) for block in smallest for span in block.spans)
    assert [(tensor, start, min(unit, [100, 3, 64, 7][tensor] - start)) for tensor, start, _ in done] == done
    assert sum(elements for _, _, elements in done) == 174
    for block in smallest:
        (span,) = block.spans
        assert block.begin + span.offset == shard.tensors[span.tensor].begin + 4 * span.start


def blocks_of(path):
    from gradtool.store.format.header import read_shard

    return read_shard(path)
