"""TLS of data connections: those to nodes of other hosts, by which objects travel, and those of transfer
engines by TCP.

[cluster] tls_data turns it on. Nodes and engines present tls_cert; tls_data_name is the name that all their
certificates have. A client learns of it as of the TLS of control connections (control_tls).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from moonpool.core.config.config_sources import CONFIG_VARIABLE
from moonpool.core.config.paths import default_node_socket
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


class EngineTls(NamedTuple):
    """How a transfer engine speaks TCP with others. None: in plain.

    server: what it shows to engines that open it, and which of them it accepts.
    client: how it opens others.
    """

    server: _native.TlsServer | None = None
    client: _native.TlsClient | None = None


def engine_tls(config: Config, *, listens: bool = True) -> EngineTls:
    """By the configuration. listens: others may open the engine, so that it needs a certificate. Raises as
    control_server.
    """
    server = tls_server(config, "tls_data", "a transfer engine", "other engines") if listens else None
    name = config.cluster.tls_data_name
    return EngineTls(server, tls_client(config, "tls_data", "a transfer engine", name))


def configured_engine_tls(*, listens: bool, socket: str | Path = "") -> EngineTls:
    """By the environment and the file that MOONPOOL_CONFIG names, and of what they do not name by what the
    node at ``socket`` ("": the default) wrote beside it. Raises as engine_tls.
    """
    socket = socket or default_node_socket()
    if CONFIG_VARIABLE in os.environ:
        from moonpool.core.config.config import load

        given = load()
        config = tls_settings_for(given, str(socket)) or given
    else:
        found = tls_settings_of(socket)
        if found is None:
            return EngineTls()
        config = found
    return engine_tls(config, listens=listens)
