"""The parts of a URL that names a store: etcd://[user[:password]@]host:2379,host:2379 and the like."""

from __future__ import annotations

import re
import ssl
from urllib.parse import unquote

from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import Address, parse_address

ETCD_PORT = 2379


def who_and_place(rest: str) -> tuple[str, str, str]:
    """(user, password, what follows the last @)."""
    before, _, place = rest.rpartition("@")
    user, _, password = before.partition(":")
    return unquote(user), unquote(password), place


def address_in(text: str, port: int) -> Address:
    """With ``port`` where it has none. Raises ValueError for none of ours."""
    has_port = re.search(r":\d+$", text) and (text.count(":") == 1 or text.startswith("["))
    address = parse_address(text if has_port else f"{text}:{port}", "metadata")
    if address.port == 0 or not re.fullmatch(r"[A-Za-z0-9._:%-]+", address.host):
        raise ValueError("no address")
    return address


def trusting(authorities: str) -> ssl.SSLContext:
    """That trusts those of the file (PEM); "": the system's. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=authorities or None)
    except OSError as error:
        raise ConfigError(
            f"cluster.tls_ca = {authorities} cannot be used: {error}; it must hold certificates in PEM form",
            operation="config",
            key="cluster.tls_ca",
        ) from error
