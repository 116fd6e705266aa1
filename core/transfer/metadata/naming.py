"""``Naming``: an engine is found by its name, and finds others: ``Publication`` and ``Names`` together."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from typing import TYPE_CHECKING

from moonpool.core.config.config_sources import CONFIG_VARIABLE
from moonpool.core.config.paths import read_or_create_token
from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.listen_addresses import advertised_address
from moonpool.core.service.listen_addresses import host_id as this_host
from moonpool.core.transfer.metadata.backend import Metadata
from moonpool.core.transfer.metadata.names import FILE, Names
from moonpool.core.transfer.metadata.publication import Publication
from moonpool.core.transfer.metadata.record import SegmentRecord, check_name
from moonpool.core.transfer.segment import Segment

if TYPE_CHECKING:
    from moonpool import _native

_log = logging.getLogger("moonpool.transfer.metadata")
VARIABLE = "MOONPOOL_CLUSTER_METADATA"
AUTHORITIES_VARIABLE = "MOONPOOL_CLUSTER_TLS_CA"


def store_of(given: str | Metadata | None, token: bytes | None) -> Metadata | None:
    """The store that an engine was given, or None for the handshake; ``given`` None: the configured one.
    Raises ConfigError."""
    if isinstance(given, Metadata):
        return given
    is_configured = any(name in os.environ for name in (VARIABLE, AUTHORITIES_VARIABLE, CONFIG_VARIABLE))
    if given == "" or (given is None and not is_configured):
        return None
    text, password, authorities = given or "", "", ""
    if is_configured:
        from moonpool.core.config.config import load

        cluster = load().cluster
        authorities = cluster.tls_ca
        if given is None:
            text, password = cluster.metadata, cluster.metadata_password
    if not text:
        return None
    from moonpool.core.transfer.metadata.connection_string import metadata_of  # it imports TLS

    return metadata_of(text, token or read_or_create_token(), password=password, authorities=authorities)


def engine_name(name: str, store: Metadata | None) -> str:
    """The name of an engine that may have none: of two in one process, too, where names are published.
    Raises ConfigError."""
    if store is None:
        return name or f"{socket.gethostname()}-{os.getpid()}"
    return check_name(name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")


class Naming:
    """Of one engine; close() before the engine's end.

    Without a store it opens peers by address, and publishes nothing; likewise an engine that does not listen.
    Raises NameTaken when another engine has the name, AuthError when the store refuses us.
    """

    def __init__(
        self,
        native: _native.Engine,
        store: Metadata | None,
        *,
        tenant: str = "default",
        host_id: str = "",
        advertise: str = "",
    ) -> None:
        self._native = native
        self._names = Names(native, store, tenant)
        self._publication: Publication | None = None
        if store is not None and native.addresses:
            works = tuple(name for name, why in native.transports().items() if not why)
            record = SegmentRecord(
                id=native.segment_id.hex(),
                name=native.name,
                tenant=tenant,
                addresses=_addresses(native.addresses, advertise, store.towards),
                transports=works,
                host_id=host_id or this_host(),
                lease_s=store.lease_s,
            )
            _warn_of_loopback(record, store)
            publication = Publication(store, record)
            publication.claim()
            publication.start()
            self._publication = publication

    def open(self, name: str) -> Segment:
        """See TransferEngine.open."""
        find = (lambda: self._names.open(name)) if self._names.by_name and not name.startswith(FILE) else None
        return Segment(self._native, self._names.open(name), find)

    @property
    def problem(self) -> str:
        """See EngineFacts.publication_problem."""
        return "" if self._publication is None else self._publication.problem

    def metrics(self) -> dict[str, int]:
        """Counters and a gauge; empty where nothing is published."""
        one = self._publication
        if one is None:
            return {}
        return {
            "metadata_published": int(not one.problem),
            "metadata_publishes_total": one.publishes,
            "metadata_failures_total": one.failures,
        }

    def close(self) -> None:
        """Withdraws the name. May be called twice."""
        if self._publication is not None:
            self._publication.close()


def _warn_of_loopback(record: SegmentRecord, store: Metadata) -> None:
    """Engines listen on loopback unless they are told otherwise."""
    places = [parse_address(one, "listen") for one in record.addresses]
    if not store.towards.is_loopback and all(one.is_loopback for one in places):
        _log.warning(
            "the name %s is published as %s, which engines of other hosts cannot reach; for them, listen on "
            "an address of this host, such as 0.0.0.0:0",
            record.name,
            ", ".join(record.addresses),
        )


def _addresses(listening: list[str], advertise: str, towards: Address) -> tuple[str, ...]:
    """What peers are told, without repetition. Raises ConfigError."""
    real = [parse_address(one, "listen") for one in listening]
    if advertise:
        has_port = not advertise.endswith("]") and advertise.rpartition(":")[2].isdigit()
        given = parse_address(advertise if has_port else f"{advertise}:0", "advertise")
        if given.host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"advertise = {advertise} is no address to connect to; name one that peers reach",
                operation="engine",
                key="advertise",
            )
        return (str(given if given.port else given._replace(port=real[0].port)),)
    return tuple(dict.fromkeys(str(one._replace(host=advertised_address(one.host, towards))) for one in real))
