"""Replaces host names in registrations by addresses. A name is resolved once, and the address that was
checked is used from then on: a name that resolves to another host later (DNS rebinding) has no effect.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec

from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import Address, parse_address
from moonpool.disagg_proxy.discovery.allowed_networks import IP, AllowedNetworks, literal
from moonpool.disagg_proxy.discovery.registration import Registration

Resolve = Callable[[str], Awaitable[list[str]]]
RESOLVE_S = 5.0


class HostResolver:
    """networks: the allowed ones. resolve: returns the addresses of a name, or raises OSError."""

    def __init__(self, networks: AllowedNetworks, resolve: Resolve | None = None) -> None:
        self._networks = networks
        self._resolve = resolve or _resolve

    def is_needed_for(self, told: Registration) -> bool:
        """Whether the registration has host names."""
        return any(literal(host) is None for host in told.hosts())

    async def resolve(self, told: Registration, before: Registration | None) -> Registration:
        """The registration with an allowed address in place of each name. before: the registration under the
        same key; its addresses are kept while the names still resolve to them. Raises ConfigError."""
        kept = set() if before is None else set(before.hosts())
        found: dict[str, str] = {}
        for host in told.hosts():
            if host not in found:
                found[host] = await self._address(host, kept)
        port = told.bootstrap
        bootstrap = port if isinstance(port, int) or ":" not in port else _with_host(port, found)
        return msgspec.structs.replace(
            told,
            url=_url_with_host(told.url, found),
            endpoint=_endpoint_with_host(told.endpoint, found),
            replay_endpoint=_endpoint_with_host(told.replay_endpoint, found),
            bootstrap=bootstrap,
        )

    async def _address(self, host: str, kept: set[str]) -> str:
        given = literal(host)
        if given is not None:
            return str(given)
        try:
            async with asyncio.timeout(RESOLVE_S):
                names = await self._resolve(host)
        except OSError as error:  # TimeoutError is one
            raise ConfigError(f"the name {host} has no address: {error.strerror or error}") from error
        addresses = {address for text in names if (address := literal(text)) is not None}
        allowed = sorted((each for each in addresses if self._networks.allow(each)), key=_order)
        if not allowed:
            raise self._networks.refusal(f"{host} ({', '.join(map(str, sorted(addresses, key=_order)))})")
        return next((str(each) for each in allowed if str(each) in kept), str(allowed[0]))


async def _resolve(host: str) -> list[str]:
    rows = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(row[4][0]) for row in rows]


def _order(address: IP) -> tuple[int, int]:
    return address.version, int(address)


def _with_host(text: str, found: dict[str, str]) -> str:
    host, port = parse_address(text, "address")
    return str(Address(found[host], port))


def _endpoint_with_host(text: str, found: dict[str, str]) -> str:
    return f"tcp://{_with_host(text.removeprefix('tcp://'), found)}" if text else ""


def _url_with_host(text: str, found: dict[str, str]) -> str:
    if not text:
        return ""
    parts = urlsplit(text)
    default = 443 if parts.scheme == "https" else 80
    place = Address(found[parts.hostname or ""], default if parts.port is None else parts.port)
    return f"{parts.scheme}://{place}"
