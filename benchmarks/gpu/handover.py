"""Reads of a KV cache that another process has on the same card, over CUDA IPC."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.card import Card
from benchmarks.gpu.kv_cache import BLOCK_BYTES, BLOCK_TOKENS, CONTENT, HEADS, LAYERS, KvCache
from benchmarks.processes import Failed
from moonpool import TransferEngine
from moonpool.core.bench.load import cpu_seconds
from moonpool.core.transfer.types import Batch

Column = npt.NDArray[np.uint64]


def engine(name: str, token: bytes) -> TransferEngine:
    return TransferEngine(name, token=token, timeout_s=30.0)


class Reader:
    """Pieces of a cache there to other blocks of a cache here."""

    def __init__(self, card: Card, here: KvCache, there: KvCache, address: str, token: bytes) -> None:
        self.card, self.here, self.there = card, here, there
        self._engine = engine("reader", token)
        self._engine.register((here.address, here.size))
        self._peer = self._engine.open(address)
        found = [row.transport for row in self._peer.regions]
        if found != ["cuda_ipc"]:
            raise Failed(f"the cache of the other process is reached by {found}, not by cuda_ipc")

    def pieces(self, tokens: int, *, alike: bool) -> tuple[Column, Column, int]:
        """Where each piece goes and comes from, and its length: whole blocks of a layer between caches of one
        layout, else a token of a head from tokens first to heads first."""
        blocks = np.arange(tokens // BLOCK_TOKENS, dtype=np.uint64)
        stride = max(
            self.here.blocks // max(len(blocks), 1), 1
        )  # no two of them are neighbours, if there is room
        moved = np.uint64(self.here.blocks - 1) - blocks * np.uint64(stride)
        layers = np.arange(LAYERS, dtype=np.uint64)
        inner_to, inner_from, length = np.zeros(1, np.uint64), np.zeros(1, np.uint64), BLOCK_BYTES
        if not alike:
            token, head = np.meshgrid(np.arange(BLOCK_TOKENS), np.arange(HEADS), indexing="ij")
            inner_from = ((token * HEADS + head) * CONTENT).ravel().astype(np.uint64)
            inner_to = ((head * BLOCK_TOKENS + token) * CONTENT).ravel().astype(np.uint64)
            length = CONTENT

        def column(cache: KvCache, ids: Column, inner: Column) -> Column:
            layer = np.uint64(cache.address) + layers * np.uint64(cache.blocks * BLOCK_BYTES)
            block = ids * np.uint64(BLOCK_BYTES)
            found: Column = (layer[:, None, None] + block[None, :, None] + inner[None, None, :]).ravel()
            return found

        return column(self.here, moved, inner_to), column(self.there, blocks, inner_from), length

    def read(self, pieces: tuple[Column, Column, int], pids: list[int]) -> tuple[float, float]:
        """Seconds, and CPU seconds of the processes."""
        to, source, length = pieces
        batch = Batch("read", self._peer, to, source, np.full(len(to), length, np.uint64))
        cpu_s, start_s = cpu_seconds(pids), time.perf_counter()
        moved = self._engine.transfer(batch)
        spent = time.perf_counter() - start_s, cpu_seconds(pids) - cpu_s
        if moved != len(to) * length:
            raise Failed(f"{moved} of {len(to) * length} bytes were read")
        return spent

    def check(self, pieces: tuple[Column, Column, int], source: npt.NDArray[np.uint8]) -> None:
        """source: the bytes of the cache there. Raises Failed when a piece differs."""
        to, origin, length = pieces
        size = self.here.blocks * BLOCK_BYTES
        layer = self.card.pinned(size)
        for number in range(LAYERS):
            begin = self.here.address + number * size
            self.card.queue(layer.ctypes.data, begin, size)
            self.card.finish()
            inside = (to >= begin) & (to < begin + size)
            got = layer.reshape(-1, length)[
                ((to[inside] - np.uint64(begin)) // np.uint64(length)).astype(int)
            ]
            places = ((origin[inside] - np.uint64(self.there.address)) // np.uint64(length)).astype(int)
            if not np.array_equal(got, source.reshape(-1, length)[places]):
                raise Failed("a read over CUDA IPC wrote other bytes than were there")

    def close(self) -> None:
        self._engine.close()
