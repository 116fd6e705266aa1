"""Engines over TCP whose user unmaps memory that is registered: ``unmapped_engines.py TLS``.

TLS: JSON of [cluster]. Says on stdout what became of each step, one JSON value a line; a fault ends it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
import threading
from typing import Any

from moonpool import TransferEngine, TransferError
from moonpool.core.config import config
from moonpool.core.service.data_tls import engine_tls

MIB = 1 << 20
BYTES = 4 * MIB
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Pages:
    """Registered memory of which pages may be taken away."""

    def __init__(self, engine: TransferEngine) -> None:
        self.map = mmap.mmap(-1, BYTES)
        self.region = engine.register(self.map)

    def protect(self, at: int, size: int, protection: int) -> None:
        """0: as if unmapped, but another thread cannot map there."""
        if _libc.mprotect(self.region.address + at, size, protection) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")


def outcome(work: Any) -> str:
    try:
        work()
    except TransferError as error:
        return str(error)
    return ""


def main() -> None:
    cluster = json.loads(sys.argv[1])
    settings = config.load(env={}, arguments={f"cluster.{name}": value for name, value in cluster.items()})
    options: dict[str, Any] = {"token": b"token of this test", "transports": ["tcp"], "metadata": ""}
    options |= {"tls": engine_tls(settings), "timeout_s": 20.0}
    with TransferEngine("here", **options) as here, TransferEngine("there", **options) as there:
        segment = here.open(there.addresses[0])
        own, sound = here.allocate(BYTES), there.allocate(BYTES)
        gone, local = Pages(there), Pages(here)
        own.view[:] = bytes(range(256)) * (BYTES // 256)

        def say(step: str, work: Any) -> None:
            said = outcome(work)
            here.write(segment, own, sound.address)  # the others go on
            print(json.dumps([step, said, bytes(sound.view) == bytes(own.view)]), flush=True)
            sound.view[:] = bytes(BYTES)

        def write(to: int, size: int, source: int = 0) -> Any:
            return lambda: here.write(segment, source or own.address, to, size)

        def read(source: int, size: int, to: int = 0) -> Any:
            return lambda: here.read(segment, to or own.address, source, size)

        for size in (64, 8192, 2 * MIB):
            gone.protect(MIB, MIB, 0)
            say(
                f"write {size} to pages that are gone", write(gone.region.address + 2 * MIB - size // 2, size)
            )
            gone.protect(MIB, MIB, mmap.PROT_READ | mmap.PROT_WRITE)
            local.protect(MIB, MIB, 0)
            say(
                f"write {size} of own pages that are gone",
                write(sound.address, size, local.region.address + 2 * MIB - size // 2),
            )
            say(
                f"read {size} to own pages that are gone",
                read(sound.address, size, local.region.address + 2 * MIB - size // 2),
            )
            local.protect(MIB, MIB, mmap.PROT_READ | mmap.PROT_WRITE)
            gone.protect(MIB, MIB, 0)
            say(f"read {size} of pages that are gone", read(gone.region.address + 2 * MIB - size // 2, size))
            gone.protect(MIB, MIB, mmap.PROT_READ | mmap.PROT_WRITE)

        over = threading.Event()
        failed = threading.Event()

        def go_on(work: Any) -> None:
            while not over.is_set():
                if outcome(work):
                    failed.set()

        pairs = [write(gone.region.address, BYTES), read(gone.region.address, BYTES)]
        pairs += [write(sound.address, BYTES, local.region.address)]
        threads = [threading.Thread(target=go_on, args=(work,)) for work in pairs]
        for thread in threads:
            thread.start()
        turns = 0
        while turns < 20 or not failed.is_set():
            for pages in (gone, local):
                pages.protect(MIB, 2 * MIB, 0)
                pages.protect(MIB, 2 * MIB, mmap.PROT_READ | mmap.PROT_WRITE)
            turns += 1
        over.set()
        for thread in threads:
            thread.join()
        say("in the middle", lambda: None)


if __name__ == "__main__":
    main()
