"""The remote connector under LMCache's own RemoteBackend."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat

from moonpool.connectors.lmcache import remote_connector
from moonpool.connectors.lmcache.remote_connector import ZERO_COPY_SHARE
from tests.connectors.lmcache.real.beds import (
    BY_COPY,
    Backend,
    Make,
    expected,
)
from tests.connectors.own_node import Node
from tests.core.store_bed import until


@pytest.mark.parametrize("options", [{}, BY_COPY], ids=["lent", "copied"])
def test_nothing_but_the_url(options: dict[str, Any], node: Node, make: Make) -> None:
    node.start()
    backend = make(**options)
    assert backend.contains([1, 2, 3]) == 0
    assert backend.get([1]) == [None]
    backend.put([1, 2, 3])
    assert backend.contains([1, 2, 3, 4]) == 3
    assert backend.contains([1, 9, 3]) == 1
    assert backend.get([1, 2, 3, 4]) == [16, 16, 16, None]
    until(lambda: node.pinned() == 0)


def test_the_single_calls(node: Node, make: Make) -> None:
    node.start()
    backend = make()
    (key,) = backend.keys(7)
    assert not backend.backend.contains(key)
    assert not backend.connector.exists_sync(key)
    backend.backend.submit_put_task(key, backend.chunk(7)).result(10)
    assert backend.backend.contains(key)
    assert backend.connector.exists_sync(key)
    memory = backend.backend.get_blocking(key)
    assert memory is not None
    assert memory.tensor.shape[2] == 16
    assert backend.run(backend.connector.list()) == [key.to_string()]
    assert backend.backend.remove(key)
    assert not backend.backend.remove(key)
    assert backend.run(backend.connector.list()) == []


def test_the_forms_of_save_chunk_meta_share(node: Node, make: Make) -> None:
    node.start()
    first, second = make(), make(extra_config={"save_chunk_meta": False})
    assert (first.connector.save_chunk_meta, second.connector.save_chunk_meta) == (True, False)
    first.put([1])
    second.put([2])
    assert second.get([1, 2]) == first.get([1, 2]) == [16, 16]


def test_a_chunk_that_is_not_full(node: Node, make: Make) -> None:
    node.start()
    first, second = make(), make()
    first.put([1, 2])
    first.put([3], tokens=5)
    assert second.contains([1, 2, 3]) == 3
    assert second.get([1, 2, 3, 4]) == [16, 16, 5, None]


@pytest.mark.parametrize("options", [{}, BY_COPY], ids=["lent", "copied"])
def test_prefixes_without_waiting(options: dict[str, Any], node: Node, make: Make) -> None:
    node.start()
    backend = make(**options)
    backend.put([1, 2, 4])
    keys = backend.keys(1, 2, 3, 4)
    connector = backend.connector
    assert backend.run(connector.batched_async_contains("lookup", keys)) == 2
    free = backend.memory.memory_allocator.pin_allocator.address_manager.get_free_size()
    chunks = backend.run(connector.batched_get_non_blocking("lookup", keys))
    assert len(chunks) == 2
    for chunk in chunks:
        chunk.ref_count_down()
    until(lambda: node.pinned() == 0)
    assert backend.memory.memory_allocator.pin_allocator.address_manager.get_free_size() == free


def test_compressed_bytes(node: Node, make: Make) -> None:
    node.start()
    backend = make()
    (key,) = backend.keys(6)
    backend.run(backend.connector.put(key, BytesBufferMemoryObj(b"compressed")))
    found = backend.run(backend.connector.get(key))
    assert (found.get_memory_format(), bytes(found.byte_array)) == (MemoryFormat.BINARY_BUFFER, b"compressed")


def test_what_has_a_header_takes_two_calls_for_all(node: Node, make: Make) -> None:
    node.start()
    backend = make(**BY_COPY)
    backend.put([1, 2, 3, 4], tokens=5)
    calls = []
    look = backend.connector._views

    async def views(names: list[str]) -> Any:
        calls.append(len(names))
        return await look(names)

    backend.connector._views = views
    assert backend.get([1, 2, 3, 4]) == [5, 5, 5, 5]
    assert calls == [4]


class Group:
    """As LMCache describes layers that are moved together."""

    def __init__(self, layers: int, hidden: int, dtype: torch.dtype) -> None:
        self.num_layers, self.hidden_dim_size, self.dtype = layers, hidden, dtype
        self.shape_desc = SimpleNamespace(kv_size=2)


def test_groups_that_lmcache_learns_of_later(node: Node, make: Make) -> None:
    """At its first transfer, when the connector exists already."""
    node.start()
    first, second, plain = make(), make(), make()
    groups = [Group(1, 32, torch.bfloat16), Group(1, 8, torch.float32)]
    for backend in (first, second):
        backend.metadata.kv_layer_groups_manager = SimpleNamespace(
            kernel_groups=groups, num_kernel_groups=len(groups)
        )
    shapes, dtypes = first.metadata.get_shapes(), first.metadata.get_dtypes()
    chunk = first.memory.allocate(shapes, dtypes, MemoryFormat.KV_2LTD)
    chunk.raw_data.fill_(7)
    (key,) = first.keys(1)
    first.run(first.connector.put(key, chunk))
    assert second.contains([1]) == 1
    found = second.run(second.connector.get(key))
    assert found.get_shapes() == shapes
    assert bytes(found.byte_array) == b"\7" * chunk.get_size()
    assert plain.get([1]) == [None]
    groups[1].dtype = torch.uint8  # of whatever 8 bits
    assert second.get([1]) == [None]
    second.run(second.connector.put(key, chunk))
    assert 'set the option "form"' in second.connector._refusal


# In place


def test_chunks_are_lent_in_place(node: Node, make: Make) -> None:
    node.start()
    backend = make()
    backend.put([1, 2])
    manager = backend.memory.memory_allocator.pin_allocator.address_manager
    free = manager.get_free_size()
    chunks = backend.run(backend.connector.batched_get(backend.keys(1, 2)))
    assert manager.get_free_size() == free
    assert node.pinned() == 2
    assert backend.connector._zero_copy.nbytes == 2 * chunks[0].get_size()
    for number in range(100, 2100, 100):  # more than the pool holds
        backend.put(range(number, number + 100))
    for number, chunk in zip((1, 2), chunks, strict=True):
        wanted = expected(number, chunk.tensor.shape, torch.bfloat16)
        assert torch.equal(chunk.tensor.view(torch.int16), wanted.view(torch.int16))
        assert len(chunk.byte_array) == chunk.get_size()
        chunk.ref_count_down()
    until(lambda: node.pinned() == 0)
    assert backend.connector._zero_copy.nbytes == 0


def test_what_is_lent_has_a_limit(node: Node, make: Make) -> None:
    node.start(1 << 20)
    backend = make()
    backend.put(range(100))
    lendable = (1 << 20) // ZERO_COPY_SHARE // backend.connector.full_chunk_size_bytes
    assert 0 < lendable < 90
    chunks = backend.run(backend.connector.batched_get(backend.keys(*range(90))))
    assert all(chunk is not None for chunk in chunks)
    assert node.pinned() == lendable
    for chunk in chunks:
        chunk.ref_count_down()
    until(lambda: node.pinned() == 0)


@pytest.mark.parametrize("options", [BY_COPY, {"enable_blending": True}])
def test_nothing_is_lent_to_who_keeps_it_or_writes(options: dict[str, Any], node: Node, make: Make) -> None:
    node.start()
    assert make().connector._may_lend
    assert not make(**options).connector._may_lend


def test_nothing_is_lent_to_kernels_of_a_gpu(node: Node, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read LMCache's memory by themselves, and without gpu_pin no driver knows the arena."""
    monkeypatch.setattr(remote_connector, "torch_device_type", "cuda")
    node.start()
    backend = make()
    backend.put(range(3))
    chunks = backend.run(backend.connector.batched_get(backend.keys(*range(3))))
    assert node.pinned() == 0
    for number, chunk in enumerate(chunks):
        wanted = expected(number, chunk.tensor.shape, torch.bfloat16)
        assert torch.equal(chunk.tensor.view(torch.int16), wanted.view(torch.int16))
        chunk.ref_count_down()


