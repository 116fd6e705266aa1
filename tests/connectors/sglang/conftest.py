"""What the tests share: a node of this process's own, and backends that use it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool import _native
from moonpool.connectors.sglang import MoonpoolHiCache, compat, updates
from tests.connectors.sglang.fakes import (
    Engine,
    HostPool,
    MLATokenToKVPoolHost,
    StorageConfig,
    WeightUpdater,
)

TOKEN = b"a token of this test"
EXTRA = {"backend_name": "moonpool", "interface_v1": 1}
Make = Callable[..., MoonpoolHiCache]


class Node:
    """A node at a socket, which may come and go."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "n.sock"
        self.server: _native.Server | None = None

    def start(self, size: int = 16 << 20) -> Node:
        self.server = _native.Server(str(self.socket), [("default", size)], TOKEN)
        self.server.start()
        return self

    def stop(self) -> None:
        if self.server is not None:
            assert self.server.check_integrity()
            self.server.stop()
            self.server = None


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


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(compat, "server_args", lambda: engine)
    monkeypatch.setattr(compat, "model_config", lambda args: args)
    monkeypatch.setattr(updates, "_replaced", False)
    monkeypatch.setattr(compat, "weight_updater", lambda: WeightUpdater)
    monkeypatch.setattr(compat, "first_page", lambda pool: range(pool.page_size))
    return engine


@pytest.fixture
def make(node: Node, engine: Engine) -> Iterator[Make]:
    """make(pool, **fields of the storage config, extra={...}): a backend with its memory registered."""
    made: list[MoonpoolHiCache] = []

    def make(pool: HostPool, extra: dict[str, Any] | None = None, **config: Any) -> MoonpoolHiCache:
        keys = {**EXTRA, "node": str(node.socket), **(extra or {})}
        mla = isinstance(pool, MLATokenToKVPoolHost)
        backend = MoonpoolHiCache(StorageConfig(keys, is_mla_model=mla, **config), {})
        made.append(backend)
        backend.register_mem_pool_host(pool)
        return backend

    yield make
    for backend in made:
        backend.close()
