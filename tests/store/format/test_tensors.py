"""Where the bytes of tensors that lie in pieces are, for any cut into boxes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from split import boxes, split_shard
from tiers import PARTS, examples

from gradtool.store.format.tensors import Extent, Rows


@st.composite
def cut_tensors(draw):
    """Tensors of any rank, each with its cuts along each axis: pieces may be empty, or single elements."""
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        cuts = [draw(st.lists(st.integers(0, size), max_size=3)) for size in shape]
        tensors.append((draw(st.sampled_from(["U8", "F16", "F32", "F64"])), shape, cuts))
    return tensors


@PARTS
def test_a_range_of_whole_tensors_is_where_its_pieces_are(part):
    @examples(1000, part)
    @given(cut_tensors(), st.data())
    def check(tensors, data):
        rng = np.random.default_rng(0)
        files, wholes, whole = [bytearray(3), bytearray(5)], {}, b""
        names = [SimpleNamespace(name=str(number), content=content) for number, content in enumerate(files)]
        for number, (dtype, shape, cuts) in enumerate(tensors):
            array, extents = (
                rng.integers(0, 256, (*shape, {"U8": 1, "F16": 2, "F32": 4, "F64": 8}[dtype]), np.uint8),
                [],
            )
            for start, size in boxes(shape, cuts):
                file = names[data.draw(st.integers(0, 1))]
                extents.append(Extent(file, len(file.content), start, size))
                file.content += array[tuple(map(slice, start, np.add(start, size).astype(int)))].tobytes()
            wholes[f"t{number}", shape] = dtype, extents
            whole += array.tobytes()
        shard = split_shard(wholes)
        assert shard.size == len(whole)
        # A block begins and ends between elements.
        edges = [
            tensor.begin + at * (tensor.nbytes // tensor.elements)
            for tensor in shard.tensors
            for at in range(tensor.elements + 1)
            if tensor.elements
        ] or [0]
        begin, end = sorted(data.draw(st.sampled_from(edges)) for _ in range(2))
        view, bands = bytearray(end - begin), list(shard.bands(begin, end - begin))
        for file, at, nbytes, rows in bands:
            places = [
                row.at + n * row.stride + byte for row in rows for n in range(row.times) for byte in range(row.nbytes)
            ]
            assert len(places) == nbytes
            for place, byte in zip(places, file.content[at : at + nbytes], strict=True):
                view[place] = byte
        assert view == whole[begin:end]
        assert sum(band.nbytes for band in bands) == end - begin
        for tensor, (_, extents) in zip(shard.tensors, wholes.values(), strict=True):
            ranges = [(file.name, low, high) for file, low, high in shard.ranges(tensor) if low < high]
            nbytes = [math.prod(extent.shape) * tensor.nbytes // max(1, tensor.elements) for extent in extents]
            assert ranges == [(e.shard.name, e.begin, e.begin + n) for e, n in zip(extents, nbytes, strict=True) if n]

    check()


def test_a_band_has_as_few_rows_as_can_be():
    file = SimpleNamespace(name="x")
    rows = [Extent(file, 0, (0, 0, 0), (2, 3, 4)), Extent(file, 96, (2, 0, 0), (5, 3, 4))]
    columns = [Extent(file, 0, (0, 0, 0), (7, 1, 4)), Extent(file, 112, (0, 1, 0), (7, 2, 4))]
    by_rows, by_columns = (split_shard({("t", (7, 3, 4)): ("F32", extents)}) for extents in (rows, columns))
    assert list(by_rows.bands(0, 336)) == [(file, 0, 96, (Rows(0, 96),)), (file, 96, 240, (Rows(96, 240),))]
    assert list(by_rows.bands(4, 40)) == [(file, 4, 40, (Rows(0, 40),))]
    assert list(by_columns.bands(0, 336)) == [
        (file, 0, 112, (Rows(0, 16, 7, 48),)),
        (file, 112, 224, (Rows(16, 32, 7, 48),)),
    ]
    # Half of a row, five rows, and the last on its own.
    assert next(by_columns.bands(8, 300)) == (file, 8, 104, (Rows(0, 8), Rows(40, 16, 5, 48), Rows(280, 16)))


def test_extents_that_lack_an_element_are_noticed():
    shard = split_shard({("t", (4,)): ("U8", [Extent(SimpleNamespace(name="x"), 0, (0,), (3,))])})
    assert len(list(shard.bands(0, 3))) == 1
    with pytest.raises(AssertionError, match="every element once"):
        list(shard.bands(0, 4))
