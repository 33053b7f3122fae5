"""The device's memory: what a GPU must be able to do, and what lies where on it.

The device is behind a protocol, so that the tests can run the kernels on the CPU.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from array import array

    from numpy.typing import NDArray

_ALIGNMENT = 256


class Buffer(Protocol):
    """Memory of a device, given back when it is dropped."""

    address: int


class Device(Protocol):
    """One GPU. What one thread launches is done in order; copies and kernels are asynchronous until `wait`."""

    name: str

    def memory(self, nbytes: int) -> memoryview:
        """Memory of the host that is copied from and to the device at full speed."""

    def allocate(self, nbytes: int) -> Buffer:
        """Memory of the device, aligned for every type; or `DeviceMemoryError`."""

    def free_bytes(self) -> int:
        """About how many bytes can still be allocated."""

    def upload(self, address: int, content: Any) -> None:
        """Copy a host buffer to the device. It must not change before `wait` returns."""

    def download(self, address: int, content: Any) -> None:
        """Copy to a host buffer."""

    def clear(self, address: int, nbytes: int) -> None:
        """Fill with zeros."""

    def launch(self, module: str, kernel: str, blocks: int, threads: int, job: NDArray[Any]) -> None:
        """Run a kernel of a module on so many blocks of threads; `job` is its argument."""

    def wait(self) -> None:
        """Return when everything that this thread launched is done."""


class DeviceBlock(NamedTuple):
    """A block in the device's memory."""

    buffer: Buffer
    address: int
    nbytes: int


class DeviceGroups(NamedTuple):
    """The gradients of scale and bias of each group of rows: float64 (2, groups, columns) on the device."""

    buffer: Buffer | None
    groups: int
    columns: int


class Table(NamedTuple):
    """Arrays on the device and the address of each. The content must live until it is copied."""

    buffer: Buffer
    addresses: list[int]
    content: bytes


def allocate_block(device: Device, nbytes: int, align: int = 0) -> DeviceBlock:
    """A block whose byte `align` is aligned."""
    buffer = device.allocate(nbytes + _ALIGNMENT)
    return DeviceBlock(buffer, buffer.address + -align % _ALIGNMENT, nbytes)


def upload_arrays(device: Device, *arrays: NDArray[Any]) -> Table:
    """Copy arrays to the device, one after another."""
    content = b"".join(array.tobytes() for array in arrays)
    buffer = device.allocate(len(content) + 1)
    device.upload(buffer.address, content)
    starts = accumulate((array.nbytes for array in arrays), initial=buffer.address)
    return Table(buffer, [start for start, _ in zip(starts, arrays, strict=False)], content)


def upload_vectors(device: Device, *vectors: NDArray[np.float64] | array[float] | None) -> Table:
    """Copy float64 arrays to the device. The address of one that is None is 0."""
    table = upload_arrays(device, *(np.empty(0) if vector is None else np.asarray(vector) for vector in vectors))
    pairs = zip(vectors, table.addresses, strict=True)
    return table._replace(addresses=[0 if vector is None else address for vector, address in pairs])
