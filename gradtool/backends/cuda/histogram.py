"""Counts values by binary exponent on a GPU."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from gradtool.backends import BlockHistogram
from gradtool.backends.cuda import jobs
from gradtool.backends.cuda.memory import upload_arrays
from gradtool.backends.histogram import bins_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.backends import Piece
    from gradtool.backends.cuda.memory import Device, DeviceBlock

_JOB = jobs.record("block", "counts", "largest", "piece", "pieces")


def count_pieces(device: Device, data: DeviceBlock, pieces: Sequence[Piece]) -> BlockHistogram:
    """Count the values of the pieces of a block."""
    tiles = jobs.Tiles.of(pieces, None)
    bins = np.array([len(bins_of(piece.dtype)) for piece in pieces], np.int64)
    # The kernel adds to bins where others put sums.
    tiles.table["first_sum"] = np.cumsum(bins) - bins
    # The counts, and the largest magnitudes behind them.
    found = np.empty(int(bins.sum()) + len(pieces), np.int64)
    results = device.allocate(found.nbytes + 1)
    device.clear(results.address, found.nbytes)
    largest = results.address + 8 * int(bins.sum())
    parts = list(tiles.by_type())
    table = upload_arrays(device, *(rows for _, rows, _ in parts))
    for (dtype, rows, blocks), address in zip(parts, table.addresses, strict=True):
        job = jobs.job(
            _JOB, block=data.address, counts=results.address, largest=largest, piece=address, pieces=len(rows)
        )
        device.launch(dtype, "histogram", blocks, jobs.THREADS, job)
    device.download(results.address, found)
    device.wait()
    counts, magnitudes = np.split(found, [bins.sum()])
    return BlockHistogram(array("q", counts.tobytes()), array("d", magnitudes.tobytes()))
