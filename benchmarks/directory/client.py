"""One contender's client: puts, looks up and removes many small objects, told by JSON lines what to do.

    python -m benchmarks.directory.client FD DRIVER ADDRESS [MASTER]

FD is a socket: {"do": VERB, "n": keys} in, {"seconds": ..} out, {"error": ..} when an answer was wrong. With
MASTER, "ours" looks keys up in the directory itself, as a client does for what its own node does not have.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.processes import serve
from benchmarks.store.drivers import DRIVERS
from benchmarks.store.memory import Buffer

OBJECT_BYTES = 64
BATCH = 1000
LOOKUP_BATCH = 16384
POLL_S = 0.002
SETTLE_TIMEOUT_S = 30.0


class Wrong(Exception):
    """The contender did not do what it said; its figures would mean nothing."""


def name(i: int) -> str:
    """53 bytes, as a block's name in its space is."""
    return f"benchmark/{i:043d}"


class Client:
    def __init__(self, driver: str, address: str) -> None:
        self.source, self.target = Buffer(1 << 20, random=True), Buffer(1 << 20)
        self.driver = DRIVERS[driver](address, self.source, self.target)

    def put(self, n: int) -> None:
        offsets = [i * OBJECT_BYTES for i in range(BATCH)]
        prepared = self.driver.prepare(offsets, OBJECT_BYTES, True)
        for keys in batches(n, BATCH):
            if not self.driver.put_batch(keys, prepared):
                raise Wrong("a put was refused")
        self.settle(n)

    def exists(self, n: int) -> None:
        found = sum(self.driver.exists_batch(keys) for keys in batches(n, LOOKUP_BATCH))
        if found != n:
            raise Wrong(f"{found} of {n} keys were found")

    def remove(self, n: int) -> None:
        for keys in batches(n, BATCH):
            self.driver.remove(keys)
        self.settle(0)

    def settle(self, n: int) -> None:
        """Until the directory knows: others answer when they do."""


class Ours(Client):
    """``exists`` and ``prefix`` ask the master; the hashes are made before."""

    def __init__(self, driver: str, address: str, master: str) -> None:
        super().__init__(driver, address)
        native: Any = importlib.import_module("moonpool._native")
        paths: Any = importlib.import_module("moonpool.core.config.paths")
        self._hash = native.key_hash
        self._hashes = b""
        self._directory = native.DirectoryClient(master, paths.read_or_create_token(), timeout_s=10.0)

    def hashes(self, n: int) -> bytes:
        if len(self._hashes) != 16 * n:
            self._hashes = b"".join(self._hash("default", "default", b"", name(i).encode()) for i in range(n))
        return self._hashes

    def exists(self, n: int) -> None:
        answer = self._directory.locate(self.hashes(n))
        if answer.hits != n:
            raise Wrong(f"{answer.hits} of {n} keys were found")

    def prefix(self, n: int) -> None:
        found = len(self._directory.locate(self.hashes(n), prefix=True))
        if found != n:
            raise Wrong(f"a prefix of {found} of {n} keys was found")

    def settle(self, n: int) -> None:
        """Until the directory has exactly the first ``n`` keys: the last batches first, then all of them."""
        every = self._hashes
        tail = every[-16 * BATCH :]
        self._until(lambda: len(tail) == 0 or self._directory.locate(tail).hits == (BATCH if n else 0))
        self._until(lambda: self._directory.locate(every).hits == n)

    def rebuilt(self, n: int) -> None:
        """Until a new master has heard of all keys again."""
        self.settle(n)

    def _until(self, condition: Any) -> None:
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            try:
                if condition():
                    return
            except ConnectionError:
                pass  # the master is not back yet
            if time.monotonic() > deadline_s:
                raise Wrong(f"the directory was not up to date after {SETTLE_TIMEOUT_S:g} s")
            time.sleep(POLL_S)


def batches(n: int, size: int) -> Iterator[list[str]]:
    for first in range(0, n, size):
        yield [name(i) for i in range(first, min(first + size, n))]


def main() -> None:
    descriptor, driver, address, *master = sys.argv[1:]

    def start() -> tuple[object, Callable[[Any], object]]:
        client = Ours(driver, address, master[0]) if master else Client(driver, address)

        def answer(request: Any) -> object:
            if request["do"] == "prepare":
                if isinstance(client, Ours):
                    client.hashes(request["n"])
                return {}
            began_s = time.monotonic()
            getattr(client, request["do"])(request["n"])
            return {"seconds": time.monotonic() - began_s}

        return {"ready": True}, answer

    serve(descriptor, start)
    os._exit(0)  # a peer's threads may hang at the end


if __name__ == "__main__":
    main()