def test_lent_chunks_outlive_the_connector(node: Node, make: Make) -> None:
    node.start()
    backend = Backend()
    backend.put([1])
    (chunk,) = backend.run(backend.connector.batched_get(backend.keys(1)))
    backend.close()
    wanted = expected(1, chunk.tensor.shape, torch.bfloat16)
    assert torch.equal(chunk.tensor.view(torch.int16), wanted.view(torch.int16))
    chunk.ref_count_down()
    until(lambda: node.pinned() == 0)


def test_options_of_the_plugin(node: Node, make: Make, folder: Path) -> None:
    node.start()
    extra = {
        "remote_storage_plugin.moonpool.namespace": "a",
        "remote_storage_plugin.moonpool.west.node": str(node.socket),
    }
    first = make(remote_url=None, remote_storage_plugins=["moonpool"], extra_config=extra)
    west = make(remote_url=None, remote_storage_plugins=["moonpool.west"], extra_config=extra)
    by_url = make(remote_url=f"moonpool://{node.socket}?namespace=a")
    first.put([1])
    assert west.get([1]) == by_url.get([1]) == [16]
    named = {
        "remote_storage_plugin.mine.module_path": "moonpool.connectors.lmcache.remote",
        "remote_storage_plugin.mine.class_name": "MoonpoolAdapter",
    }
    assert make(remote_url="moonpool://?namespace=a", extra_config=named).get([1]) == [16]


@pytest.mark.parametrize(
    "url", ["moonpool://10.0.0.1:1", "moonpool://?colour=red", "moonpool://?require_pool=1"]
)
def test_what_cannot_be_is_said_at_start(node: Node, make: Make, url: str) -> None:
    with pytest.raises(IrrecoverableException):
        make(remote_url=url)
