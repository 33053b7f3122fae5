"""Engines run passes over files: in the threads of this process (`threads`), or in other processes (`cluster`)."""
