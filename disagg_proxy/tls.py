"""TLS of the proxy: its relay with the files that [proxy] names, which C++ reads and follows, and the context
by which Python asks engines.
"""

from __future__ import annotations

import ssl
from typing import Any

from moonpool._native import Relay
from moonpool.core.errors import ConfigError, InvalidArgument, Unavailable
from moonpool.core.service.http_tls import FollowedContext, asking, engine_side_of, serving
from moonpool.disagg_proxy.settings import ProxySettings


def made_relay(proxy: ProxySettings, **arguments: Any) -> Relay:
    """The relay of a proxy, with further arguments. Raises ConfigError for files of TLS that cannot be used,
    or without OpenSSL."""
    clients = proxy.client_tls
    if clients is not None:
        serving(clients)  # says what is wrong with them
    try:
        return Relay(
            tls=None if clients is None else clients[:3],
            engine_tls=engine_side_of(proxy)[:3],
            engine_tls_name=proxy.engine_tls_name,
            **arguments,
        )
    except (InvalidArgument, Unavailable) as error:
        raise ConfigError(str(error), operation="tls", key="proxy.tls_cert", cause=error) from error


class EngineTls:
    """How Python asks engines at https://, by the files that [proxy] names. One loop.

    name: that their certificates have; None: the host of each one's URL."""

    def __init__(self, proxy: ProxySettings) -> None:
        """Raises ConfigError for configured files that cannot be used."""
        self.name = proxy.engine_tls_name or None
        self._files = engine_side_of(proxy)
        self._followed: FollowedContext | None = None
        if any(self._files[:3]):
            self.context()

    def context(self) -> ssl.SSLContext:
        """Of the files as they are now. The first call reads them, and the system's authorities where none
        are named. Raises ConfigError."""
        if self._followed is None:
            self._followed = FollowedContext(self._files, asking)
        return self._followed.current()
