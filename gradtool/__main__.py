"""Where the command starts and ends: `gradtool` and `python -m gradtool`."""

import contextlib
import gc
import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line."""
    # Garbage collection during the imports and the interpreter's shutdown would take a large part of a small run.
    gc.disable()
    # Until there is something to clean up, Ctrl-C just ends the process, without a traceback from an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # numpy's BLAS, which is not used, would start a thread for each core, and end the process if that failed.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os._exit(_run())


def _run() -> int:
    try:
        from gradtool.cli import main as command_line

        command_line()
    except SystemExit as done:
        return int(done.code or 0)
    except MemoryError:  # There was not even enough to import the command, or to print the error.
        with contextlib.suppress(OSError):  # The exit code remains.
            os.write(2, b"gradtool: error: out of memory\n  hint: raise the limit on memory (ulimit -v or -d)\n")
        return 5


if __name__ == "__main__":
    main()
