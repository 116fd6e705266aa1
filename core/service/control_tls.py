"""TLS of control connections: those to the master, which the C++ core makes.

[cluster] tls_control turns it on; tls_cert and tls_key are the own certificate, tls_ca the authority that is
trusted, tls_name the name that the master's certificate must have. A node writes all of it for its clients
into a file beside its socket, so that they need no settings of their own. Every Store imports this module:
what only TLS needs is imported when it is used.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.core.config.paths import default_node_socket, socket_tls

if TYPE_CHECKING:
    from moonpool import _native
    from moonpool.core.config.config import Config

VARIABLES = ("MOONPOOL_CLUSTER_TLS_CONTROL", "MOONPOOL_CLUSTER_TLS_DATA")
_KEYS = ("tls_control", "tls_data", "tls_ca", "tls_name", "tls_data_name", "tls_cert", "tls_key")
_FILES = ("tls_ca", "tls_cert", "tls_key")


def control_server(config: Config) -> _native.TlsServer | None:
    """The certificate that a master presents, and which peers it accepts. None: it listens without TLS.

    Raises ConfigError for settings that are not enough, InvalidArgument for files that cannot serve,
    Unavailable without OpenSSL.
    """
    return tls_server(config, "tls_control", "the master", "nodes and clients")


def control_client(config: Config) -> _native.TlsClient | None:
    """How this process connects to a master, and which certificates it accepts. None: without TLS. Raises as
    control_server.
    """
    name = config.cluster.tls_name
    return tls_client(config, "tls_control", "a process that connects to a master", name)


def tls_server(config: Config, setting: str, process: str, callers: str) -> _native.TlsServer | None:
    """By tls_control or tls_data. process, callers: for sentences. Raises as control_server."""
    cluster, mode = config.cluster, getattr(config.cluster, setting)
    if mode == "off":
        return None
    from moonpool import _native
    from moonpool.core.service.http_tls import wrong

    _check_own_certificate(config, setting, process)
    if mode == "mutual" and not cluster.tls_ca:
        raise wrong(
            f'cluster.{setting} is "mutual" and cluster.tls_ca is empty; name the authorities that vouch for '
            f"{callers}",
            "cluster.tls_ca",
        )
    ca = cluster.tls_ca if mode == "mutual" else ""
    return _native.TlsServer(cluster.tls_cert, cluster.tls_key, ca, data=setting == "tls_data")


def tls_client(config: Config, setting: str, process: str, name: str) -> _native.TlsClient | None:
    """By tls_control or tls_data. process: for sentences. name: that the other side's certificate must have.
    Raises as control_server.
    """
    cluster, mode = config.cluster, getattr(config.cluster, setting)
    if mode == "off":
        return None
    from moonpool import _native

    own = ("", "")
    if mode == "mutual":
        _check_own_certificate(config, setting, process)
        own = (cluster.tls_cert, cluster.tls_key)
    return _native.TlsClient(cluster.tls_ca, name, *own, data=setting == "tls_data")


def control_client_of(socket: str | Path) -> _native.TlsClient | None:
    """For a client of the node at ``socket``, as tls_settings_of() has it."""
    config = tls_settings_of(socket)
    return None if config is None else control_client(config)


def tls_settings_of(socket: str | Path) -> Config | None:
    """Of a client of the node at ``socket``: what the environment says, and of what it does not name what the
    node wrote into the file beside its socket. None: neither says anything.
    """
    told = _told_by(socket)
    env = {variable: os.environ[variable] for variable in map(_variable, _KEYS) if variable in os.environ}
    if not told and not any(variable in env for variable in VARIABLES):
        return None
    from moonpool.core.config.config import load

    return load(env={_variable(name): value for name, value in told.items()} | env)


def _told_by(socket: str | Path) -> dict[str, str]:
    beside = socket_tls(Path(os.path.realpath(socket)))
    if not os.path.exists(beside):  # or this user may not read it
        return {}
    return _read(beside.read_bytes())


def _read(settings: bytes) -> dict[str, str]:
    told: dict[str, str] = json.loads(settings)
    return {name: told[name] for name in _KEYS if name in told}  # a node of the release before names fewer


def _variable(name: str) -> str:
    return f"MOONPOOL_CLUSTER_{name.upper()}"


def control_client_from(settings: bytes) -> _native.TlsClient | None:
    """By what control_settings() made. None: without TLS."""
    if not settings:
        return None
    from moonpool.core.config.config import load

    return control_client(load(env={_variable(name): value for name, value in _read(settings).items()}))


def control_client_for(config: Config, socket: str = "") -> _native.TlsClient | None:
    """For our own commands: from the configuration, else from the node at ``socket`` ("": the default)."""
    config = tls_settings_for(config, socket) or config
    return control_client(config)


def tls_settings_for(config: Config, socket: str = "") -> Config | None:
    """For our own commands: the configuration, and of what it does not name what the node at ``socket`` wrote
    beside its socket. None: neither says anything.
    """
    named = {
        name: getattr(config.cluster, name)
        for name in _KEYS
        if config.origin(f"cluster.{name}").kind != "default"
    }
    if "tls_control" not in named and "tls_data" not in named:
        return tls_settings_of(socket or default_node_socket())
    from moonpool.core.config.config import load

    told = _told_by(socket or default_node_socket()) | named
    return load(env={}, arguments={f"cluster.{name}": value for name, value in told.items()})


def control_settings(config: Config) -> bytes:
    """The file for the node's clients, which tls_settings_of() reads; empty where no connection has TLS."""
    if config.cluster.tls_control == config.cluster.tls_data == "off":
        return b""
    given = {name: getattr(config.cluster, name) for name in _KEYS}
    for name in _FILES:
        given[name] = os.path.abspath(given[name]) if given[name] else ""
    return json.dumps(given).encode()


def _check_own_certificate(config: Config, setting: str, process: str) -> None:
    """Raises ConfigError where that setting needs a certificate of this process, and it has none."""
    from moonpool.core.service.http_tls import check_private_key, wrong

    cluster = config.cluster
    if not cluster.tls_cert or not cluster.tls_key:
        missing = "cluster.tls_key" if cluster.tls_cert else "cluster.tls_cert"
        value = getattr(cluster, setting)
        raise wrong(
            f'cluster.{setting} is "{value}" and {process} has no certificate to show; set '
            f"cluster.tls_cert and cluster.tls_key",
            missing,
        )
    check_private_key(Path(cluster.tls_key))
