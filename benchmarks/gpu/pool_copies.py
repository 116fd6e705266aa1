"""Saves of a KV cache on a card to a node's memory and loads of it, as vLLM's connector makes them."""

from __future__ import annotations

import os
import select
import statistics
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.gpu.card import Card
from benchmarks.gpu.kv_cache import BLOCK_TOKENS, HEADS, OBJECT_BYTES, ORDERS, KvCache, same_blocks
from benchmarks.processes import Failed
from moonpool import _native
from moonpool.connectors.pinned_arena import ALL
from moonpool.core.bench.load import cpu_seconds

NAME = struct.Struct("<QQQQ")
FORMS = ("ring", "pinned")
RING_BYTES, COPY_THREADS = 64 << 20, 4  # the connectors' defaults
TIMEOUT_S = 60.0
SETTLED_S = 20.0  # how long the node may gather its memory


@dataclass
class Times:
    """Of one kind of copy, a value for each round: seconds, and CPU seconds of this process and the node."""

    spent_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def gb_s(self, size: int) -> float:
        return size / statistics.median(self.spent_s) / 1e9

    def cpu_s_gb(self, size: int) -> float:
        return statistics.median(self.cpu_s) / (size / 1e9)


class PoolCopies:
    def __init__(
        self, card: Card, source: KvCache, target: KvCache, socket: str, token: bytes, node_pid: int
    ) -> None:
        self.card, self.source, self.target = card, source, target
        self._pids = [os.getpid(), node_pid]
        self._client = _native.Client(socket, token, fingerprint=bytes(32), timeout_s=10.0)
        self._client.connect()
        self._worker = _native.Worker(self._client)
        self._numbers = 0
        self._savers = {order: self._open(source, order) for order in ORDERS}
        self._loaders = {(order, form): self._open(target, order) for order in ORDERS for form in FORMS}

    def pin(self) -> str:
        """Pins the node's memory for the loaders of that form, all that the node has settled by then; how
        much."""
        said = ""
        for (_, form), kv in self._loaders.items():
            if form != "pinned":
                continue
            start_s, pins = time.perf_counter(), kv.pin_arena(self._client, ALL)
            spent_s = time.perf_counter() - start_s
            deadline_s = start_s + SETTLED_S
            while pins.pinned_bytes < pins.arena_bytes and time.perf_counter() < deadline_s:
                time.sleep(0.1)
                pins = kv.pin_arena(self._client, ALL)
            said += f"{pins.pinned_bytes >> 20} of {pins.arena_bytes >> 20} MiB are pinned {pins.why} "
            said += f"(the first call took {spent_s:.3f} s); "
        return said

    def save(self, order: str, tokens: int, staged: Times, stored: Times) -> bytes:
        """Saves the first blocks of the source under new names; returns these."""
        names = self._new_names(tokens)
        ids, columns = self._places(tokens)
        cpu_s, start_s = cpu_seconds(self._pids), time.perf_counter()
        ticket = self._worker.submit_save(
            names, NAME.size, bytes(len(names)), self._savers[order], ids, columns
        )
        answers = self._answers(ticket, 1)
        staged.spent_s.append(time.perf_counter() - start_s)
        answer = answers[-1]
        if isinstance(answer, _native.SaveStaged):
            answer = self._answers(ticket, 1)[-1]
        stored.spent_s.append(time.perf_counter() - start_s)
        stored.cpu_s.append(cpu_seconds(self._pids) - cpu_s)
        if answer.error or answer.stored != len(ids):
            raise Failed(f"{answer.stored} of {len(ids)} objects were saved: {answer.error}")
        return names

    def load(self, order: str, form: str, tokens: int, names: bytes, times: Times, *, check: bool) -> None:
        """Loads what was saved into other blocks of the target."""
        [found] = self._answers(self._worker.submit_prefix(names, NAME.size, HEADS), 1)
        blocks = tokens // BLOCK_TOKENS
        if found.blocks != blocks:
            raise Failed(f"the pool has {found.blocks} of {blocks} blocks: {found.error}")
        ids, columns = self._places(tokens)
        moved = (np.uint32(self.target.blocks - 1) - ids).astype(np.uint32)
        cpu_s, start_s = cpu_seconds(self._pids), time.perf_counter()
        ticket = self._worker.submit_load(
            found.holders, found.descriptors, self._loaders[order, form], moved, columns
        )
        [answer] = self._answers(ticket, 1)
        times.spent_s.append(time.perf_counter() - start_s)
        times.cpu_s.append(cpu_seconds(self._pids) - cpu_s)
        self._worker.release(found.pin_id)
        if answer.error or answer.bytes_loaded != len(ids) * OBJECT_BYTES:
            raise Failed(f"{answer.bytes_loaded} bytes of {len(ids)} objects were loaded: {answer.error}")
        if check and not same_blocks(self.card, self.source, self.target, ids[::HEADS], moved[::HEADS]):
            raise Failed(f"a load ({order}, {form}) wrote other bytes than were saved")

    def close(self) -> None:
        for kv in [*self._savers.values(), *self._loaders.values()]:
            kv.close(3.0)
        self._worker.close()
        self._client.close()

    def _open(self, cache: KvCache, order: str) -> _native.DeviceKv:
        table = _native.PartTable(cache.rows(order))
        return _native.DeviceKv(0, table, cache.blocks, RING_BYTES, COPY_THREADS)

    def _new_names(self, tokens: int) -> bytes:
        self._numbers += 1
        return b"".join(
            NAME.pack(0, self._numbers, block, head)
            for block in range(tokens // BLOCK_TOKENS)
            for head in range(HEADS)
        )

    def _places(self, tokens: int) -> tuple[Any, Any]:
        blocks = np.arange(tokens // BLOCK_TOKENS, dtype=np.uint32)
        return np.repeat(blocks, HEADS), np.tile(np.arange(HEADS, dtype=np.uint16), len(blocks))

    def _answers(self, ticket: int, count: int) -> list[Any]:
        deadline_s, found = time.monotonic() + TIMEOUT_S, []
        while len(found) < count:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise Failed(f"no answer within {TIMEOUT_S:g} s")
            select.select([self._worker.eventfd], [], [], left_s)
            found += [answer for number, answer in self._worker.poll() if number == ticket]
        return found
