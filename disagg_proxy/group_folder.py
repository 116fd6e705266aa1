"""The private folder of one group of processes. It is removed with the last of them, however they end.

Each process holds a shared lock on the folder for its lifetime; a process that ends removes the folder if no
other process holds a lock. The lock of a killed process is gone, so the next group to start removes its
folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "moonpool-group-"
_UNHELD = "moonpool-new-"  # the name until the first lock is held


@contextmanager
def new_folder() -> Iterator[str]:
    """Creates a folder and holds it; yields its path. Raises OSError."""
    _remove_abandoned()
    made = tempfile.mkdtemp(prefix=_UNHELD)
    path = str(Path(made).with_name(Path(made).name.replace(_UNHELD, _PREFIX)))
    descriptor = _open(made)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.rename(made, path)
    with _held(path, descriptor):
        yield path


@contextmanager
def hold(path: str) -> Iterator[None]:
    """Holds an existing folder. Raises OSError if it is gone."""
    descriptor = _open(path)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    with _held(path, descriptor):
        yield


@contextmanager
def _held(path: str, descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        _remove_if_unheld(path, descriptor)
        os.close(descriptor)


def _remove_abandoned() -> None:
    for each in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user
            descriptor = _open(str(each))
            if os.fstat(descriptor).st_uid == os.getuid():
                _remove_if_unheld(str(each), descriptor)
            os.close(descriptor)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_if_unheld(path: str, descriptor: int) -> None:
    """Removes the folder unless another process holds it; gives up the lock of ``descriptor``."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
