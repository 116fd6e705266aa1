"""One HiCache backend over SGLang's own host pool, without a server: stores pages, finds them, loads them.

    python -m benchmarks.sglang.storage FD BACKEND EXTRA_CONFIG STORING_PIDS

run by a Python with SGLang, by SGLang's own classes for pool and backend. Answers requests on the socket FD:
{"shape": number, "seed": text} -> {"figures": {verb: {"wall_s", "cpu_s"}}}. The host memory holds the pages
twice, where they are stored from and where they are loaded to; all bytes are compared after each pass,
outside of what is timed. CPU is of this process and of those that store.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.processes import serve
from benchmarks.sglang.shapes import LAYERS, PAGE_TOKENS, SHAPES, Shape
from moonpool.core.bench.load import cpu_seconds

LAYOUT = "page_first_direct"
MISSES = 20  # one is too short to be measured


def host_pool(shape: Shape) -> Any:
    """SGLang's host pool with two halves; only what allocates device memory is left out."""
    import torch
    from sglang.srt.mem_cache.pool_host import mha, mla
    from sglang.srt.mem_cache.pool_host.common import get_allocator_from_storage

    kind = mla.MLATokenToKVPoolHost if shape.mla else mha.MHATokenToKVPoolHost
    pool = object.__new__(kind)
    pool.layout, pool.layer_num, pool.target_layer_num, pool.start_layer = LAYOUT, LAYERS, LAYERS, 0
    pool.page_num, pool.page_size, pool.size = 2 * shape.pages, PAGE_TOKENS, 2 * shape.pages * PAGE_TOKENS
    pool.head_num, pool.head_dim, pool.v_head_dim, pool.kv_cache_dim = (
        shape.heads,
        shape.dim,
        shape.dim,
        shape.dim,
    )
    pool.kv_lora_rank, pool.qk_rope_head_dim = shape.dim - 64, 64
    pool.dtype, pool.device, pool.pin_memory = torch.bfloat16, "cpu", False
    pool.size_per_token = pool._size_per_token = shape.page_bytes // PAGE_TOKENS
    pool.allocator = get_allocator_from_storage("default")
    pool._transfer_device = torch.device("cpu")  # 0.5.23
    pool.device_pool = type("Device", (), {"device": "cpu"})  # 0.5.18
    pool.kv_buffer = pool.init_kv_buffer()
    pool.kv_buffer.copy_(torch.randint(-(1 << 14), 1 << 14, pool.kv_buffer.shape).to(torch.bfloat16))
    return pool


class Driver:
    def __init__(self, backend: str, extra: dict[str, Any], pids: list[int]) -> None:
        self.backend, self.extra, self.pids = backend, extra, pids
        self.made: dict[Shape, tuple[Any, Any]] = {}

    def storage(self, shape: Shape) -> tuple[Any, Any]:
        """(host pool, backend)"""
        if shape not in self.made:
            for _, storage in self.made.values():
                storage.close()
            self.made = {}
            pool = host_pool(shape)
            self.made[shape] = (pool, self._make(shape, pool))
        return self.made[shape]

    def _make(self, shape: Shape, pool: Any) -> Any:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=shape.mla,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name=f"benchmark {SHAPES.index(shape)}",
            extra_config=self.extra,
        )
        if self.backend == "ours":
            from moonpool.connectors.sglang import MoonpoolHiCache, compat

            model = _model(shape)
            compat.server_args = lambda: model
            compat.model_config = lambda args: args
            storage: Any = MoonpoolHiCache(config, {})
        else:
            path = "sglang.srt.mem_cache.storage.mooncake_store.mooncake_store"
            storage = importlib.import_module(path).MooncakeStore(config, pool)
        storage.register_mem_pool_host(pool)
        return storage

    def run(self, shape: Shape, seed: str) -> dict[str, dict[str, float]]:
        """One pass. Raises AssertionError when a backend did not do what it said."""
        import torch

        pool, storage = self.storage(shape)
        count = shape.pages
        keys = [hashlib.sha256(f"{seed}/{number}".encode()).hexdigest() for number in range(count)]
        unknown = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
        slots = torch.arange(2 * count * PAGE_TOKENS)
        source, target = slots[: count * PAGE_TOKENS], slots[count * PAGE_TOKENS :]
        figures = {}

        def timed(verb: str, call: Callable[[], Any]) -> Any:
            cpu_s, started_s = self.cpu_s(), time.perf_counter()
            answer = call()
            wall_s = time.perf_counter() - started_s
            figures[verb] = {"wall_s": wall_s, "cpu_s": self.cpu_s() - cpu_s}
            return answer

        missed = {timed(f"miss {number}", lambda: storage.batch_exists(unknown)) for number in range(MISSES)}
        stored = timed("set", lambda: storage.batch_set_v1(keys, source))
        found, loaded = timed("hit", lambda: (storage.batch_exists(keys), storage.batch_get_v1(keys, target)))
        assert (missed, found) == ({0}, count), (missed, found)
        assert all(stored), "not all pages were stored"
        assert all(loaded), "not all pages were loaded"
        halves = _halves(pool, shape)
        assert torch.equal(*(half.view(torch.int16) for half in halves)), "other bytes were loaded"
        halves[1].zero_()
        storage.clear()
        misses = [figures.pop(f"miss {number}") for number in range(MISSES)]
        figures["miss"] = {name: statistics.median(each[name] for each in misses) for name in misses[0]}
        return figures

    def cpu_s(self) -> float:
        return time.process_time() + cpu_seconds(self.pids)


def _halves(pool: Any, shape: Shape) -> tuple[Any, Any]:
    """What is stored, and where it is loaded to; page_first_direct: the page is the first dimension."""
    pages = pool.kv_buffer if shape.mla else pool.kv_buffer.transpose(0, 1)
    return pages[: shape.pages], pages[shape.pages :]


def _model(shape: Shape) -> Any:
    """What our backend's fingerprint reads of an engine."""
    from tests.connectors.sglang.fakes import Engine

    return Engine(kv_heads=shape.heads)


def main() -> None:
    descriptor, backend, extra, pids = sys.argv[1:]

    def start() -> tuple[object, Callable[[Any], object]]:
        driver = Driver(backend, json.loads(extra), json.loads(pids))
        return {"ready": True}, lambda request: {
            "figures": driver.run(SHAPES[request["shape"]], request["seed"])
        }

    serve(descriptor, start)
    os._exit(0)


if __name__ == "__main__":
    main()
