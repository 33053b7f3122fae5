"""The version, alone, so that the build and `--version` can read it without importing anything."""

__version__ = "0.1.0"
