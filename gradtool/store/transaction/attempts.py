"""One attempt at a new file, in a process that does not hold the run's locks.

The run may have ended meanwhile, and even have committed another attempt. So an attempt writes only to a temporary
that it has made itself, and it looks for the permit of the run: before and after it makes that, now and then, and at
its end. Without a permit it removes its temporary, which may have been made too late to be found by the run itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from typing import TYPE_CHECKING, Self

from gradtool.errors import SystemRefusedError, changed_meanwhile, os_errors_about
from gradtool.store import fs
from gradtool.store.fs import File, Folder
from gradtool.store.late import retry_until_visible
from gradtool.store.transaction.files import name_of
from gradtool.store.transaction.orders import FIRST_ATTEMPT, LAST_ATTEMPT, Built

if TYPE_CHECKING:
    from gradtool.store.transaction.orders import Order

_TRIES = 10
_LOOK_SECONDS = 1.0


class Attempt:
    """Builds a temporary as ordered. Used as a context manager, which removes it if an exception leaves the block."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._looked = 0.0

    def __enter__(self) -> Self:
        order = self._order
        with contextlib.ExitStack() as stack, os_errors_about(order.folder / order.name):

            def look() -> object:
                self._folder = stack.enter_context(Folder.at(order.folder))
                return self._folder.status(order.permit)

            try:
                retry_until_visible(look)
            except (FileNotFoundError, NotADirectoryError):
                raise self._ended() from None
            self.require_permit()
            self._number, self._fd, self.file = new_temporary(self._folder, order.run)
            stack.callback(self._close)
            stack.push(self._remove_after_an_error)
            # If it was made too late to be found, the permit is gone now.
            self.require_permit()
            self._prepare()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def look(self) -> None:
        """Raise `SystemRefusedError` if the run has ended or has no use for this; looked up once a second at most."""
        now = time.monotonic()
        if now > self._looked + _LOOK_SECONDS:
            self._looked = now
            self.require_permit()
            if not self.file.is_there:
                raise changed_meanwhile(self.file.path)

    def require_permit(self) -> None:
        """Raise `SystemRefusedError` if the permit is gone."""
        try:
            # Opened, because a status may be an old one where files come over a network.
            os.close(self._folder.open(self._order.permit, os.O_RDONLY))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            raise self._ended() from None

    def _ended(self) -> SystemRefusedError:
        what = f"{self._order.permit} is missing: the run has ended, or the folder is not shared with it"
        return SystemRefusedError(what, file=self._order.folder, code="changed")

    def finish(self) -> Built:
        """Sync the temporary; what was built."""
        with os_errors_about(self.file.path):
            if self._order.fsync:
                fs.sync(self._fd)
            status = os.fstat(self._fd)
            self.require_permit()
            return Built(self._number, status.st_ino, status.st_size)

    def _prepare(self) -> None:
        new = self._order.new
        for begin, end in [(0, new.size)] if new.ranges is None else new.ranges:
            fs.reserve(self._fd, begin, end)
        fs.resize(self._fd, new.size)

    def _close(self) -> None:
        os.close(self._fd)

    def _remove_after_an_error(self, kind: object, error: object, traceback: object) -> None:  # noqa: ARG002
        if kind is not None:
            with contextlib.suppress(OSError):
                # The name may have been swept.
                if self.file.is_there:
                    self._folder.unlink(self.file.name)


def new_temporary(folder: Folder, run: str) -> tuple[int, int, File]:
    """Make a temporary of a run in a process that does not hold its locks: its number, its descriptor, and the file."""
    for tries in range(_TRIES):
        # Not counted, because other attempts for the same run are made elsewhere at the same time.
        number = random.SystemRandom().randint(FIRST_ATTEMPT, LAST_ATTEMPT)
        try:
            return number, *folder.create_file(name_of(run, number, "tmp"))
        except FileExistsError:
            if tries == _TRIES - 1:
                raise
    raise AssertionError
