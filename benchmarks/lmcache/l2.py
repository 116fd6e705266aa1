"""One L2 adapter of LMCache's server: ``python -m benchmarks.lmcache.l2 FD CONFIG.json``, driven as the
server's controllers do, through LMCache's own factory. Runs in the interpreter that has LMCache; answers JSON
lines on the socket FD, as engine.py does.

    {"op": "store", "seed": n}       seconds of a store task of 16 new chunks, and until a lookup finds all
    {"op": "retrieve", "seed": n}    seconds of lookup_and_lock, load and unlock; whether the bytes are right
    {"op": "lookup", "seed": n}      seconds of lookup_and_lock and unlock
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from benchmarks.processes import serve

TIMEOUT_S = 20.0


class Adapter:
    """With chunks that lie in one piece of memory, as those of the server's L1 do."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.chunks: int = options["tokens"] // options["chunk_tokens"]
        self.tokens: int = options["tokens"]
        hidden = options["heads"] * options["head_size"]
        self.shape = torch.Size([2, options["layers"], options["chunk_tokens"], hidden])
        self.layout = MemoryLayoutDesc([self.shape], [torch.bfloat16])
        self.memory = torch.zeros(self.chunks * self.shape.numel(), dtype=torch.bfloat16)
        self.objects = [self._object(raw) for raw in self.memory.view(torch.uint8).chunk(self.chunks)]
        config = get_l2_adapter_config_class(options["l2"]["type"]).from_dict(options["l2"])
        size = self.memory.nbytes
        self.adapter = create_l2_adapter(config, L1MemoryDesc(self.memory.data_ptr(), size, 4096))

    def _object(self, raw: torch.Tensor) -> TensorMemoryObj:
        meta = MemoryObjMetadata(
            self.shape,
            torch.bfloat16,
            raw.data_ptr(),
            raw.nbytes,
            1,
            fmt=MemoryFormat.KV_2LTD,
            shapes=[self.shape],
            dtypes=[torch.bfloat16],
        )
        return TensorMemoryObj(raw, meta, parent_allocator=None)

    def keys(self, seed: int) -> list[ObjectKey]:
        return [
            ObjectKey((seed << 32 | i).to_bytes(8, "big"), "bench/model", 0x01000100)
            for i in range(self.chunks)
        ]

    def expected(self, seed: int) -> torch.Tensor:
        """Of all chunks: one random piece, which each chunk has xored with its number."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 1 << 15, (self.shape.numel(),), dtype=torch.int16, generator=generator)

    def planes(self) -> list[torch.Tensor]:
        return list(self.memory.view(torch.int16).chunk(self.chunks))

    def store(self, seed: int) -> dict[str, Any]:
        expected = self.expected(seed)
        for number, plane in enumerate(self.planes()):
            torch.bitwise_xor(expected, number, out=plane)
        start_s = time.perf_counter()
        task = self.adapter.submit_store_task(self.keys(seed), self.objects)
        self._wait(self.adapter.get_store_event_fd())
        ok = self.adapter.pop_completed_store_tasks()[task].is_successful()
        returned_s = time.perf_counter() - start_s
        while (found := self._found(seed)) < self.chunks and time.perf_counter() - start_s < TIMEOUT_S:
            time.sleep(0.0005)
        seconds = time.perf_counter() - start_s
        return {
            "returned_s": returned_s,
            "visible_s": seconds,
            "tokens": found * self.tokens // self.chunks * ok,
        }

    def retrieve(self, seed: int) -> dict[str, Any]:
        self.memory.zero_()
        start_s = time.perf_counter()
        self._lookup(seed)
        task = self.adapter.submit_load_task(self.keys(seed), self.objects)
        self._wait(self.adapter.get_load_event_fd())
        loaded = self.adapter.query_load_result(task)
        self.adapter.submit_unlock(self.keys(seed))
        seconds = time.perf_counter() - start_s
        found = sum(loaded.test(i) for i in range(self.chunks))
        expected = self.expected(seed)
        right = all(torch.equal(plane ^ number, expected) for number, plane in enumerate(self.planes()))
        return {"seconds": seconds, "tokens": found * self.tokens // self.chunks, "right": right}

    def lookup(self, seed: int) -> dict[str, Any]:
        start_s = time.perf_counter()
        found = self._found(seed)
        return {"seconds": time.perf_counter() - start_s, "tokens": found * self.tokens // self.chunks}

    def _found(self, seed: int) -> int:
        found = self._lookup(seed)
        self.adapter.submit_unlock(self.keys(seed))
        return found

    def _lookup(self, seed: int) -> int:
        task = self.adapter.submit_lookup_and_lock_task(self.keys(seed), {0: self.layout})
        self._wait(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        return sum(found.test(i) for i in range(self.chunks))

    def _wait(self, fd: int) -> None:
        if not select.select([fd], [], [], TIMEOUT_S)[0]:
            raise TimeoutError(f"nothing ended within {TIMEOUT_S:g} s")
        os.eventfd_read(fd)


def main() -> None:
    descriptor, path = sys.argv[1:]
    options = json.loads(Path(path).read_text())
    torch.set_num_threads(1)

    with ExitStack() as stack:

        def start() -> tuple[object, Callable[[Any], object]]:
            adapter = Adapter(options)
            stack.callback(adapter.adapter.close)
            ready = {"bytes": adapter.memory.nbytes}
            return ready, lambda command: getattr(adapter, command["op"])(command["seed"])

        serve(descriptor, start)


if __name__ == "__main__":
    try:
        main()
    finally:
        os._exit(0)  # LMCache's threads would go on for ever
