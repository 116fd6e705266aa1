"""``Pool`` on moonpool._native: one client, and a native thread for each kind of operation that must not wait
for another (a load never stands behind saves)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from moonpool import _native
from moonpool.connectors.vllm.pool import Answer, Columns, Indices, PartTable, Rows
from moonpool.connectors.vllm.settings import Settings

TIMEOUT_S = 2.0
QUEUE_MAX = 4096


def digests(token_ids: npt.NDArray[np.uint32], block_tokens: int, seed: bytes, previous: bytes) -> bytes:
    """The chain of moonpool.core.store.keys.block_digests, at native speed: 32 bytes per full block."""
    return _native.block_digests(token_ids, block_tokens, seed=seed, previous=previous)


class NativePool:
    """Tickets of loads and queries are even, those of saves odd."""

    def __init__(self, client: _native.Client) -> None:
        self._client = client
        self._reads = _native.Worker(client, threads=1, queue_max=QUEUE_MAX)
        self._writes = _native.Worker(client, threads=1, queue_max=QUEUE_MAX)

    @classmethod
    def dial(cls, settings: Settings, fingerprint: bytes) -> NativePool:
        """Connects. Raises Unavailable without a node, AuthError when the token does not fit."""
        return cls(settings.dial(fingerprint, TIMEOUT_S))

    def part_table(self, rows: Rows) -> PartTable:
        """See Pool."""
        return _native.PartTable(rows)

    def submit_prefix(self, names: bytes, name_size: int, width: int) -> int:
        """See Pool; runs on the thread for reads."""
        return 2 * self._reads.submit_prefix(names, name_size, width)

    def submit_load(
        self,
        holders: bytes,
        descriptors: bytes,
        parts: PartTable,
        indices: Indices,
        columns: Columns,
    ) -> int:
        """See Pool; runs on the thread for reads."""
        table = cast(_native.PartTable, parts)
        return 2 * self._reads.submit_load(holders, descriptors, table, indices, columns)

    def submit_save(
        self,
        names: bytes,
        name_size: int,
        parents: bytes,
        parts: PartTable,
        indices: Indices,
        columns: Columns,
    ) -> int:
        """See Pool; runs on the thread for writes."""
        table = cast(_native.PartTable, parts)
        return 1 + 2 * self._writes.submit_save(names, name_size, parents, table, indices, columns)

    def release(self, pin_id: int) -> None:
        """See Pool."""
        self._reads.release(pin_id)

    def poll(self) -> Sequence[tuple[int, Answer]]:
        """See Pool."""
        done = [(2 * ticket, answer) for ticket, answer in self._reads.poll()]
        done += [(1 + 2 * ticket, answer) for ticket, answer in self._writes.poll()]
        return done

    def close(self) -> None:
        """See Pool."""
        self._reads.close()
        self._writes.close()
        self._client.close()
