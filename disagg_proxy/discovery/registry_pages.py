"""The paths under which engines register and routers ask: who may, and who answers."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from moonpool.disagg_proxy.conductor.plan import Answer, refused
from moonpool.disagg_proxy.discovery.queries import Queries
from moonpool.disagg_proxy.discovery.registry import Registry
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.events.subscriber import Subscriber


class Keys:
    """Who may: whoever sends one of these. None at all: everybody."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def fits(self, authorization: bytes | None) -> bool:
        """All are compared, in constant time."""
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        fitting = [hmac.compare_digest(digest, each) for each in self._digests]
        return not self._digests or (scheme.lower() == b"bearer" and any(fitting))


class RegistryPages:
    """registrars: who may register; askers: who may ask."""

    def __init__(self, registry: Registry, queries: Queries, registrars: Keys, askers: Keys) -> None:
        self._registry = registry
        self._queries = queries
        self._registrars = registrars
        self._askers = askers

    def answer(self, path: bytes, authorization: bytes | None, body: bytes) -> Answer:
        """Of a POST."""
        keys = self._registrars if path in (b"/register", b"/unregister") else self._askers
        if not keys.fits(authorization):
            why = "this path wants a key: send Authorization: Bearer KEY with one that its operator gave you"
            return refused(401, why, "invalid_api_key")
        if path == b"/register":
            return self._registry.register(body)
        if path == b"/unregister":
            return self._registry.unregister(body)
        return self._queries.by_tokens(body) if path == b"/query" else self._queries.by_hashes(body)


class SubscribedStreams:
    """Streams that belong to no engine: gives each a holder, of so many from ``first`` on."""

    def __init__(self, subscriber: Subscriber | None, first: int, count: int) -> None:
        self._subscriber = subscriber
        self._free = list(range(first, first + max(0, count)))[::-1]

    def follow(self, name: str, source: EventSource) -> int | None:
        if self._subscriber is None or not self._free:
            return None
        holder = self._free.pop()
        self._subscriber.follow(source, holder)
        return holder

    def drop(self, name: str, holder: int) -> None:
        """What it told is forgotten before the holder is another's: the subscriber obeys in order."""
        if self._subscriber is not None:
            self._subscriber.drop(name, holder)
        self._free.append(holder)
