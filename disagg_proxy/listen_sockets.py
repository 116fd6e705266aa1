"""The listening sockets of a proxy: new ones, or those of the proxy that it replaces."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.settings import ProxySettings
from moonpool.disagg_proxy.takeover import Predecessor, find_predecessor

_log = logging.getLogger("moonpool.proxy")


async def take_over_or_bind(settings: ProxySettings, listening: list[socket.socket]) -> Predecessor | None:
    """Adds the listening sockets. With ``take_over`` and a proxy running at the address they are that
    proxy's, which is returned; otherwise new ones. Raises as ``take_or_bind``."""
    host, port = settings.host, settings.port
    if settings.take_over and settings.registers and not settings.discovery_registry_file:
        _log.warning(
            "a successor knows no engine that registered before it, until it registers again; "
            "--discovery-registry-file hands registrations on"
        )
    predecessor = await asyncio.to_thread(find_predecessor, host, port) if settings.take_over else None
    try:
        await asyncio.to_thread(take_or_bind, predecessor, host, port, listening)
    except ConfigError:
        if predecessor is not None:
            predecessor.close()
        raise
    return predecessor


def take_or_bind(
    predecessor: Predecessor | None,
    host: str,
    port: int,
    listening: list[socket.socket],
    option: str = "--port",
) -> None:
    """Adds a socket for each address of the host: the predecessor's, or a new one where it has none.

    option: the option that the address comes from.
    Raises ConfigError; sockets that were bound before it stay in the list.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        if predecessor is not None:
            taken = predecessor.take({(str(address[0]), int(address[1])) for *_, address in found})
            listening.extend(taken)
            if taken:
                return
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            listening.append(one)
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
            if port == 0:
                break  # each address would get another port
    except OSError as error:
        raise _no_address(host, port, option, error) from error


def _no_address(host: str, port: int, option: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        holder = f"ss -ltnp 'sport = :{port}'"
        what = (
            f"{host}:{port} is in use; stop what listens there ({holder}), choose another {option}, or, if "
            "that is a proxy, replace it with --take-over"
        )
    elif error.errno == errno.EACCES:
        what = f"{host}:{port} may not be opened by this user; choose a {option} above 1023"
    elif isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        what = f"{host!r} is no address of this machine; choose another --host"
    else:
        what = f"cannot listen on {host}:{port}: {error.strerror or error}"
    return ConfigError(
        f"moonpool proxy: {what}", operation="listen", key="proxy.port", peer=f"{host}:{port}", cause=error
    )
