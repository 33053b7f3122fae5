"""What another process is told to run; a module, because a spawned process imports it by name."""

import os


def strike_at(fault):
    """In another process: be struck."""
    os.environ["GRADTOOL_FAULT"] = fault
