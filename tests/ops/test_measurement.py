import math
import threading
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import encode, gaussian, write

from gradtool.backends.cpu import NumpyBackend
from gradtool.backends.protocol import BlockSums, NormSpec, Piece
from gradtool.engines.cluster.wire import packed, unpacked
from gradtool.engines.passes import by_shard
from gradtool.ops.passes import Measurement, pieces_of
from gradtool.reduction import TILE
from gradtool.store.format.gradset import Selected
from gradtool.store.format.header import read_shard
from gradtool.store.format.tensors import Tensor
from gradtool.store.io.blocks import Block, Span, plan

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
    for some in (numbers[:at], numbers[at:]):
        part = whole.part(some)
        # As it comes from another process.
        empty = Measurement([selected[number] for number in some], spec)
        sent = unpacked(packed(part.compact()), empty)
        together.merge_part([(number, 0) for number in some], sent)
    assert whole.first_nonfinite.tolist() == together.first_nonfinite.tolist() == [-1, 70_000, -1, -1, -1]
    assert repr(together.norms(per_tensor=True)) == repr(whole.norms(per_tensor=True))
    assert [one.tolist() for one in (together.nan, together.zeros)] == [
        one.tolist() for one in (whole.nan, whole.zeros)
    ]
    assert any(whole.tile_sums[0].exponents) == (1 < spec.order <= 3)


def test_a_measurement_that_was_sent_can_be_filled_on(selected):
    blocks = list(blocks_of(selected))
    half = unpacked(packed(measured(selected, NormSpec(), blocks[:3])), Measurement(selected, NormSpec()))
    for block, data in blocks[3:]:
        half.add(block, NumpyBackend().tile_sums(data, pieces_of(block), NormSpec()))
    assert fields(half) == fields(measured(selected, NormSpec(), blocks))


def test_threads_may_add_at_the_same_time(selected):
    blocks, found = list(blocks_of(selected)), Measurement(selected, NormSpec())

    def work(number):
        for block, data in blocks[number::8]:
            found.add(block, NumpyBackend().tile_sums(data, pieces_of(block), NormSpec()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fields(found) == fields(measured(selected, NormSpec(), blocks))


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
    assert [one * 2.0**40 for one in scaled.tensors] == usual.tensors
    assert scaled.whole * 2.0**40 == usual.whole == usual.tensors[2]
    assert usual.tensors[3] == 0 < usual.tensors[4] < 1e-240
    assert whole.norms() == (usual.whole, [], [])


def test_each_group_has_the_norm_of_its_tensors_as_one_vector(selected):
    whole = measured(selected, NormSpec(drop_nonfinite=True), blocks_of(selected))
    numbers = [[4, 0], [3], list(range(len(selected)))]
    own = [whole.part(group).norms().whole for group in numbers]
    assert whole.norms(groups=numbers).groups == own
    assert own[-1] == whole.norms().whole


@pytest.mark.parametrize("order", [1.0, 2.0, np.inf])
def test_what_is_found_in_stretches_is_put_where_it_belongs(selected, order):
    spec = NormSpec(order)
    whole = measured(selected, spec, blocks_of(selected))
    found = Measurement(selected, spec)
    for block, data in blocks_of(selected):
        places = [(span.tensor, span.start) for span in block.spans]
        own = [Selected(block.shard, Tensor("", span.dtype, (span.elements,), 0, 0)) for span in block.spans]
        spans = [span._replace(tensor=number, start=0) for number, span in enumerate(block.spans)]
        part = measured(own, spec, [(block._replace(spans=spans), data)])
        found.merge_part(places, unpacked(packed(part.compact()), Measurement(own, spec)))
    assert repr(found.norms(per_tensor=True)) == repr(whole.norms(per_tensor=True))
    for fact in FIELDS:
        assert getattr(found, fact).tobytes() == getattr(whole, fact).tobytes()


def test_a_measurement_of_something_else_is_not_put_anywhere(selected):
    found, spec = Measurement(selected, NormSpec()), NormSpec()
    for other, places in [
        (Measurement(selected, NormSpec(1.0)), [(number, 0) for number in range(len(selected))]),
        (Measurement(selected[:1], spec), []),
        ("a measurement", [(0, 0)]),
    ]:
        with pytest.raises(ValueError, match="a tally of"):
            found.merge_part(places, other)


@pytest.mark.parametrize("order", [1.0, 2.0, np.inf])
def test_what_is_stored_does_not_grow_with_the_tensors(tmp_path, order):
    """As of a tensor of 2 TiB, whose blocks come in any order."""
    shard = read_shard(write(tmp_path / "x", {"a": encode([], "F32"), "b": gaussian(3, "F32")}))
    selected, spec = [Selected(shard, tensor) for tensor in shard.tensors], NormSpec(order)
    found, tiles, sums = Measurement(selected, spec), 1 << 12, np.random.default_rng(3).random(1 << 12)
    for number in reversed(range(32)):
        block = Block(shard, 0, 0, [Span(0, "F32", number * tiles * TILE, tiles * TILE, 0)])
        sums_of_block = BlockSums.empty([Piece("F32", 0, tiles * TILE)])
        sums_of_block.sums[:], sums_of_block.max_abs[0] = array("d", np.roll(sums, number)), 1.0
        found.add(block, sums_of_block)
        assert len(found.tile_sums[0].sums) <= 1 << 13
    root = math.fsum(sums) * 32 if order == 1 else math.sqrt(math.fsum(sums) * 32) if order == 2 else 1.0
    assert found.norms().whole == pytest.approx(root, rel=1e-15)
    assert found.part(range(1, 2)).norms().whole == 0
