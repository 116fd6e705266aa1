"""A function in a forked child."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable

from .store_bed import until


def wait_for(pid: int) -> int:
    statuses: list[int] = []

    def ended() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        statuses.append(status)
        return found == pid

    until(ended, 30.0)
    return os.waitstatus_to_exitcode(statuses[-1])


def run_child(body: Callable[[], None]) -> int:
    """The exit code of a child of fork() that ran ``body``: 0 unless it raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            gc.collect()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return wait_for(pid)
