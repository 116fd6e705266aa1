"""Worker processes for simulations, which end when the process that started them ends, however it does."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from moonpool.core.service.processes import die_with_parent

_shared: Any = None  # of a worker


@contextmanager
def workers(count: int, shared: object) -> Iterator[ProcessPoolExecutor]:
    """shared: an object for all tasks, passed to each worker once; ``get_shared`` returns it there.

    An executor alone waits for all its tasks after Ctrl-C, forever where the workers got the signal as well,
    and leaves them behind after SIGTERM.
    """
    forking = multiprocessing.get_context("fork")  # not by a server, as from Python 3.14 on: it is no parent
    with ProcessPoolExecutor(count, forking, initializer=_begin, initargs=(os.getpid(), shared)) as pool:
        try:
            yield pool
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def get_shared() -> Any:
    """What ``workers`` was given, in a worker process; None in the parent. Not to be changed: it is a copy of
    each worker's own."""
    return _shared


def _begin(parent: int, shared: object) -> None:
    global _shared
    _shared = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    die_with_parent(parent, signal.SIGKILL)
