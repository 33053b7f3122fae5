"""Blocks of files, and the threads that read and write them."""
