"""TLS of the proxy: its relay with the files that [proxy] names, which C++ reads and follows."""

from __future__ import annotations

from typing import Any

from moonpool._native import Relay
from moonpool.core.errors import ConfigError, InvalidArgument, Unavailable
from moonpool.core.service.http_tls import serving
from moonpool.disagg_proxy.settings import ProxySettings


def made_relay(proxy: ProxySettings, **arguments: Any) -> Relay:
    """The relay of a proxy, with further arguments. Raises ConfigError for files of TLS that cannot be used,
    or without OpenSSL."""
    clients = proxy.client_tls
    if clients is not None:
        serving(clients)  # says what is wrong with them
    try:
        return Relay(tls=None if clients is None else clients[:3], **arguments)
    except (InvalidArgument, Unavailable) as error:
        raise ConfigError(str(error), operation="tls", key="proxy.tls_cert", cause=error) from error
