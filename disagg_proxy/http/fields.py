"""Header fields: which ones end at the proxy, and how a list of them becomes lines.

A hop-by-hop field (RFC 9110 section 7.6.1) describes one connection, so it is dropped on both ways; so is
every field that ``Connection`` names. The framing fields (``Content-Length``, ``Transfer-Encoding``) are read
by the readers and written anew by whoever sends the message.
"""

from __future__ import annotations

from collections.abc import Iterable

Field = tuple[bytes, bytes]

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"upgrade",
        b"http2-settings",
    )
)


def tokens(value: bytes) -> list[bytes]:
    """The comma-separated words of a field's value, in lower case."""
    return [word for part in value.lower().split(b",") if (word := part.strip())]


def lines(fields: Iterable[Field]) -> bytes:
    """The fields as they stand in a head, each ended by CRLF."""
    return b"".join([b"%b: %b\r\n" % field for field in fields])


def without(fields: list[Field], named: Iterable[bytes]) -> list[Field]:
    """The fields less those that a ``Connection`` field names (lower case)."""
    names = frozenset(named)
    return [field for field in fields if field[0].lower() not in names]
