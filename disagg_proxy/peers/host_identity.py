"""Where an engine is, in words that another host can compare with its own: whether two proxies that have an
engine of one name can mean the same one.

    10.0.0.1:8000               of an address and of a host's name
    127.0.0.1:8000@MACHINE      of this machine alone: another's is another engine
"""

from __future__ import annotations

import ipaddress
from functools import cache, lru_cache
from pathlib import Path

from moonpool.core.service.addresses import Address

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def site_of(host: str, port: int) -> str:
    """As others are told of it; "": it cannot be said."""
    if not _is_here(host):
        return str(Address(host, port))
    machine = _machine()
    return machine and f"{Address(host, port)}@{machine}"


@lru_cache(1024)
def may_be_one(mine: str, theirs: str) -> bool:
    """Whether they can be one engine. What cannot be told apart can: a host's name and an address, what only
    one of them reaches on its own machine, and "", which is not known."""
    if mine == theirs or not mine or not theirs:
        return True
    (host, port, machine), (their_host, their_port, their_machine) = _parts(mine), _parts(theirs)
    if machine and their_machine:
        return machine == their_machine and port == their_port
    if machine or their_machine:
        return True
    ip, their_ip = _ip(host), _ip(their_host)
    if ip is None and their_ip is None:
        short, long = sorted((host.lower(), their_host.lower()), key=len)
        return port == their_port and (short == long or long.startswith(f"{short}."))
    return ip is None or their_ip is None or (ip, port) == (their_ip, their_port)


def _parts(site: str) -> tuple[str, str, str]:
    """(host, port, machine)."""
    address, _, machine = site.partition("@")
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port, machine


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Without the zone, which each host calls as it likes; of an IPv4 address written as IPv6 the former."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def _is_here(host: str) -> bool:
    ip = _ip(host)
    return host == "localhost" or (ip is not None and (ip.is_loopback or ip.is_unspecified))


@cache
def _machine() -> str:
    """The same to all processes of this machine, until it starts anew; "": not known."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
