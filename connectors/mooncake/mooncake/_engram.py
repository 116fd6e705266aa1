"""``EngramStore``: the embedding tables of one layer, an object for each head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ._codes import Code


@dataclass(slots=True)
class EngramStoreConfig:
    """The tables of an Engram.

    table_vocab_sizes: rows of the table of each head.
    embedding_dim: float32 numbers of a row.
    """

    table_vocab_sizes: list[int] = field(default_factory=lambda: [1024])
    embedding_dim: int = 64


class EngramStore:
    """Reads rows of tables that populate() stored. Raises RuntimeError where that does not work."""

    def __init__(self, layer_id: int, config: EngramStoreConfig, store: Any = None) -> None:
        self._keys = [f"engram:l{layer_id}:h{head}" for head in range(len(config.table_vocab_sizes))]
        self._rows = list(config.table_vocab_sizes)
        self._dim = config.embedding_dim
        self._store = store

    def get_embedding_dim(self) -> int:
        """Numbers of a row."""
        return self._dim

    def get_num_heads(self) -> int:
        """Number of tables."""
        return len(self._keys)

    def get_store_keys(self) -> list[str]:
        """The key of each table."""
        return list(self._keys)

    def get_table_vocab_sizes(self) -> list[int]:
        """Rows of each table."""
        return list(self._rows)

    def populate(self, embedding_buffers: list[Any]) -> None:
        """A float32 array of (rows, embedding_dim) for each head, in place of what was there."""
        if len(embedding_buffers) != len(self._keys):
            raise RuntimeError("embedding_buffers size must match num_heads")
        tables = [np.ascontiguousarray(table, np.float32) for table in embedding_buffers]
        for table, rows in zip(tables, self._rows, strict=True):
            if table.shape != (rows, self._dim):
                raise RuntimeError(f"a table of {table.shape} must have the shape {(rows, self._dim)}")
        if code := self._opened().upsert_batch(self._keys, tables):
            raise RuntimeError(f"EngramStore populate failed: {Code(code).name}")

    def lookup(self, row_ids: Any) -> Any:
        """row_ids of [B, L, H] -> float32 of [B, L, H, embedding_dim]."""
        ids = np.asarray(row_ids)
        if ids.ndim != 3 or ids.shape[2] != len(self._keys):
            raise RuntimeError("row_ids array must have shape [B, L, H]")
        answer = np.empty((*ids.shape, self._dim), np.float32)
        for head, held in enumerate(self._opened().batch_get_buffer(self._keys)):
            if held is None:
                raise RuntimeError(f"EngramStore lookup failed: {self._keys[head]} is not stored")
            if ((ids[..., head] < 0) | (ids[..., head] >= self._rows[head])).any():
                raise RuntimeError(f"EngramStore lookup failed: head {head} has {self._rows[head]} rows")
            table = np.frombuffer(held, np.float32).reshape(self._rows[head], self._dim)
            answer[..., head, :] = table[ids[..., head].astype(np.int64)]
        return answer

    def remove_from_store(self, force: bool = False) -> int:
        """How many tables there were."""
        return sum(code == Code.OK for code in self._opened().batch_remove(self._keys, force))

    def _opened(self) -> Any:
        if self._store is None:
            raise RuntimeError("EngramStore lookup failed: it was made without a store")
        return self._store
