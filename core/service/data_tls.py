"""TLS of data connections: those to nodes of other hosts, by which objects travel.

[cluster] tls_data turns it on. Nodes present tls_cert; tls_data_name is the name that all their certificates
have. A client learns of it as of the TLS of control connections (control_tls).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from moonpool.core.service.control_tls import (
    control_client,
    tls_client,
    tls_server,
    tls_settings_for,
    tls_settings_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from moonpool import _native
    from moonpool.core.config.config import Config


class PoolTls(NamedTuple):
    """How a client of the pool connects. None: in plain.

    control: to the master.
    data: to nodes of other hosts.
    """

    control: _native.TlsClient | None = None
    data: _native.TlsClient | None = None


def data_server(config: Config) -> _native.TlsServer | None:
    """The certificate that a node presents to other hosts, and which peers it accepts. None: it listens
    without TLS. Raises as control_server.
    """
    return tls_server(config, "tls_data", "the node", "clients")


def pool_tls(config: Config) -> PoolTls:
    """By the configuration. Raises as control_client."""
    name = config.cluster.tls_data_name
    data = tls_client(config, "tls_data", "a process that connects to nodes", name)
    return PoolTls(control_client(config), data)


def pool_tls_of(socket: str | Path) -> PoolTls:
    """For a client of the node at ``socket``, as tls_settings_of() has it."""
    config = tls_settings_of(socket)
    return PoolTls() if config is None else pool_tls(config)


def pool_tls_for(config: Config, socket: str = "") -> PoolTls:
    """For our own commands, as tls_settings_for() has it."""
    return pool_tls(tls_settings_for(config, socket) or config)
