"""The real command on a terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import termios

from support import COMMAND


def on_terminal(*arguments, columns=100, errors=True, command=COMMAND, **environment):
    """Run it on a terminal of that width: the exit code, and all that is shown; without `errors`, stdout alone."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    own = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES", "NO_COLOR"}}
    streams = {"stdin": writer, "stdout": writer, "stderr": writer if errors else subprocess.DEVNULL}
    environment = own | {"TERM": "xterm"} | environment
    with subprocess.Popen([*command, *map(str, arguments)], **streams, env=environment) as running:
        os.close(writer)
        shown = b""
        while True:
            try:
                shown += (part := os.read(reader, 65_536))
            except OSError:  # How Linux says that the other side is gone.
                break
            if not part:
                break
    os.close(reader)
    # A terminal gets a carriage return with each newline.
    return running.returncode, shown.decode().replace("\r\n", "\n")
