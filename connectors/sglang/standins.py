"""Base classes, under SGLang's names, for processes without SGLang: type checks, tests of the backend."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class HiCacheStorage:
    """The base class of SGLang's storage backends."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Keeps the host pool."""
        self.mem_pool_host = mem_pool_host


class EmbeddingStore:
    """The base class of SGLang's embedding stores."""

    def get_key(self, mm_hash: str) -> str:
        """The name of an embedding."""
        return f"emb_{mm_hash}"


class PoolName(str, enum.Enum):  # noqa: UP042  as SGLang's: it hashes by its member's name
    """The names of host pools."""

    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"


@dataclass
class PoolTransferResult:
    """Hits of a v2 lookup, in pages."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    """What was moved since the last call: pages and GB/s of each call."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)
