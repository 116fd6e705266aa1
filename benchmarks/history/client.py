"""A client in one host: it asks one thing after another and notes what it was told:

    python -m benchmarks.history.client FD HOST PLANTED

FD is a socket of JSON lines: {"keys": [...], "seconds": S, "seed": N} -> the operations of that time;
{"read": [...]} -> one read of each key. PLANTED is a mistake, for the checker to find: "" for none;
"lost_removal": it says of some removals that they were done, and asks for none; "stale": it answers some
reads with a value that it read before.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from benchmarks.history.operations import DONE, GET, PARTLY, REMOVE, REPLACE, UNKNOWN, Operation
from benchmarks.processes import serve
from moonpool import Error, PutResult, Store, Unsure

WEIGHTS = {GET: 5, REPLACE: 4, REMOVE: 1}
CLIENTS_MAX = 1000
PAUSE_S = 0.002
LOST_SHARE = 0.05  # of the operations that a planted mistake concerns
AWAY = "master is away"  # what a write says that no master has ordered


class Client:
    def __init__(self, host: int, planted: str) -> None:
        self._host, self._planted = host, planted
        self._store = Store(timeout_s=2.0)
        self._next = 0
        self._read: dict[str, int] = {}

    def run(self, keys: list[str], seconds: float, seed: int) -> list[Operation]:
        rng = random.Random(seed * CLIENTS_MAX + self._host)
        until_s = time.monotonic() + seconds
        done = []
        while time.monotonic() < until_s:
            kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            done.append(self._one(kind, rng.choice(keys), rng.random() < LOST_SHARE))
            time.sleep(PAUSE_S)
        return done

    def read(self, keys: list[str]) -> list[Operation]:
        return [self._one(GET, key, False) for key in keys]

    def _one(self, kind: str, key: str, is_lost: bool) -> Operation:
        value, outcome = 0, UNKNOWN
        if kind != GET:
            self._next += 1
            value = self._next * CLIENTS_MAX + self._host
        begin_s = time.monotonic()
        with suppress(Error):
            if kind == GET:
                value, outcome = self._get(key, is_lost), DONE
            elif kind == REPLACE:
                outcome = outcome_of_put(self._store.put(key, value.to_bytes(8, "little") * 32, replace=True))
            elif is_lost and self._planted == "lost_removal":
                outcome = DONE
            else:
                outcome = outcome_of_removal(self._store.remove(key))
        return Operation(kind, self._host, key, value, begin_s, time.monotonic(), outcome)

    def _get(self, key: str, is_lost: bool) -> int:
        if is_lost and self._planted == "stale" and key in self._read:
            return self._read[key]
        found = self._store.get(key)
        if found is None:
            return 0
        copies = {bytes(found[at : at + 8]) for at in range(0, len(found), 8)}
        value = (
            int.from_bytes(copies.pop(), "little") if len(copies) == 1 else -1
        )  # torn: none has written that
        self._read.setdefault(key, value)
        return value


def outcome_of_put(result: PutResult) -> str:
    if not result or AWAY in result.reason:
        return UNKNOWN
    return PARTLY if "older value" in result.reason else DONE


def outcome_of_removal(removed: bool | Unsure) -> str:
    if isinstance(removed, Unsure):
        return UNKNOWN if AWAY in removed.nodes else PARTLY
    return DONE


def start(host: int, planted: str) -> tuple[object, Callable[[Any], object]]:
    client = Client(host, planted)

    def answer(asked: dict[str, Any]) -> object:
        if "read" in asked:
            return client.read(asked["read"])
        return client.run(asked["keys"], asked["seconds"], asked["seed"])

    return "ready", answer


if __name__ == "__main__":
    serve(sys.argv[1], lambda: start(int(sys.argv[2]), sys.argv[3]))
