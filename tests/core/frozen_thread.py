"""Stops one thread of a child process, and no other: SIGSTOP would stop them all. Needs PTRACE_SEIZE, which a
parent has unless the system forbids ptrace altogether."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def thread_of(pid: int, name: str) -> int:
    """The thread of the process ``pid`` that is called ``name``."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # another thread, which ends just now
            if (task / "comm").read_text().strip() == name:
                return int(task.name)
    raise LookupError(f"process {pid} has no thread {name}")


@contextmanager
def frozen(thread: int) -> Iterator[None]:
    """Inside, this thread of a child does not run; afterwards it goes on. To be left by the
    thread that entered it. Raises PermissionError."""
    if _libc.ptrace(_SEIZE, thread, None, None) != 0:
        raise PermissionError(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
    _libc.ptrace(_INTERRUPT, thread, None, None)
    os.waitpid(thread, _WALL)  # it has stopped
    try:
        yield
    finally:
        _libc.ptrace(_DETACH, thread, None, None)
