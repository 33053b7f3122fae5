"""Where the command starts: `gradtool` and `python -m gradtool`."""

import signal


def main() -> None:
    """Run the command line."""
    # Until it is ready to clean up after itself, Ctrl-C may simply end it, without a traceback out of an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gradtool.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
