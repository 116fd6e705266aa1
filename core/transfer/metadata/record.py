"""``SegmentRecord``: what an engine publishes under its segment's name. JSON, ``id`` first."""

from __future__ import annotations

import re

import msgspec

from moonpool.core.errors import ConfigError, ProtocolError
from moonpool.core.printable import printable

RECORD_BYTES_MAX = 16 << 10
NAME_CHARACTERS_MAX = 256
ADDRESSES_MAX = 16
ADDRESS_CHARACTERS_MAX = 300
_ID = re.compile("[0-9a-f]{32}")


class SegmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. Unknown fields are of later releases, and ignored.

    id:         32 hexadecimal digits, random for each engine: its handshake shows the same.
    tenant:     names of different tenants do not meet.
    addresses:  where peers open it, "host:port" each, in the order to try.
    transports: those that work on its host. Information: each pair of engines agrees on its own.
    host_id:    equal for engines of one host.
    lease_s:    seconds that the entry lives without a renewal.
    """

    id: str  # stays the first field: a store compares the beginning of the text
    name: str
    tenant: str = "default"
    addresses: tuple[str, ...]
    transports: tuple[str, ...] = ()
    host_id: str = ""
    lease_s: float = 0.0

    @property
    def key(self) -> str:
        """Where stores keep it."""
        return key_of(self.tenant, self.name)

    def encode(self) -> bytes:
        """The text that stores keep; it begins with ``mark_of(id)``."""
        return msgspec.json.encode(self)


def key_of(tenant: str, name: str) -> str:
    """The key of a name, the same in every store."""
    return f"moonpool/segments/{tenant}/{name}"


def mark_of(owner: str) -> bytes:
    """What the text of the engine ``owner`` (an id) begins with, and no other engine's does."""
    return b'{"id":"' + owner.encode() + b'"'


def decode(text: bytes, where: str) -> SegmentRecord:
    """Raises ProtocolError, naming the store ``where``, for text that is no record."""
    try:
        if len(text) > RECORD_BYTES_MAX:
            raise ValueError(f"it has more than {RECORD_BYTES_MAX} bytes")
        record = msgspec.json.decode(text, type=SegmentRecord)
        if not _ID.fullmatch(record.id):
            raise ValueError("its id is none")
        if not 1 <= len(record.addresses) <= ADDRESSES_MAX or any(
            len(one) > ADDRESS_CHARACTERS_MAX for one in record.addresses
        ):
            raise ValueError("its addresses are none")
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(
            f"what {where} has under the name is no record of a segment: {printable(str(error))}",
            operation="resolve",
            peer=where,
        ) from error
    return record


def check_name(name: str) -> str:
    """Raises ConfigError for a name that cannot be published."""
    if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
        raise ConfigError(
            f"name = {printable(name, characters_max=80)!r} must have 1 to {NAME_CHARACTERS_MAX} printable "
            f"characters to be published",
            operation="publish",
            key="name",
        )
    return name
