"""Addresses of listening ports: "127.0.0.1:7711", "[::1]:7711", "localhost:0"."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from moonpool.core.errors import ConfigError


class Address(NamedTuple):
    """host: a name or an IP address without brackets; port: 0 to 65535, 0 meaning a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it. A name other than localhost could mean anything: no."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str, key: str) -> Address:
    """Reads "host:port". Raises ConfigError that names ``key``, the setting it came from."""
    host, mark, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not mark or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            f"{key} = {text!r} is no address; write host:port, such as 127.0.0.1:PORT",
            operation="config",
            key=key,
        )
    return Address(host, int(port))
