"""TLS of data connections: those to nodes of other hosts, by which objects travel.

[cluster] tls_data turns it on. Nodes present tls_cert; tls_data_name is the name that all their certificates
have. A client learns of it as of the TLS of control connections (control_tls).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from moonpool.core.service.control_tls import (
    check_own_certificate,
    control_client,
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
    cluster = config.cluster
    if cluster.tls_data == "off":
        return None
    from moonpool import _native
    from moonpool.core.service.http_tls import wrong

    check_own_certificate(config, "tls_data", "the node")
    if cluster.tls_data == "mutual" and not cluster.tls_ca:
        raise wrong(
            'cluster.tls_data is "mutual" and cluster.tls_ca is empty; name the authorities that vouch for '
            "clients",
            "cluster.tls_ca",
        )
    ca = cluster.tls_ca if cluster.tls_data == "mutual" else ""
    return _native.TlsServer(cluster.tls_cert, cluster.tls_key, ca, data=True)


def pool_tls(config: Config) -> PoolTls:
    """By the configuration. Raises as control_client."""
    return PoolTls(control_client(config), _data_client(config))


def pool_tls_of(socket: str | Path) -> PoolTls:
    """For a client of the node at ``socket``: from the environment, else from the file that the node wrote
    beside its socket.
    """
    config = tls_settings_of(socket)
    return PoolTls() if config is None else pool_tls(config)


def pool_tls_for(config: Config, socket: str = "") -> PoolTls:
    """For our own commands: from the configuration, else from the node at ``socket`` ("": the default)."""
    return pool_tls(tls_settings_for(config, socket) or config)


def _data_client(config: Config) -> _native.TlsClient | None:
    cluster = config.cluster
    if cluster.tls_data == "off":
        return None
    from moonpool import _native

    if cluster.tls_data != "mutual":
        return _native.TlsClient(cluster.tls_ca, cluster.tls_data_name, data=True)
    check_own_certificate(config, "tls_data", "a process that connects to nodes")
    return _native.TlsClient(
        cluster.tls_ca, cluster.tls_data_name, cluster.tls_cert, cluster.tls_key, data=True
    )
