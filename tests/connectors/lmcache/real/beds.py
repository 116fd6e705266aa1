"""LMCache's remote backend in this process, and engines in processes of their own."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import RemoteBackend
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from benchmarks.processes import Talker
from moonpool.connectors.lmcache.remote_connector import MoonpoolConnector
from tests.core.store_bed import until

LAYERS, HEADS, HEAD_SIZE = 2, 2, 16
CONFIG = {"chunk_size": 16, "local_cpu": False, "max_local_cpu_size": 0.01, "remote_url": "moonpool://"}
BY_COPY = {"local_cpu": True}  # LMCache would keep what it gets, so nothing is lent


class Backend:
    """A RemoteBackend over our connector, as LMCache's storage manager makes it. metadata: fields of
    LMCache's, in the place of the usual ones; tags: of the requests."""

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        model: str = "org/model",
        metadata: dict[str, Any] | None = None,
        tags: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.config = LMCacheEngineConfig.from_dict({**CONFIG, **options})
        self.metadata = self.metadata_of(self.config, dtype, model, **metadata or {})
        self.requests = {f"lmcache.tag.{name}": value for name, value in (tags or {}).items()}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.memory = LocalCPUBackend(self.config, self.metadata, "cpu")
        plugins = self.config.remote_storage_plugins
        self.backend = RemoteBackend(
            self.config, self.metadata, self.loop, self.memory, "cpu", plugins[0] if plugins else None
        )

    @staticmethod
    def metadata_of(
        config: LMCacheEngineConfig, dtype: torch.dtype, model: str, **other: Any
    ) -> LMCacheMetadata:
        usual: dict[str, Any] = {
            "model_name": model,
            "world_size": 1,
            "local_world_size": 1,
            "worker_id": 0,
            "local_worker_id": 0,
            "kv_dtype": dtype,
            "kv_shape": (LAYERS, 2, config.chunk_size, HEADS, HEAD_SIZE),
            "chunk_size": config.chunk_size,
        }
        return LMCacheMetadata(**{**usual, **other})

    @property
    def connector(self) -> MoonpoolConnector:
        return self.backend.connection.getWrappedConnector()

    def keys(self, *hashes: int) -> list[CacheEngineKey]:
        return [
            CacheEngineKey(
                self.metadata.model_name,
                self.metadata.world_size,
                self.metadata.worker_id,
                number,
                self.metadata.kv_dtype,
                self.requests,
            )
            for number in hashes
        ]

    def chunk(self, number: int, tokens: int | None = None) -> MemoryObj:
        """Memory with bytes that are this number's own."""
        shapes = self.metadata.get_shapes(tokens)
        memory = self.memory.allocate(shapes, self.metadata.get_dtypes(), self.connector.meta_fmt)
        assert memory is not None
        memory.tensor.copy_(expected(number, memory.tensor.shape, self.metadata.kv_dtype))
        return memory

    def put(self, numbers: Sequence[int], tokens: int | None = None) -> None:
        """Stores chunks, and waits until LMCache has let go of them."""
        ended = []
        chunks = [self.chunk(number, tokens) for number in numbers]
        self.backend.batched_submit_put_task(
            self.keys(*numbers), chunks, on_complete_callback=lambda key: ended.append(key)
        )
        for chunk in chunks:
            chunk.ref_count_down()
        until(lambda: len(ended) == len(numbers))

    def get(self, numbers: Sequence[int]) -> list[int | None]:
        """Of each chunk how many tokens came, after a look at their bytes."""
        out: list[int | None] = []
        for number, memory in zip(
            numbers, self.backend.batched_get_blocking(self.keys(*numbers)), strict=True
        ):
            if memory is None:
                out.append(None)
                continue
            assert torch.equal(
                memory.tensor.view(torch.int16),
                expected(number, memory.tensor.shape, self.metadata.kv_dtype).view(torch.int16),
            )
            out.append(memory.tensor.shape[2])
            memory.ref_count_down()
        return out

    def contains(self, numbers: Sequence[int]) -> int:
        return int(self.backend.batched_contains(self.keys(*numbers)))

    def run(self, coroutine: Any, timeout_s: float = 30) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        """In LMCache's own order: memory first."""
        self.memory.close()
        self.backend.close()
        self.stop()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


Make = Callable[..., Backend]


def expected(number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    full = torch.randint(0, 1 << 15, (64, *shape[:2], shape[3]), dtype=torch.int16, generator=generator)
    return full[: shape[2]].movedim(0, 2).contiguous().view(dtype)


class EngineProcess:
    """A real LMCache engine (benchmarks/lmcache/engine.py); it is killed at the end, whatever the test left
    it doing.
    """

    def __init__(self, folder: Path, name: str, lmcache: dict[str, Any], **options: Any) -> None:
        shape = {"tokens": 120, "layers": LAYERS, "heads": HEADS, "head_size": HEAD_SIZE}
        config = folder / f"{name}.json"
        config.write_text(json.dumps({**shape, "lmcache": {**CONFIG, **lmcache}, **options}))
        self.talker = Talker(
            sys.executable, "benchmarks.lmcache.engine", [str(config)], folder / f"{name}.log"
        )
        self.talker.wait_ready(120)

    def tell(self, op: str, seed: int) -> None:
        self.talker.tell({"op": op, "seed": seed})

    def answer(self) -> Any:
        return self.talker.receive(60)

    def call(self, op: str, seed: int) -> Any:
        self.tell(op, seed)
        return self.answer()

    def end(self) -> None:
        """Gently."""
        self.talker.close()

    def kill(self) -> None:
        self.talker.process.kill()
        self.talker.close()
