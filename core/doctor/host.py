"""``Host``: all that the checks look at. Tests give one whose files, limits and probes have a fault."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.core.topology import read

if TYPE_CHECKING:
    from moonpool import _native

_IO_URING_SETUP = 425  # on every architecture


def open_library(name: str) -> str:
    """Why the dynamic linker does not find it; "" when it does."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return ""


def has_function(library: str, name: str) -> bool:
    """False as well where the library does not open."""
    try:
        return hasattr(ctypes.CDLL(library), name)
    except OSError:
        return False


def probe_io_uring() -> int:
    """0, or the errno with which the kernel refuses io_uring."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(_IO_URING_SETUP, 0, None)  # without entries it fails, unless it is forbidden before that
    found = ctypes.get_errno()
    return found if found in (errno.EPERM, errno.EACCES, errno.ENOSYS) else 0


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def probe_process_vm() -> int:
    """0, or the errno with which the kernel (seccomp) refuses process_vm_readv of this process itself."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
    local = _Range(ctypes.addressof(here), 8)
    remote = _Range(ctypes.addressof(there), 8)
    call = libc.process_vm_readv
    ranges = (ctypes.c_void_p, ctypes.c_ulong)
    call.argtypes = [ctypes.c_int, *ranges, *ranges, ctypes.c_ulong]
    call.restype = ctypes.c_ssize_t
    moved = call(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return 0 if moved == 8 else ctypes.get_errno()


def filesystem_bytes(path: str) -> int:
    """The size of the file system at ``path``. Raises OSError."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


@dataclass(frozen=True)
class Host:
    """root: a prefix of /sys, /proc, /dev and /etc. soft_limit: of a RLIMIT_*; -1: none."""

    root: str = ""
    soft_limit: Callable[[int], int] = lambda which: resource.getrlimit(which)[0]
    open_library: Callable[[str], str] = open_library
    has_function: Callable[[str, str], bool] = has_function
    probe_io_uring: Callable[[], int] = probe_io_uring
    probe_process_vm: Callable[[], int] = probe_process_vm
    filesystem_bytes: Callable[[str], int] = filesystem_bytes
    now_s: Callable[[], float] = time.time

    @cached_property
    def machine(self) -> _native.Machine:
        """Its topology."""
        return read(self.root)

    def path(self, path: str) -> Path:
        """Where an absolute path of this host is found."""
        return Path(self.root + path)

    def text(self, path: str) -> str:
        """A file's text, stripped; "" when it cannot be read."""
        try:
            return self.path(path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """The names in a folder; none when it cannot be read."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Whether it is there."""
        return self.path(path).exists()

    def is_usable(self, path: str) -> bool:
        """Whether this process may read and write it."""
        return os.access(self.path(path), os.R_OK | os.W_OK, effective_ids=True)

    def has_capability(self, number: int) -> bool:
        """Whether this process has that capability of capabilities(7)."""
        for line in self.text("/proc/self/status").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> number & 1)
        return False
