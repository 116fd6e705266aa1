"""API keys (``Authorization: Bearer KEY``): which a proxy accepts for what."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from moonpool.disagg_proxy.clients import Clients, KeysFor, RelayKey
from moonpool.disagg_proxy.conductor.plan import refused
from moonpool.disagg_proxy.settings import ProxySettings, read_api_keys, read_registrar_keys

WANTS_KEY = refused(
    401,
    "this path wants a key: send Authorization: Bearer KEY with one that its operator gave you",
    "invalid_api_key",
)


class KeyCheck(Protocol):
    """The keys that an endpoint accepts."""

    def fits(self, authorization: bytes | None) -> bool:
        """Whether the field Authorization has an accepted key."""


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


class AccessKeys(NamedTuple):
    """Which keys a proxy accepts for what.

    relayed:    for requests to engines; the data plane compares them. []: it asks for none.
    askers:     for /query.
    readers:    for pages that show addresses and failures of engines.
    registrars: for /register and /unregister.
    clients:    tenants and priorities of the keys; None: a client says its own.
    """

    relayed: list[RelayKey]
    askers: KeyCheck
    readers: KeyCheck
    registrars: KeyCheck
    clients: Clients | None = None


def read_access_keys(settings: ProxySettings) -> AccessKeys:
    """Reads ``clients_file``, or the files of keys. Raises ConfigError."""
    if settings.clients_file:
        clients = Clients(settings.clients_file, registers=settings.registers, share=settings.tenants_share)
        askers, readers, registrars = (KeysFor(clients, right) for right in ("ask", "look", "register"))
        return AccessKeys(clients.asking, askers, readers, registrars, clients)
    asking, registering = read_api_keys(settings.api_keys_file), read_registrar_keys(settings)
    relayed = [(hashlib.sha256(key.encode()).digest(), "") for key in asking]
    return AccessKeys(relayed, ApiKeys(asking), ApiKeys([*asking, *registering]), ApiKeys(registering))
