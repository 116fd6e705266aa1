"""The folder of what only the processes of one group share; it goes with the last of them, however they end.

Each of them holds a shared lock on it, all its life; one that ends removes the folder when no other holds it.
A killed process holds it no more: the next group to start removes what killed ones have left.
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
_UNHELD = "moonpool-new-"  # for the moment before its first lock


@contextmanager
def new_folder() -> Iterator[str]:
    """The path of a new one, held. Raises OSError when it cannot be made."""
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
    """One more holds it. Raises OSError when it is gone."""
    descriptor = _open(path)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    with _held(path, descriptor):
        yield


@contextmanager
def _held(path: str, descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        _remove_if_nobodys(path, descriptor)
        os.close(descriptor)


def _remove_abandoned() -> None:
    for each in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's
            descriptor = _open(str(each))
            if os.fstat(descriptor).st_uid == os.getuid():
                _remove_if_nobodys(str(each), descriptor)
            os.close(descriptor)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_if_nobodys(path: str, descriptor: int) -> None:
    """The descriptor's own lock counts for nothing, and is given up."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
