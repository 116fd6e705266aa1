"""The forms in which callers write hosts: with a port or without, IPv6 with brackets or without."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

from moonpool.core.service.addresses import Address, parse_address


def address_of(text: str, key: str, port: int = 0) -> Address:
    """ "host:port", "host", "[::1]:port", "[::1]" or "::1"; ``port`` where none is written. Raises a
    ConfigError that names ``key``.
    """
    bare = text.removeprefix("[").removesuffix("]")
    return Address(bare, port) if is_ip6(bare) or ":" not in text else parse_address(text, key)


def session_of(name: str) -> str:
    """A session id as moonpool reads it: callers write f"{host}:{port}" of any host. "file:///path" stays as
    it is. TypeError for no str."""
    if not isinstance(name, str):
        raise TypeError(f"a session id is a str, not {name!r:.80}")
    if name.startswith("file://"):
        return name
    host, _, port = name.rpartition(":")
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else name


def joined(host: str, port: int | str) -> str:
    """ "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if is_ip6(host) else f"{host}:{port}"


def is_of_this_host(host: str) -> bool:
    """Whether a socket can be bound there, as to no other host's address."""
    with suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False


def is_ip6(host: str) -> bool:
    """Whether ``host`` is an IPv6 address."""
    return ":" in host and is_ip(host)


def is_ip(host: str) -> bool:
    """Whether ``host`` is an IP address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
