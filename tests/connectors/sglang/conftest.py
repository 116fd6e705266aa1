"""What the tests share: backends that use a node of this process's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moonpool.connectors.sglang import MoonpoolHiCache, compat, updates
from tests.connectors.own_node import Node
from tests.connectors.sglang.fakes import (
    Engine,
    HostPool,
    MLATokenToKVPoolHost,
    StorageConfig,
    WeightUpdater,
)

EXTRA = {"backend_name": "moonpool", "interface_v1": 1}
Make = Callable[..., MoonpoolHiCache]


@pytest.fixture
def node(node: Node) -> Node:
    node.slab_bytes = 0  # as nodes choose it
    return node


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
