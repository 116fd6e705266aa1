"""API keys (``Authorization: Bearer KEY``): which a proxy accepts for what."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.clients import Clients, KeysFor, RelayKey
from moonpool.disagg_proxy.conductor.plan import refused
from moonpool.disagg_proxy.settings import ProxySettings, read_api_keys, read_registrar_keys

_log = logging.getLogger("moonpool.proxy")

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
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """From now on it accepts these. On any thread."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def fits(self, authorization: bytes | None) -> bool:
        """Whether the header has an accepted key. Compares all keys in constant time."""
        scheme, _, key = (authorization or b"").partition(b" ")
        digest, accepted = hashlib.sha256(key.strip()).digest(), self._digests
        fitting = [hmac.compare_digest(digest, each) for each in accepted]
        return not accepted or (scheme.lower() == b"bearer" and any(fitting))


class AccessKeys(NamedTuple):
    """Which keys a proxy accepts for what.

    relayed:    for requests to engines; the data plane compares them. []: it asks for none.
    askers:     for /query.
    readers:    for pages that show addresses and failures of engines.
    registrars: for /register and /unregister.
    clients:    tenants and priorities of the keys; None: a client says its own.
    reload:     reads the files again -> ``relayed`` anew; None: an error was logged, and nothing changes.
    """

    relayed: list[RelayKey]
    askers: KeyCheck
    readers: KeyCheck
    registrars: KeyCheck
    reload: Callable[[], list[RelayKey] | None]
    clients: Clients | None = None


def read_access_keys(settings: ProxySettings) -> AccessKeys:
    """Reads ``clients_file``, or the files of keys. Raises ConfigError."""
    if settings.clients_file:
        clients = Clients(settings.clients_file, registers=settings.registers, share=settings.tenants_share)
        askers, readers, registrars = (KeysFor(clients, right) for right in ("ask", "look", "register"))
        return AccessKeys(clients.asking, askers, readers, registrars, clients.reload_asking, clients)
    files = _KeyFiles(settings)
    return AccessKeys(files.read(), files.askers, files.readers, files.registrars, files.reload)


class _KeyFiles:
    """``api_keys_file`` and ``discovery_keys_file``, and what accepts their keys."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self.askers, self.readers, self.registrars = ApiKeys([]), ApiKeys([]), ApiKeys([])

    def read(self) -> list[RelayKey]:
        """The keys of both files are accepted from now on. -> those that the relay compares. Raises
        ConfigError, and then nothing changes."""
        asking, registering = read_api_keys(self._settings.api_keys_file), read_registrar_keys(self._settings)
        self.askers.replace(asking)
        self.readers.replace([*asking, *registering])
        self.registrars.replace(registering)
        return [(hashlib.sha256(key.encode()).digest(), "") for key in asking]

    def reload(self) -> list[RelayKey] | None:
        """See AccessKeys."""
        try:
            relayed = self.read()
        except ConfigError as error:
            _log.error("SIGHUP: the keys stay as they were: %s", error)
            return None
        _log.info("SIGHUP: %d keys of clients are in force", len(relayed))
        return relayed
