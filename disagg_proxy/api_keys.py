"""API keys of clients of the proxy's own endpoints: ``Authorization: Bearer KEY``."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from moonpool.disagg_proxy.conductor.plan import refused

WANTS_KEY = refused(
    401,
    "this path wants a key: send Authorization: Bearer KEY with one that its operator gave you",
    "invalid_api_key",
)


class ApiKeys:
    """The API keys that an endpoint accepts; without any it accepts every client."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def fits(self, authorization: bytes | None) -> bool:
        """Whether the header has an accepted key. Compares all keys in constant time."""
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        fitting = [hmac.compare_digest(digest, each) for each in self._digests]
        return not self._digests or (scheme.lower() == b"bearer" and any(fitting))
