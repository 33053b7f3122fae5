"""Where the command starts and ends: `gradtool` and `python -m gradtool`."""

# Little is imported before it is known that there is memory for it.
import gc
import os
import sys

# As typing has it, which would be a good part of that.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import NoReturn


def main() -> "NoReturn":
    """Run the command line."""
    # Collecting what the imports leave, and taking the interpreter apart, would be a good part of a small run.
    gc.disable()
    os._exit(_run() if _can_start() else _refuse())


def _can_start() -> bool:
    try:
        import signal

        # Until it is ready to clean up after itself, Ctrl-C may simply end it, without a traceback out of an import.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from gradtool import memory
    except (ImportError, MemoryError):
        return False
    return memory.left() >= memory.TO_START


def _run() -> int:
    # numpy's BLAS, which we do not use, would start a thread for each core, and end us where it may not.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from gradtool.cli import main as command_line

    try:
        command_line()
    except SystemExit as done:
        return int(done.code or 0)
    except MemoryError:  # Not even enough to say what is wrong.
        return _refuse()


def _refuse() -> int:
    """Say that there is no memory; written out by hand, because what would print it takes memory too."""
    from gradtool._version import __version__

    message = "not enough memory; raise the limit (ulimit -v or -d)"
    _print(2, f"gradtool: error: {message}\n")
    if "--json" in sys.argv[1:]:
        command = next((word for word in sys.argv[1:] if word.replace("-", "").isalpha() and word[0] != "-"), "")
        _print(
            1,
            f'{{"gradtool": "{__version__}", "schema": 1, "command": "{command if command.isascii() else ""}", '
            f'"status": "error", "exit_code": 5, "data": {{}}, '
            f'"errors": [{{"code": "system", "message": "{message}"}}]}}\n',
        )
    return 5


def _print(fd: int, text: str) -> None:
    try:  # noqa: SIM105 - contextlib is not there yet
        os.write(fd, text.encode())
    except OSError:
        pass  # The exit code says it too.


if __name__ == "__main__":
    main()
