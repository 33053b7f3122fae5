"""The least that clipping in place could do, and no safety: read, multiply, write back, through one reused buffer."""

import os
import sys

import numpy as np

BLOCK = 2 << 20

fd = os.open(sys.argv[1], os.O_RDWR)
begin, size = 8 + int.from_bytes(os.pread(fd, 8, 0), "little"), os.fstat(fd).st_size
block = memoryview(bytearray(BLOCK))
for at in range(begin, size, BLOCK):
    view = block[: min(BLOCK, size - at)]
    os.preadv(fd, [view], at)
    values = np.frombuffer(view, np.float32)
    np.multiply(values, np.float32(0.5), out=values)
    os.pwrite(fd, view, at)
