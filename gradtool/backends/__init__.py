"""Arithmetic on one block of memory, or of an open file: in numpy, C and CUDA, with the same bits."""
