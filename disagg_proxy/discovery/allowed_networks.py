"""The networks in which engines may register. Values only."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.setting_error import bad

IP = ipaddress.IPv4Address | ipaddress.IPv6Address

LOOPBACK = ("127.0.0.0/8", "::1/128")
# Refused whatever the operator allows: link-local addresses, where clouds have their metadata services
# (fd00:ec2::254 is one, too), and addresses that do not belong to one host.
_NEVER = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "169.254.0.0/16",
        "224.0.0.0/4",
        "255.255.255.255/32",
        "::/128",
        "fe80::/10",
        "ff00::/8",
        "fd00:ec2::254/128",
    )
)


class AllowedNetworks:
    """texts: networks in CIDR form; (): loopback only. Raises ConfigError for text that is no network."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.texts = tuple(texts) or LOOPBACK
        try:
            self._allowed = tuple(ipaddress.ip_network(text) for text in self.texts)
        except ValueError as error:
            raise bad(
                "discovery_allow", f"--discovery-allow takes networks such as 10.0.0.0/8: {error}"
            ) from error

    def allow(self, address: IP) -> bool:
        """Whether an engine may have this address."""
        if any(address in each for each in _NEVER):
            return False
        return any(address in each for each in self._allowed)

    def require_allowed(self, hosts: Iterable[str]) -> None:
        """Raises ConfigError unless every host is a literal address in an allowed network."""
        for host in hosts:
            address = literal(host)
            if address is None:
                raise ConfigError(f"{host} is a name, and no address that could be checked")
            if not self.allow(address):
                raise self.refusal(host)

    def refusal(self, host: str) -> ConfigError:
        """The error for a host outside of the allowed networks."""
        return ConfigError(
            f"{host} is outside of the networks in which engines may register ({', '.join(self.texts)}); the "
            f"proxy's operator names them with --discovery-allow, and link-local addresses are never allowed"
        )


def literal(host: str) -> IP | None:
    """Parses a literal address; None for a name. An IPv4-mapped IPv6 address becomes the IPv4 one."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
