"""Subnormal and saturated values, counted on a GPU."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from gradtool.backends.cuda import jobs
from gradtool.backends.cuda.memory import upload_arrays
from gradtool.backends.extremes import BOUNDS, Extremes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.backends import Piece
    from gradtool.backends.cuda.memory import Device, DeviceBlock


def count_extremes(device: Device, data: DeviceBlock, pieces: Sequence[Piece]) -> Extremes:
    """Count them in the pieces of a block on the device."""
    counts = np.zeros((len(pieces), 2), np.int64)
    parts = list(jobs.Tiles.of(pieces, None).by_type())
    if parts:
        found = device.allocate(counts.nbytes)
        device.clear(found.address, counts.nbytes)
        table = upload_arrays(device, *(rows for _, rows, _ in parts))
        for (dtype, rows, blocks), address in zip(parts, table.addresses, strict=True):
            normal, largest = BOUNDS[dtype]
            job = jobs.job(
                jobs.EXTREMES_JOB,
                block=data.address,
                found=found.address,
                piece=address,
                normal=normal,
                largest=largest,
                pieces=len(rows),
            )
            device.launch(dtype, "extremes", blocks, jobs.THREADS, job)
        device.download(found.address, counts)
        device.wait()
    return Extremes(*(array("q", column.tobytes()) for column in counts.T))
