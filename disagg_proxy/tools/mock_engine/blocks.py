"""The KV blocks of a mock engine: how many each holder has, and which full blocks are cached under which
digest.

    free blocks | cached, without holder (least recently used first) | held by requests and leases

Pure: ``changed`` is called with what was stored and removed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Holding:
    cached: list[bytes] = field(default_factory=list)  # digests held through the cache
    plain: int = 0  # blocks that no other can find


Changed = Callable[[Hashable, Sequence[int], Sequence[bytes]], None]


class Blocks:
    """count: of all blocks. changed: called with the holder whose blocks were stored, their indices in its
    chain, and the digests that were removed."""

    def __init__(self, count: int, changed: Changed = lambda holder, stored, removed: None) -> None:
        self.count = count
        self._changed = changed
        self._users: dict[bytes, int] = {}  # cached digest -> holders
        self._unused: OrderedDict[bytes, None] = OrderedDict()
        self._holdings: dict[Hashable, _Holding] = {}
        self._plain = 0

    @property
    def held(self) -> int:
        """Blocks that requests or leases hold."""
        return self._plain + len(self._users) - len(self._unused)

    @property
    def cached(self) -> int:
        """Blocks that have a digest, held or not."""
        return len(self._users)

    def cached_prefix(self, digests: Sequence[bytes]) -> int:
        """How many leading blocks of this chain are here."""
        for place, digest in enumerate(digests):
            if digest not in self._users:
                return place
        return len(digests)

    def take(self, holder: Hashable, digests: Sequence[bytes], count: int) -> int | None:
        """Holds ``count`` blocks for a request, its cached prefix first. Returns how many of them are cached;
        None when there is no room now."""
        hit = min(self.cached_prefix(digests), count)
        fresh = count - hit
        if fresh > self.count - self._plain - len(self._users) + self._unused_beside(digests[:hit]):
            return None
        holding = self._holdings[holder] = _Holding(list(digests[:hit]), fresh)
        for digest in holding.cached:
            self._users[digest] += 1
            self._unused.pop(digest, None)
        self._evict(fresh)
        self._plain += fresh
        return hit

    def publish(self, holder: Hashable, digests: Sequence[bytes]) -> None:
        """The holder has computed these blocks of its chain: from now on others find them."""
        holding = self._holdings[holder]
        stored = []
        for place in range(len(holding.cached), len(digests)):
            digest = digests[place]
            if not holding.plain:
                break
            if digest in self._users:  # computed twice: the copy stays plain until it is freed
                continue
            holding.plain -= 1
            self._plain -= 1
            holding.cached.append(digest)
            self._users[digest] = 1
            stored.append(place)
        if stored:
            self._changed(holder, stored, ())

    def hand(self, holder: Hashable, heir: Hashable) -> None:
        """Transfers all blocks of one holder to another."""
        self._holdings[heir] = self._holdings.pop(holder)

    def free(self, holder: Hashable) -> None:
        """Frees a holder's blocks. An unknown holder is ignored."""
        holding = self._holdings.pop(holder, None)
        if holding is None:
            return
        self._plain -= holding.plain
        for digest in reversed(holding.cached):  # the end of the chain is evicted first
            self._users[digest] -= 1
            if not self._users[digest]:
                self._unused[digest] = None

    def clear_cache(self) -> None:
        """Forgets cached blocks without a holder."""
        self._evict(self.count)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        users: dict[bytes, int] = dict.fromkeys(self._users, 0)
        for holding in self._holdings.values():
            for digest in holding.cached:
                users[digest] += 1
        if users != self._users:
            raise AssertionError("a cached block has other holders than it counts")
        if set(self._unused) != {digest for digest, count in users.items() if not count}:
            raise AssertionError("the unused blocks are others")
        if self._plain != sum(holding.plain for holding in self._holdings.values()):
            raise AssertionError("plain blocks do not add up")
        if self._plain + len(self._users) > self.count:
            raise AssertionError("more blocks are in use than there are")

    def _unused_beside(self, digests: Sequence[bytes]) -> int:
        return len(self._unused) - sum(digest in self._unused for digest in digests)

    def _evict(self, fresh: int) -> None:
        removed = []
        while self._unused and self._plain + len(self._users) + fresh > self.count:
            digest, _ = self._unused.popitem(last=False)
            del self._users[digest]
            removed.append(digest)
        if removed:
            self._changed(None, (), removed)
