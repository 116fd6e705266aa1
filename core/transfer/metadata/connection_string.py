"""``metadata_of``: the store that a connection string names.

""  P2PHANDSHAKE                     none: engines are opened by address
http://host:port[/metadata]          https
etcd://[user[:password]@]h1[:2379][,h2[:2379]...]       etcds: by TLS
redis://[[user]:password@]host[:6379][/db]              rediss: by TLS
"""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

from moonpool.core.errors import ConfigError
from moonpool.core.printable import without_password
from moonpool.core.service.store_url import ETCD_PORT, address_in, trusting, who_and_place
from moonpool.core.transfer.metadata.backend import Metadata
from moonpool.core.transfer.metadata.etcd_metadata import EtcdMetadata
from moonpool.core.transfer.metadata.http_metadata import HttpMetadata
from moonpool.core.transfer.metadata.redis_metadata import RedisMetadata

HANDSHAKE = "P2PHANDSHAKE"
REDIS_PORT = 6379
FORMS = "http://host:port/metadata, etcd://h1:2379,h2:2379, redis://:password@host:6379/0 or P2PHANDSHAKE"


def metadata_of(
    text: str, token: bytes, *, password: str = "", authorities: str = "", key: str = "metadata"
) -> Metadata | None:
    """None for the handshake, where nothing has to run. Raises ConfigError that names ``key``.

    token:       the cluster token, of which an HTTP server is shown a derived one.
    password:    where ``text`` has none.
    authorities: a file (PEM) of those that TLS trusts; "": the system's.
    """
    if text in ("", HANDSHAKE):
        return None
    scheme, mark, rest = text.partition("://")
    tls = trusting(authorities) if scheme in ("https", "etcds", "rediss") else None
    try:
        if not mark or not rest:
            raise ValueError("no scheme")
        if scheme in ("http", "https"):
            return HttpMetadata(_page(text), token, tls=tls)
        if scheme in ("etcd", "etcds"):
            return _etcd(rest, password, tls)
        if scheme in ("redis", "rediss"):
            return _redis(rest, password, tls)
        raise ValueError(f"no scheme of ours: {scheme}")
    except ValueError as error:
        raise ConfigError(
            f"{key} = {without_password(text)} names no store of metadata; write {FORMS}",
            operation="config",
            key=key,
        ) from error


def _page(url: str) -> str:
    parts = urlsplit(url)
    if not parts.hostname or parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("no page")
    parts.port  # noqa: B018  raises ValueError for one that is none
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/metadata"


def _etcd(rest: str, password: str, tls: ssl.SSLContext | None) -> EtcdMetadata:
    user, given, places = who_and_place(rest.rstrip("/"))
    endpoints = [str(address_in(one, ETCD_PORT)) for one in places.split(",")]
    return EtcdMetadata(endpoints, user=user, password=given or (password if user else ""), tls=tls)


def _redis(rest: str, password: str, tls: ssl.SSLContext | None) -> RedisMetadata:
    user, given, place = who_and_place(rest)
    place, _, database = place.partition("/")
    if database and not (database.isascii() and database.isdigit()):
        raise ValueError("no number of a database")
    return RedisMetadata(
        address_in(place, REDIS_PORT),
        user=user,
        password=given or password,
        database=int(database or 0),
        tls=tls,
    )
