"""Whether a file that a process follows is another one than when it was looked at last."""

from __future__ import annotations

import os


def file_state(file: str) -> tuple[int, ...]:
    """What another file of that name differs in; (): there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode)
