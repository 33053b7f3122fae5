"""Where the command starts and ends: `gradtool` and `python -m gradtool`."""

import contextlib
import gc
import os
import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line."""
    # Until it is ready to clean up after itself, Ctrl-C may simply end it, without a traceback out of an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Collecting what the imports leave, and taking the interpreter apart, would be a good part of a small run.
    gc.disable()
    code = _run()
    for stream in (sys.stdout, sys.stderr):
        # What could not be printed has had its say in the exit code.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _run() -> int:
    from gradtool.cli import main as command_line

    try:
        command_line()
    except SystemExit as done:
        return int(done.code or 0)


if __name__ == "__main__":
    main()
