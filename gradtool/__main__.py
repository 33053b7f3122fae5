"""Where the command starts and ends: `gradtool` and `python -m gradtool`."""

# Little is imported before it is known that there is enough memory.
import gc
import os
import sys

# Not from typing, which would be a large part of that.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import NoReturn


def main() -> "NoReturn":
    """Run the command line."""
    # Garbage collection during the imports and the interpreter's shutdown would take a large part of a small run.
    gc.disable()
    os._exit(_run() if _can_start() else _refuse())


def _can_start() -> bool:
    try:
        import signal

        # Until there is something to clean up, Ctrl-C just ends the process, without a traceback from an import.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from gradtool import memory
    except (ImportError, MemoryError):
        return False
    return memory.left() >= memory.TO_START


def _run() -> int:
    # numpy's BLAS, which is not used, would start a thread for each core, and end the process if that failed.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from gradtool.cli import main as command_line

    try:
        command_line()
    except SystemExit as done:
        return int(done.code or 0)
    except MemoryError:  # There was not even enough to print the error.
        return _refuse()


def _refuse() -> int:
    """Print that there is not enough memory; by hand, because the usual code needs memory too."""
    from gradtool._version import __version__
    from gradtool.formats import asked_format

    message = "not enough memory; raise the limit (ulimit -v or -d)"
    _print(2, f"gradtool: error: {message}\n")
    form = asked_format(sys.argv[1:])
    if form in {"json", "jsonl"}:
        kind = '"type": "result", ' if form == "jsonl" else ""
        command = next((word for word in sys.argv[1:] if word.replace("-", "").isalpha() and word[0] != "-"), "")
        _print(
            1,
            f'{{{kind}"gradtool": "{__version__}", "schema": 1, "command": "{command if command.isascii() else ""}", '
            f'"status": "error", "exit_code": 5, "data": {{}}, '
            f'"errors": [{{"code": "system", "message": "{message}"}}]}}\n',
        )
    return 5


def _print(fd: int, text: str) -> None:
    try:  # noqa: SIM105 - contextlib is not imported yet
        os.write(fd, text.encode())
    except OSError:
        pass  # The exit code remains.


if __name__ == "__main__":
    main()
