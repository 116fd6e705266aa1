"""Run by a Python with SGLang: ``real_pools.py SOCKET`` saves pages out of SGLang's own host pools, and loads
them into pools of every other layout. Only what allocates device memory is left out of the pools: their
shapes, strides and addresses are SGLang's.

Prints, for each kind, the layouts that were held against each other.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.common import get_allocator_from_storage
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from moonpool.connectors.sglang import MoonpoolHiCache, compat
from tests.connectors.sglang.fakes import Engine, page_keys

LAYERS, PAGES, TOKENS, HEADS, DIM = 3, 6, 4, 2, 8
LAYOUTS = {
    MHATokenToKVPoolHost: ["layer_first", "page_first", "page_first_direct", "page_head"],
    MLATokenToKVPoolHost: ["layer_first", "page_first", "page_first_direct"],
}


def make_pool(kind: Any, layout: str) -> Any:
    pool = object.__new__(kind)
    pool.layout, pool.layer_num, pool.target_layer_num, pool.start_layer = layout, LAYERS, LAYERS, 0
    pool.page_num, pool.page_size, pool.size = PAGES, TOKENS, PAGES * TOKENS
    pool.head_num, pool.head_dim, pool.v_head_dim, pool.kv_cache_dim = HEADS, DIM, DIM, DIM
    pool.dtype, pool.device, pool.pin_memory = torch.bfloat16, "cpu", False
    pool.allocator = get_allocator_from_storage("default")
    pool._transfer_device = torch.device("cpu")  # 0.5.23
    pool.device_pool = type("Device", (), {"device": "cpu"})  # 0.5.18
    pool.kv_buffer = pool.init_kv_buffer()
    return pool


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * TOKENS, (page + 1) * TOKENS) for page in pages])


def canonical(pool: Any, page: int) -> torch.Tensor:
    """[layer, plane, token, head, dim] of a page, read through SGLang's own get_data_page."""
    planes = 2 if type(pool) is MHATokenToKVPoolHost else 1
    heads = HEADS if planes == 2 else 1
    data = pool.get_data_page(page * TOKENS, flat=True)
    order = {
        "layer_first": ((planes, LAYERS, TOKENS, heads), (1, 0, 2, 3, 4)),
        "page_first": ((planes, TOKENS, LAYERS, heads), (2, 0, 1, 3, 4)),
        "page_first_direct": ((planes, LAYERS, TOKENS, heads), (1, 0, 2, 3, 4)),
        "page_head": ((planes, heads, TOKENS, LAYERS), (3, 0, 2, 1, 4)),
    }
    shape, axes = order[pool.layout]
    return data.view(*shape, DIM).permute(*axes)


def make_backend(pool: Any, socket: str) -> MoonpoolHiCache:
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=type(pool) is MLATokenToKVPoolHost,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="model",
        extra_config={"interface_v1": 1, "node": socket, "require_pool": True},
    )
    backend = MoonpoolHiCache(config, {})
    assert isinstance(backend, HiCacheStorage)
    backend.register_mem_pool_host(pool)
    return backend


def check_draft(layout: str, socket: str, seed: int) -> None:
    """A draft model's KV, in a pool of its own beside the target's."""
    keys, pages = page_keys(3, seed), []
    for number in (seed, 0):
        draft = make_pool(MHATokenToKVPoolHost, layout)
        draft.kv_buffer.view(torch.int16).fill_(0)
        if number:
            draft.kv_buffer.view(torch.int16).copy_(
                torch.arange(draft.kv_buffer.numel()).view_as(draft.kv_buffer)
            )
        backend = make_backend(make_pool(MHATokenToKVPoolHost, layout), socket)
        backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        move = backend.batch_set_v2 if number else backend.batch_get_v2
        found = move([PoolTransfer(name=PoolName.DRAFT, host_indices=slots(4, 0, 2), keys=keys)])
        assert found == {PoolName.DRAFT: [True] * 3}, found
        pages.append([canonical(draft, page).view(torch.int16) for page in range(PAGES)])
        backend.close()
    for page in range(PAGES):
        assert torch.equal(pages[0][page], pages[1][page]) == (page in (4, 0, 2)), (layout, page)


def main() -> None:
    engine: Any = Engine(kv_heads=HEADS, speculative_draft_load_format="dummy")
    compat.server_args = lambda: engine
    compat.model_config = lambda args: args
    seed = 0
    for kind, layouts in LAYOUTS.items():
        for source_layout, target_layout in itertools.product(layouts, layouts):
            seed += 1
            source, target = make_pool(kind, source_layout), make_pool(kind, target_layout)
            numbers = np.random.default_rng(seed).integers(
                0, 1 << 15, tuple(source.kv_buffer.shape), np.int16
            )
            source.kv_buffer.copy_(torch.from_numpy(numbers).view(torch.bfloat16))
            target.kv_buffer.zero_()
            first, second = make_backend(source, sys.argv[1]), make_backend(target, sys.argv[1])
            keys = page_keys(3, seed)
            assert first.batch_set_v1(keys, slots(4, 0, 2)) == [True] * 3
            assert second.batch_exists(keys) == 3
            assert second.batch_get_v1(keys, slots(1, 5, 3)) == [True] * 3
            for page, to in ((4, 1), (0, 5), (2, 3)):
                wanted, got = canonical(source, page), canonical(target, to)
                assert torch.equal(wanted.view(torch.int16), got.view(torch.int16)), (kind, source_layout)
            assert not canonical(target, 0).any()
            first.close()
            second.close()
        print(kind.__name__, *layouts)
    for layout in LAYOUTS[MHATokenToKVPoolHost]:
        check_draft(layout, sys.argv[1], seed=100)


if __name__ == "__main__":
    main()
