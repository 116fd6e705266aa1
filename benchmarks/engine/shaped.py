"""Loads of an engine in this process, as slow as over a link of a given speed: a load is handed to its native
thread only when such a link would have carried its bytes, so that nothing is in memory before."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from moonpool.connectors.vllm.pool import Pool
from moonpool.connectors.vllm.tiers import object_sizes

_submit_load, _poll = Pool.submit_load, Pool.poll


@dataclass
class _Waiting:
    due_s: float
    seconds: float
    arguments: tuple[Any, ...]


class Link:
    """What all loads of this process go through from here on, one after the other."""

    def __init__(self, bytes_per_s: float, *, break_from: int = 0) -> None:
        """break_from: from this load on, counted from 1, the objects are not where they were; 0: none."""
        self._bytes_per_s, self._break_from = bytes_per_s, break_from
        self._free_s = 0.0
        self._numbers = itertools.count(1)
        self._waiting: dict[int, dict[tuple[str, int], _Waiting]] = {}  # by the pool
        self._sent: dict[tuple[int, Any], tuple[Any, float]] = {}
        self.loads = 0

        def submit_load(pool: Pool, holders: bytes, descriptors: bytes, *rest: Any) -> Any:
            return self._submit(pool, holders, descriptors, *rest)

        def poll(pool: Pool) -> Sequence[tuple[Any, Any]]:
            return self._answers(pool)

        Pool.submit_load = submit_load
        Pool.poll = poll

    @staticmethod
    def take_down() -> None:
        """Loads are as fast as they are."""
        Pool.submit_load = _submit_load
        Pool.poll = _poll

    def _submit(self, pool: Pool, holders: bytes, descriptors: bytes, *rest: Any) -> Any:
        number = next(self._numbers)
        self.loads = number
        if 0 < self._break_from <= number:
            holders = bytes(16)
        seconds = float(object_sizes(descriptors).sum()) / self._bytes_per_s
        self._free_s = max(self._free_s, time.monotonic()) + seconds
        ticket = ("shaped", number)
        waiting = _Waiting(self._free_s, seconds, (holders, descriptors, *rest))
        self._waiting.setdefault(id(pool), {})[ticket] = waiting
        return ticket

    def _answers(self, pool: Pool) -> Sequence[tuple[Any, Any]]:
        now_s, waiting = time.monotonic(), self._waiting.get(id(pool), {})
        for ticket in [ticket for ticket, load in waiting.items() if load.due_s <= now_s]:
            load = waiting.pop(ticket)
            self._sent[id(pool), _submit_load(pool, *load.arguments)] = (ticket, load.seconds)
        answers: list[tuple[Any, Any]] = []
        for ticket, answer in _poll(pool):
            shaped = self._sent.pop((id(pool), ticket), None)
            if shaped is not None:
                answer = SimpleNamespace(
                    ok=answer.ok,
                    bytes_loaded=answer.bytes_loaded,
                    error=answer.error,
                    seconds=shaped[1] + answer.seconds,
                )
            answers.append((ticket if shaped is None else shaped[0], answer))
        return answers
