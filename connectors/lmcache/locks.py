"""Which keys are locked, and under which pin of the pool: bookkeeping without I/O.

A lookup pins all that it finds under one pin. LMCache unlocks each key by itself. The pin ends with the last
key, or with its deadline: LMCache abandons lookups without notice, and a key that is never unlocked would
stay in the pool for ever. A lock is a promise not to evict and nothing more: a load after its deadline reads
the right bytes or misses.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

UNASKED_S = 60.0  # until LMCache takes the answer of its lookup
HELD_S = 300.0  # seconds after the answer was taken; LMCache's own locks last as long


class Released(Protocol):
    """A pin."""

    def release(self) -> None:
        """Ends the pin. Never waits."""


@dataclass(eq=False)
class Lock:
    """``keys_left`` of the keys are still locked under ``pin``, until ``until_s`` of the clock."""

    pin: Released
    keys: list[Hashable]
    keys_left: int
    until_s: float


class Locks:
    """Any thread may call. expired: how many lookups' locks ended by their time."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._guard = threading.Lock()
        self._locks: dict[Hashable, deque[Lock]] = defaultdict(deque)
        self._open: set[Lock] = set()
        self.expired = 0

    def add(self, pin: Released, keys: Iterable[Hashable]) -> Lock:
        """A lookup found these, at least one. A key may be locked several times, also by one lookup. For
        UNASKED_S, unless hold() is called."""
        found = list(keys)
        lock = Lock(pin, found, len(found), self._now_s() + UNASKED_S)
        with self._guard:
            self._open.add(lock)
            for key in found:
                self._locks[key].append(lock)
        return lock

    def hold(self, lock: Lock) -> None:
        """LMCache knows of it, and has HELD_S from now on to unlock its keys."""
        with self._guard:
            lock.until_s = self._now_s() + HELD_S

    def expire(self) -> int:
        """Ends the locks whose time is over; how many."""
        with self._guard:
            now_s = self._now_s()
            over = [lock for lock in self._open if lock.until_s < now_s]
            for lock in over:
                self._open.remove(lock)
                for key in set(lock.keys):
                    left = deque(each for each in self._locks.pop(key, ()) if each is not lock)
                    if left:
                        self._locks[key] = left
            self.expired += len(over)
        for lock in over:
            lock.pin.release()
        return len(over)

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
                    self._open.remove(lock)
                    ended.append(lock.pin)
        for pin in ended:
            pin.release()

    def clear(self) -> None:
        """Ends all."""
        with self._guard:
            ended, self._open = self._open, set()
            self._locks.clear()
        for lock in ended:
            lock.pin.release()

    def __len__(self) -> int:
        """How many keys are locked."""
        with self._guard:
            return len(self._locks)
