"""The argument ``metadata_server`` of the original's API."""

from __future__ import annotations

from moonpool.core.transfer.metadata.connection_string import metadata_of

P2P = "P2PHANDSHAKE"
WITHOUT_SCHEME = "etcd"


def store_named(metadata_server: str, kind: str = WITHOUT_SCHEME) -> str:
    """moonpool's connection string for it; "" where peers are opened by address.

    kind: the scheme of one that has none.
    """
    if metadata_server.upper() in ("", P2P):
        return ""
    return metadata_server if "://" in metadata_server else f"{kind.lower()}://{metadata_server}"


def check_metadata_server(metadata_server: str) -> None:
    """Raises ConfigError for what names no store. None is asked: nodes are found through the master."""
    metadata_of(store_named(metadata_server), b"", key="metadata_server")
