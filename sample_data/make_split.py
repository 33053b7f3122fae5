"""Remakes `split`: the gradient of `buffer.safetensors` as torch's distributed writer saves it from four processes.

The model is sharded over two of them by FSDP, and each half over two by tensor parallelism, so that matrices are cut
into a grid of 2x2 pieces. Needs torch, which gradtool itself does not:

    python sample_data/make_split.py
"""

import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import distributed, multiprocessing
from torch.distributed import checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

HERE = Path(__file__).resolve().parent
PROCESSES = 4


def save(rank: int, source: Path, folder: Path, ways: dict[str, tuple[tuple[int, ...], list[int | None]]]) -> None:
    """Save the tensors of a file from one process: for each way, a mesh and the axis that each of its axes shards."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    distributed.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    for name, (shape, axes) in ways.items():
        mesh = init_device_mesh("cpu", shape)
        state = {}
        for key, tensor in load_file(source).items():
            placed = [Replicate() if axis is None or axis >= tensor.ndim else Shard(axis) for axis in axes]
            state[key] = distribute_tensor(tensor, mesh, placed)
        checkpoint.save(state, storage_writer=HuggingFaceStorageWriter(str(folder / name), save_distributed=True))
    distributed.destroy_process_group()


def write(source: Path, folder: Path, ways: dict[str, tuple[tuple[int, ...], list[int | None]]]) -> None:
    """Save the tensors of a file in several ways, each into a folder of its own."""
    multiprocessing.spawn(save, (source, folder, ways), PROCESSES)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        # For tests: python make_split.py SOURCE FOLDER
        fsdp, tp, both, replicas = ((4,), [0]), ((4,), [1]), ((2, 2), [0, 1]), ((2, 2), [None, 0])
        write(Path(sys.argv[1]), Path(sys.argv[2]), {"fsdp": fsdp, "tp": tp, "both": both, "replicas": replicas})
    else:
        shutil.rmtree(HERE / "split", ignore_errors=True)
        write(HERE / "buffer.safetensors", HERE, {"split": ((2, 2), [0, 1])})
