"""``LeasedValues``: small values by key, in memory, each perhaps with an owner and a lease; and the HTTP page
over them, for the servers of http_metadata.py. No clock of its own: leases hold by a steady clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from moonpool.core.transfer.metadata.http_metadata import LEASE_HEADER, LEFT_HEADER

ENTRY_BYTES = 256  # overhead of an entry, beside its key and its value
LEASE_S_MAX = 3600.0
SWEEP_S = 1.0


class Held(Exception):
    """The key is another owner's."""

    def __init__(self, value: bytes, left_s: float) -> None:
        super().__init__()
        self.value = value
        self.left_s = left_s


class Full(Exception):
    """There is no room for the value; the old one stays."""


class _Entry(NamedTuple):
    value: bytes
    owner: str
    ends_s: float  # infinite without a lease


class LeasedValues:
    """bytes_max: of all entries, with their keys. clock: steady, seconds. One thread."""

    def __init__(self, bytes_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_max = bytes_max
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._bytes = 0
        self._swept_s = clock()

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self, key: str, value: bytes, owner: str = "", lease_s: float = float("inf"), dead: str = ""
    ) -> None:
        """Raises Held while the lease of another owner than ``owner`` and ``dead`` runs, and Full. Without an
        owner it replaces whatever is there."""
        self._sweep()
        old = self._living(key)
        if old is not None and owner and old.owner not in ("", owner, dead):
            raise Held(old.value, old.ends_s - self._clock())
        more = _size(key, value) - (0 if old is None else _size(key, old.value))
        if self._bytes + more > self._bytes_max:
            raise Full
        self._entries[key] = _Entry(value, owner, self._clock() + lease_s)
        self._bytes += more

    def get(self, key: str) -> bytes | None:
        """The value; None without one."""
        entry = self._living(key)
        return None if entry is None else entry.value

    def drop(self, key: str, owner: str = "") -> bool:
        """Whether there was one. Raises Held where ``owner`` is given and is another."""
        entry = self._living(key)
        if entry is None:
            return False
        if owner and entry.owner not in ("", owner):
            raise Held(entry.value, entry.ends_s - self._clock())
        self._forget(key)
        return True

    def _living(self, key: str) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None and entry.ends_s <= self._clock():
            self._forget(key)
            return None
        return entry

    def _forget(self, key: str) -> None:
        self._bytes -= _size(key, self._entries.pop(key).value)

    def _sweep(self) -> None:
        """Drops the dead, now and then: keys that are asked for no more."""
        now_s = self._clock()
        if now_s - self._swept_s >= SWEEP_S:
            self._swept_s = now_s
            for key in [key for key, entry in self._entries.items() if entry.ends_s <= now_s]:
                self._forget(key)


def _size(key: str, value: bytes) -> int:
    return len(key.encode(errors="surrogatepass")) + len(value) + ENTRY_BYTES


class Page(NamedTuple):
    """An answer over HTTP."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}


def page_of(values: LeasedValues, method: str, query: Mapping[str, str], body: bytes) -> Page:
    """Answers one request for the page. Sentences are those that clients of the original know."""
    key, owner = query.get("key", ""), query.get("owner", "")
    if method not in ("GET", "PUT", "DELETE"):
        return Page(405, b"Method not allowed")
    if not key:
        return Page(400, b"metadata key is required")
    try:
        if method == "PUT":
            return _put(values, key, owner, query, body)
        if method == "GET":
            value = values.get(key)
            return Page(404, b"metadata not found") if value is None else Page(200, value)
        found = values.drop(key, owner)
        return Page(200, b"metadata deleted") if found else Page(404, b"metadata not found")
    except Held as held:
        return Page(409, held.value, {LEFT_HEADER: f"{max(held.left_s, 0.0):.3f}"})
    except Full:
        return Page(507, b"no room for more metadata")


def _put(values: LeasedValues, key: str, owner: str, query: Mapping[str, str], body: bytes) -> Page:
    if "lease_s" not in query:
        values.put(key, body, owner, dead=query.get("dead", ""))
        return Page(200, b"metadata updated")
    try:
        lease_s = float(query["lease_s"])
    except ValueError:
        lease_s = 0.0
    if not owner or not 0.0 < lease_s <= LEASE_S_MAX:
        return Page(400, b"a lease needs an owner, and lease_s of at most 3600")
    values.put(key, body, owner, lease_s, query.get("dead", ""))
    return Page(200, b"metadata updated", {LEASE_HEADER: f"{lease_s:g}"})
