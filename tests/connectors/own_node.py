"""A node of the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moonpool import _native
from moonpool.core.config.native_settings import node_settings

TOKEN = b"a token of this test"


class Node:
    """A node at a socket, which may come and go. Small slabs: what a client has leased and not filled is room
    that the others do not have."""

    def __init__(self, folder: Path, slab_bytes: int = 64 << 10) -> None:
        self.socket = folder / "n.sock"
        self.slab_bytes = slab_bytes
        self.server: _native.Server | None = None

    def start(self, size: int = 64 << 20, token: bytes = TOKEN) -> Node:
        tenants = [("default", size)]
        # pins_share_max: tests fill it with what is pinned.
        self.server = _native.Server(
            str(self.socket), tenants, token, node_settings(slab_bytes=self.slab_bytes, pins_share_max=1.0)
        )
        self.server.start()
        return self

    def stop(self) -> None:
        if self.server is not None:
            assert self.server.check_integrity()
            self.server.stop()
            self.server = None

    def pinned(self) -> int:
        """Objects."""
        assert self.server is not None
        return self.server.metrics()["objects_pinned"]

    def full(self) -> Callable[[], None]:
        """Fills the node with what is pinned, until the answer is called."""
        client = _native.Client(str(self.socket), TOKEN, timeout_s=10)
        client.connect()
        pins = []
        for size in (256 << 10, 16 << 10, 1 << 10):
            for number in range(1000):
                name = f"ballast {size} {number}"
                if client.put([name], [bytes(size)])[0] != b"\0":
                    break
                pins.append(client.pin([name])[1])

        def release() -> None:
            for pin in pins:
                pin.release()
            client.close()

        return release

    def objects(self) -> int:
        assert self.server is not None
        return self.server.metrics()["objects"]
