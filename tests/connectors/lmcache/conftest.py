"""What the tests share: a node of this process's own."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonpool import _native

TOKEN = b"a token of this test"
# Those need LMCache in this very process; test_real.py runs them where it is.
collect_ignore = [] if importlib.util.find_spec("lmcache") else ["real"]


class Node:
    """A node at a socket, which may come and go."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "n.sock"
        self.server: _native.Server | None = None

    def start(self, size: int = 64 << 20, token: bytes = TOKEN) -> Node:
        # Small slabs: what a client has leased and not filled is room that the others do not have.
        self.server = _native.Server(str(self.socket), [("default", size)], token, slab_bytes=64 << 10)
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
        client = _native.Client(str(self.socket), TOKEN, timeout_s=2)
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


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="moonpool-") as path:  # sockets have short paths only
        yield Path(path)


@pytest.fixture
def node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Not started."""
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", TOKEN.decode())
    node = Node(folder)
    yield node
    node.stop()
