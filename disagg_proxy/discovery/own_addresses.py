"""The addresses at which a proxy itself is reached. An engine cannot be there: requests to it would come
back to the proxy, and multiply with each attempt."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.discovery.allowed_networks import IP, literal


class OwnAddresses:
    """listening: (address, port) of each socket that the proxy, or another process of it, listens at; a
    wildcard address (0.0.0.0, ::) stands for every address of the host."""

    def __init__(self, listening: Iterable[tuple[str, int]] = ()) -> None:
        self._listening = [(literal(host), port) for host, port in listening]

    def require_other(self, host: str, port: int) -> None:
        """Raises ConfigError where the proxy itself listens. host: a literal address."""
        address = literal(host)
        if address is not None and any(
            port == own_port and own is not None and _reaches(address, own)
            for own, own_port in self._listening
        ):
            raise ConfigError(
                f"{host} port {port} is an address of this proxy itself; register the address at which the "
                f"engine listens"
            )


def _reaches(address: IP, own: IP) -> bool:
    """Whether a connection to ``address`` would come to a socket that is bound to ``own``."""
    if address.version != own.version:
        return False
    return address == own or (own.is_unspecified and _is_local(address))


def _is_local(address: IP) -> bool:
    """Whether this host has the address: the kernel binds a socket to no other one."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True
