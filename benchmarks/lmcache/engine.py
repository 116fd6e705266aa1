"""One real LMCache engine over one remote backend: ``python -m benchmarks.lmcache.engine FD CONFIG.json``.

Runs in the interpreter that has LMCache; answers JSON lines on the socket FD (see processes.Talker).

    {"op": "store", "seed": n}       store() of a new prompt: seconds until it returned, until all is visible
    {"op": "retrieve", "seed": n}    seconds of retrieve(), tokens that came, and whether the bytes are right
    {"op": "lookup", "seed": n}      seconds of lookup(), tokens found
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

from benchmarks.processes import serve

VISIBLE_TIMEOUT_S = 10.0


class CpuCache(MockGPUConnector):  # type: ignore[misc]
    """A KV cache in CPU memory, [2, layers, tokens, hidden], where a GPU's would be."""

    def __init__(self, kv_shape: tuple[int, ...], tokens: int, dtype: torch.dtype) -> None:
        super().__init__(kv_shape)
        layers, two, _, heads, head_size = kv_shape
        self.kv = torch.zeros((two, layers, tokens, heads * head_size), dtype=dtype)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        for memory, start, end in zip(memory_objs, starts, ends, strict=True):
            memory.tensor.copy_(self.kv[:, :, start:end])

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        for memory, start, end in zip(memory_objs, starts, ends, strict=True):
            self.kv[:, :, start:end].copy_(memory.tensor)


class Engine:
    """LMCache's engine, as an in-process inference engine uses it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.tokens: int = options["tokens"]
        config = LMCacheEngineConfig.from_dict(options["lmcache"])
        dtype = getattr(torch, options.get("dtype", "bfloat16"))
        kv_shape = (options["layers"], 2, config.chunk_size, options["heads"], options["head_size"])
        metadata = LMCacheMetadata(
            model_name=options.get("model", "bench/model"),
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=dtype,
            kv_shape=kv_shape,
            chunk_size=config.chunk_size,
        )
        self.cache = CpuCache(kv_shape, self.tokens, dtype)
        self.engine = LMCacheEngineBuilder.get_or_create(
            "bench", config, metadata, self.cache, lambda *_: None, lambda value, *_: value
        )
        self.engine.post_init()

    def prompt(self, seed: int) -> list[int]:
        source = random.Random(seed)
        return [source.randrange(100_000) for _ in range(self.tokens)]

    def expected(self, seed: int) -> torch.Tensor:
        """Other bytes for each seed, and cheap to make: one random row, of which each plane has a form of its
        own (see planes)."""
        generator = torch.Generator().manual_seed(seed)
        row = torch.randint(
            0, 1 << 15, (self.cache.kv[0, 0].numel(),), dtype=torch.int16, generator=generator
        )
        return row.view(self.cache.kv.shape[2:])

    def planes(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Keys and values of each layer, and what their bits are xored with: exchanged planes are seen."""
        return enumerate(self.cache.kv.view(torch.int16).flatten(0, 1))

    def fill(self, seed: int) -> None:
        expected = self.expected(seed)
        for number, plane in self.planes():
            torch.bitwise_xor(expected, number, out=plane)

    def is_filled(self, seed: int, tokens: int) -> bool:
        expected = self.expected(seed)[:tokens]
        return all(torch.equal(plane[:tokens] ^ number, expected) for number, plane in self.planes())

    def store(self, seed: int) -> dict[str, Any]:
        tokens = self.prompt(seed)
        self.fill(seed)
        start_s = time.perf_counter()
        self.engine.store(tokens)
        returned_s = time.perf_counter() - start_s
        while (found := self.engine.lookup(tokens)) < self.tokens:
            if time.perf_counter() - start_s > VISIBLE_TIMEOUT_S:
                break
            time.sleep(0.0005)  # an engine does not spin either
        return {"returned_s": returned_s, "visible_s": time.perf_counter() - start_s, "tokens": found}

    def retrieve(self, seed: int) -> dict[str, Any]:
        tokens = self.prompt(seed)
        self.cache.kv.zero_()
        start_s = time.perf_counter()
        mask = self.engine.retrieve(tokens)
        seconds = time.perf_counter() - start_s
        found = int(mask.sum())
        return {"seconds": seconds, "tokens": found, "right": self.is_filled(seed, found)}

    def lookup(self, seed: int) -> dict[str, Any]:
        tokens = self.prompt(seed)
        start_s = time.perf_counter()
        found = self.engine.lookup(tokens)
        return {"seconds": time.perf_counter() - start_s, "tokens": found}


def main() -> None:
    descriptor, path = sys.argv[1:]
    options = json.loads(Path(path).read_text())
    torch.set_num_threads(1)  # copies of many threads disturb the very copies that are measured

    def start() -> tuple[object, Callable[[Any], object]]:
        engine = Engine(options)
        ready = {"bytes": engine.cache.kv.numel() * engine.cache.kv.element_size()}
        return ready, lambda command: getattr(engine, command["op"])(command["seed"])

    serve(descriptor, start)
    LMCacheEngineBuilder.destroy("bench")


if __name__ == "__main__":
    try:
        main()
    finally:
        os._exit(0)  # LMCache's threads would go on for ever
