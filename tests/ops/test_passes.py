"""Measurements of tensors, in parts and in groups; and which blocks passes are about."""

import math
import threading
from array import array
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import encode, gaussian, write

from gradtool import tuning
from gradtool.backends.cpu import NumpyBackend
from gradtool.backends.values import BlockSums, NormSpec, Piece, Tolerance
from gradtool.engines.cluster.wire import packed, unpacked
from gradtool.engines.passes import by_shard
from gradtool.ops.diff.comparison import Compare
from gradtool.ops.histogram import CountExponents
from gradtool.ops.passes import Measure, Measurement, pieces_of
from gradtool.reduction import TILE
from gradtool.store.format.gradset import Selected
from gradtool.store.format.header import read_shard
from gradtool.store.format.tensors import Tensor
from gradtool.store.io.blocks import Block, Span, plan
from gradtool.store.io.destination import DISCARD, NewFile, Overwritten
from gradtool.store.transaction.inputs import Inputs

FIELDS = ("max_abs", "nan", "inf", "zeros", "first_nonfinite")


def tensors():
    odd = gaussian(200_000, "F32")
    odd[[70_000, 70_001, 199_999]] = np.nan, np.inf, -np.inf
    odd[:3] = 0
    return {
        "usual": gaussian(3, "F32"),
        "odd": odd,
        "huge": gaussian(140_000, "F64") * 1e250,
        "none": encode([], "BF16"),
        "tiny": gaussian(70_000, "F64") * 1e-250,
    }


@pytest.fixture(scope="module")
def selected(tmp_path_factory):
    shard = read_shard(write(tmp_path_factory.mktemp("measured") / "x", tensors()))
    return [Selected(shard, tensor) for tensor in shard.tensors]


def blocks_of(selected):
    for shard, wanted in by_shard(selected).items():
        for block in plan(shard, wanted, TILE, 600_000):
            yield block, memoryview(bytearray(Path(shard.name).read_bytes()[block.begin : block.end]))


def measured(selected, spec, blocks):
    measurement = Measurement(selected, spec)
    for block, data in blocks:
        measurement.add(block, NumpyBackend().tile_sums(data, pieces_of(block), spec))
    return measurement


def fields(measurement):
    """All that it has; its sums, which may come in any order, condensed."""
    measurement.tile_sums[0].condense()
    sums = [getattr(measurement.tile_sums[0], name).tobytes() for name in ("numbers", "sums", "exponents")]
    return sums + [getattr(measurement, name).tobytes() for name in FIELDS]


SPECS = [NormSpec(), NormSpec(drop_nonfinite=True), NormSpec(1.0), NormSpec(3.0), NormSpec(float("inf"))]


@settings(max_examples=25)
@given(spec=st.sampled_from(SPECS), numbers=st.permutations(range(5)), at=st.integers(0, 5))
def test_measurements_of_some_tensors_each_are_put_together(selected, spec, numbers, at):
    whole, together = measured(selected, spec, blocks_of(selected)), Measurement(selected, spec)
    for group in (numbers[:at], numbers[at:]):
        part = whole.part(group)
        # As it comes from another process.
        empty = Measurement([selected[number] for number in group], spec)
        sent = unpacked(packed(part.compact()), empty)
        together.merge_part([(number, 0) for number in group], sent)
    assert whole.first_nonfinite.tolist() == together.first_nonfinite.tolist() == [-1, 70_000, -1, -1, -1]
    assert repr(together.norms(per_tensor=True)) == repr(whole.norms(per_tensor=True))
    assert [counts.tolist() for counts in (together.nan, together.zeros)] == [
        counts.tolist() for counts in (whole.nan, whole.zeros)
    ]
    assert any(whole.tile_sums[0].exponents) == (1 < spec.order <= 3)


def test_a_measurement_that_was_sent_can_be_filled_on(selected):
    blocks = list(blocks_of(selected))
    half = unpacked(packed(measured(selected, NormSpec(), blocks[:3])), Measurement(selected, NormSpec()))
    for block, data in blocks[3:]:
        half.add(block, NumpyBackend().tile_sums(data, pieces_of(block), NormSpec()))
    assert fields(half) == fields(measured(selected, NormSpec(), blocks))


