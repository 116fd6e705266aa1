"""The site of an engine: a text that tells whether two proxies mean the same engine by one name.

10.0.0.1:8000               an address or a host name
127.0.0.1:8000@MACHINE      a loopback address, with the id of the machine
"""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

from moonpool.core.service.addresses import Address
from moonpool.disagg_proxy.discovery.allowed_networks import IP, literal

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def site_of(host: str, port: int) -> str:
    """The site to send to other proxies; "": unknown."""
    if not _is_here(host):
        return str(Address(host, port))
    machine = _machine()
    return machine and f"{Address(host, port)}@{machine}"


@lru_cache(1024)
def may_be_one(mine: str, theirs: str) -> bool:
    """Whether two sites may be the same engine. True if they are not comparable: a host name and an address,
    a loopback and another address, or an unknown site ("")."""
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


def _ip(host: str) -> IP | None:
    """The address without its zone, whose name is local."""
    return literal(host.partition("%")[0])


def _is_here(host: str) -> bool:
    ip = _ip(host)
    return host == "localhost" or (ip is not None and (ip.is_loopback or ip.is_unspecified))


@cache
def _machine() -> str:
    """The boot id of this machine, equal in all its processes; "": unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
