"""The storage manager of LMCache's server with its own controllers: what one stored, another prefetches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig, get_l2_adapter_config_class
from lmcache.v1.distributed.storage_manager import StorageManager

from tests.connectors.lmcache.real.l2 import BY_NAME, NATIVE, SHAPE, key, memory
from tests.connectors.own_node import Node
from tests.core.store_bed import until

LAYOUT = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
Make = Callable[[dict[str, Any]], StorageManager]


@pytest.fixture
def make(node: Node) -> Iterator[Make]:
    made: list[StorageManager] = []

    def make(spec: dict[str, Any]) -> StorageManager:
        l1 = L1ManagerConfig(L1MemoryManagerConfig(4 << 20, use_lazy=False, shm_name=""))
        l2 = L2AdaptersConfig([get_l2_adapter_config_class(spec["type"]).from_dict(spec)])
        made.append(StorageManager(StorageManagerConfig(l1, EvictionConfig("LRU"), l2)))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def store(manager: StorageManager, numbers: range) -> None:
    keys = [key(number) for number in numbers]
    reserved = manager.reserve_write(keys, LAYOUT)
    for number, one in zip(numbers, keys, strict=True):
        reserved[one].raw_tensor.copy_(memory(number).raw_data)
    manager.finish_write(keys)


def prefetched(manager: StorageManager, numbers: range) -> int:
    """How many came from L2, after a look at their bytes."""
    keys = [key(number) for number in numbers]
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)]))
    assert manager.wait_prefetch_status(handle, 30)
    result = manager.query_prefetch_status(handle)
    assert result is not None
    found = int(result.l2_hit_count)
    with manager.read_prefetched_results(keys[:found]) as objects:
        assert objects is not None
        for number, one in zip(numbers, objects, strict=False):
            assert torch.equal(one.raw_tensor, memory(number).raw_data)
    if found:
        manager.finish_read_prefetched(keys[:found])
    return found


@pytest.mark.parametrize("spec", [BY_NAME, NATIVE], ids=["moonpool", "native_plugin"])
def test_what_one_stored_another_prefetches(spec: dict[str, Any], node: Node, make: Make) -> None:
    node.start()
    first, second = make(spec), make(spec)
    store(first, range(5))
    until(lambda: node.objects() == 5)
    assert prefetched(second, range(7)) == 5
    until(lambda: node.pinned() == 0)  # unlocked after the load
    node.stop()
    store(second, range(10, 12))
    assert prefetched(first, range(20, 22)) == 0