def test_threads_may_add_at_the_same_time(selected):
    blocks, total = list(blocks_of(selected)), Measurement(selected, NormSpec())

    def work(number):
        for block, data in blocks[number::8]:
            total.add(block, NumpyBackend().tile_sums(data, pieces_of(block), NormSpec()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fields(total) == fields(measured(selected, NormSpec(), blocks))


def test_a_part_has_the_norms_of_its_tensors_and_updates_them(selected):
    whole = measured(selected, NormSpec(), blocks_of(selected))
    norms, before = whole.norms(per_tensor=True).tensors, fields(whole)

    for numbers in ([1], [2, 4], [0, 3]):
        others = [number for number in range(5) if number not in numbers]
        assert repr(whole.part(numbers).norms(per_tensor=True).tensors) == repr([norms[number] for number in numbers])
        again = (
            Measurement(selected, NormSpec()).updated(numbers, whole.part(numbers)).updated(others, whole.part(others))
        )
        assert fields(again) == before
    assert fields(whole) == before


def test_each_tensor_has_its_own_norm_and_the_loss_scale_divides_all(selected):
    whole = measured(selected, NormSpec(drop_nonfinite=True), blocks_of(selected))
    usual, scaled = whole.norms(per_tensor=True), whole.norms(per_tensor=True, unscale=2.0**40)
    assert [norm * 2.0**40 for norm in scaled.tensors] == usual.tensors
    assert scaled.whole * 2.0**40 == usual.whole == usual.tensors[2]
    assert usual.tensors[3] == 0 < usual.tensors[4] < 1e-240
    assert whole.norms() == (usual.whole, [], [])


def test_each_group_has_the_norm_of_its_tensors_as_one_vector(selected):
    whole = measured(selected, NormSpec(drop_nonfinite=True), blocks_of(selected))
    numbers = [[4, 0], [3], list(range(len(selected)))]
    alone = [whole.part(group).norms().whole for group in numbers]
    assert whole.norms(groups=numbers).groups == alone
    assert alone[-1] == whole.norms().whole


@pytest.mark.parametrize("order", [1.0, 2.0, np.inf])
def test_measurements_of_stretches_are_merged_into_their_tensors(selected, order):
    spec = NormSpec(order)
    whole = measured(selected, spec, blocks_of(selected))
    total = Measurement(selected, spec)
    for block, data in blocks_of(selected):
        places = [(span.tensor, span.start) for span in block.spans]
        stretches = [Selected(block.shard, Tensor("", span.dtype, (span.elements,), 0, 0)) for span in block.spans]
        spans = [span._replace(tensor=number, start=0) for number, span in enumerate(block.spans)]
        part = measured(stretches, spec, [(block._replace(spans=spans), data)])
        total.merge_part(places, unpacked(packed(part.compact()), Measurement(stretches, spec)))
    assert repr(total.norms(per_tensor=True)) == repr(whole.norms(per_tensor=True))
    for fact in FIELDS:
        assert getattr(total, fact).tobytes() == getattr(whole, fact).tobytes()


def test_a_measurement_of_other_tensors_is_not_merged(selected):
    total, spec = Measurement(selected, NormSpec()), NormSpec()
    for other, places in [
        (Measurement(selected, NormSpec(1.0)), [(number, 0) for number in range(len(selected))]),
        (Measurement(selected[:1], spec), []),
        ("a measurement", [(0, 0)]),
    ]:
        with pytest.raises(ValueError, match="a tally of"):
            total.merge_part(places, other)


@pytest.mark.parametrize("order", [1.0, 2.0, np.inf])
def test_what_is_stored_does_not_grow_with_the_tensors(tmp_path, order):
    """As of a tensor of 2 TiB, whose blocks come in any order."""
    shard = read_shard(write(tmp_path / "x", {"a": encode([], "F32"), "b": gaussian(3, "F32")}))
    selected, spec = [Selected(shard, tensor) for tensor in shard.tensors], NormSpec(order)
    total, tiles, sums = Measurement(selected, spec), 1 << 12, np.random.default_rng(3).random(1 << 12)
    for number in reversed(range(32)):
        block = Block(shard, 0, 0, [Span(0, "F32", number * tiles * TILE, tiles * TILE, 0)])
        sums_of_block = BlockSums.empty([Piece("F32", 0, tiles * TILE)])
        sums_of_block.sums[:], sums_of_block.max_abs[0] = array("d", np.roll(sums, number)), 1.0
        total.add(block, sums_of_block)
        assert len(total.tile_sums[0].sums) <= 1 << 13
    root = math.fsum(sums) * 32 if order == 1 else math.sqrt(math.fsum(sums) * 32) if order == 2 else 1.0
    assert total.norms().whole == pytest.approx(root, rel=1e-15)
    assert total.part(range(1, 2)).norms().whole == 0


def test_only_a_pass_that_writes_nothing_has_a_backend_read_for_itself(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": np.ones(5 << 20, np.float32)})
    opened = Inputs([str(path)]).open()
    measure = Measure(opened.selected, NormSpec())
    backend = mock.Mock(block_bytes=tuning.BLOCK_BYTES)
    in_place = Overwritten([NewFile(opened.shards[0], 0)], None)
    counts = {}
    passes = (
        measure,
        CountExponents(opened.selected, NormSpec()),
        Compare(opened.selected, NormSpec(), opened.selected, [Tolerance()] * len(opened.selected)),
    )
    for name, reads, destination in (("reads", True, DISCARD), ("writes", True, in_place), ("cannot", False, DISCARD)):
        backend.reads_files.return_value = reads
        counts[name] = [len(list(work.tasks(backend, destination))) for work in passes]
    assert counts == {"reads": [3, 3, 5], "writes": [10, 10, 10], "cannot": [10, 10, 10]}
