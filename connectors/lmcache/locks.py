"""Which keys are locked, and under which pin of the pool: pure bookkeeping.

A lookup pins all that it finds under one pin. Each key of it is unlocked by itself; the pin ends with the
last.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol


class Released(Protocol):
    def release(self) -> None: ...


@dataclass(eq=False)
class Lock:
    """``keys_left`` keys are still locked under ``pin``."""

    pin: Released
    keys_left: int


class Locks:
    """Any thread may call."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[Hashable, deque[Lock]] = defaultdict(deque)

    def add(self, pin: Released, keys: Iterable[Hashable]) -> None:
        """A lookup found these, at least one. A key may be locked several times, also by one lookup."""
        found = list(keys)
        lock = Lock(pin, len(found))
        with self._guard:
            for key in found:
                self._locks[key].append(lock)

    def pin_of(self, key: Hashable) -> Released | None:
        """A pin under which the key is readable; None when it is not locked."""
        with self._guard:
            locks = self._locks.get(key)
            return locks[0].pin if locks else None

    def release(self, keys: Iterable[Hashable]) -> None:
        """Unlocks each key once, its oldest lock first; keys that are not locked are no error."""
        ended = []
        with self._guard:
            for key in keys:
                locks = self._locks.get(key)
                if not locks:
                    continue
                lock = locks.popleft()
                if not locks:
                    del self._locks[key]
                lock.keys_left -= 1
                if lock.keys_left == 0:
                    ended.append(lock.pin)
        for pin in ended:
            pin.release()

    def clear(self) -> None:
        """Ends all."""
        with self._guard:
            pins = {id(lock): lock.pin for locks in self._locks.values() for lock in locks}
            self._locks.clear()
        for pin in pins.values():
            pin.release()

    def __len__(self) -> int:
        """How many keys are locked."""
        with self._guard:
            return len(self._locks)
