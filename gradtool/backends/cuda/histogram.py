"""Counts values by binary exponent on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gradtool.backends.cuda import jobs
from gradtool.backends.cuda.memory import upload_arrays
from gradtool.backends.histogram import bins_of, empty_histogram

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.backends import BlockHistogram, Piece
    from gradtool.backends.cuda.memory import Device, DeviceBlock

_JOB = jobs.record("block", "counts", "largest", "piece", "pieces")


def count_pieces(device: Device, data: DeviceBlock, pieces: Sequence[Piece]) -> BlockHistogram:
    """Count the values of the pieces of a block."""
    found, tiles = empty_histogram(pieces), jobs.Tiles.of(pieces, None)
    bins = np.array([len(bins_of(piece.dtype)) for piece in pieces], np.int64)
    # The kernel adds to bins where others put sums.
    tiles.table["first_sum"] = np.cumsum(bins) - bins
    nbytes = found.counts.nbytes + found.largest.nbytes
    results = device.allocate(nbytes + 1)
    device.clear(results.address, nbytes)
    largest = results.address + found.counts.nbytes
    parts = list(tiles.by_type())
    table = upload_arrays(device, *(rows for _, rows, _ in parts))
    for (dtype, rows, blocks), address in zip(parts, table.addresses, strict=True):
        job = jobs.job(
            _JOB, block=data.address, counts=results.address, largest=largest, piece=address, pieces=len(rows)
        )
        device.launch(dtype, "histogram", blocks, jobs.THREADS, job)
    device.download(results.address, found.counts)
    device.download(largest, found.largest)
    device.wait()
    return found
