"""The CUDA backend: kernels on a GPU, with the same bits as numpy."""
