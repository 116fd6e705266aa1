"""Waiting for a file descriptor."""

from __future__ import annotations

import select
import socket
from typing import IO, Any


def speaks(source: IO[Any] | socket.socket | int, timeout_s: float) -> bool:
    """Whether there is something to read within so long. Unlike select(), for any number of open files."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
