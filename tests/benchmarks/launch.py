"""Runs a command from a process small enough to leave no trace in the child's peak memory; prints seconds and KiB.

A child starts with the peak memory of whoever forks it, and forking a large process takes time of its own.
"""

import os
import sys
import time

began = time.perf_counter()
child = os.posix_spawnp(
    sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
)
_, status, usage = os.wait4(child, 0)
print(time.perf_counter() - began, usage.ru_maxrss, os.waitstatus_to_exitcode(status))  # noqa: T201
