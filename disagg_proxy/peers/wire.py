"""What proxies say to each other: a message is a head, and changes or a whole state.

    frames: Head (msgpack array), list of changes (msgpack arrays with a tag)

A state says all that the sender has in flight and takes the place of what was known of it. Engines have the
names that their operator gave them, HOST:PORT where it gave none: each proxy numbers its engines as it likes.
The site tells whether two engines of one name are one engine (host_identity.py); an older proxy sends none.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

VERSION = 1
CHANGES_MAX = 1024  # of one message of changes


class Kind(IntEnum):
    """Of a message. CHANGES without any are a sign of life."""

    CHANGES = 0
    STATE = 1


class Head(msgspec.Struct, array_like=True, frozen=True):
    """sender: another one after each start. sequence: grows by one with each message of it."""

    version: int
    sender: str
    sequence: int
    kind: int


class Sent(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """A request went out: its prompt is computed by ``computes``, its answer made by ``decode``.

    silent: when its prefill ends will not be heard of. In a state, age_s: seconds since it went out;
    computed, decoding: how far it is. computes_at, decode_at: where these engines are; "": not known.
    """

    request: int
    computes: str
    decode: str
    tokens: int
    own: int
    pool: int
    predicted_s: float
    silent: bool
    age_s: float = 0.0
    computed: bool = False
    decoding: bool = False
    computes_at: str = ""
    decode_at: str = ""


class Prefilled(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Its prompt is computed."""

    request: int


class Begun(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Its first token is there. computed: its prefill is over, too."""

    request: int
    computed: bool


class Gone(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Nothing of it is in work any more."""

    request: int


class BlocksExpected(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """The blocks of a prompt that went to an engine, which will hold them. keys: 16 bytes each."""

    engine: str
    block_tokens: int
    keys: bytes
    at: str = ""


Change = Sent | Prefilled | Begun | Gone | BlocksExpected

_encoder = msgspec.msgpack.Encoder()
_head = msgspec.msgpack.Decoder(Head)
_changes = msgspec.msgpack.Decoder(list[Change])


def encode(head: Head, changes: list[Change]) -> list[bytes]:
    """The two frames of a message."""
    return [_encoder.encode(head), _encoder.encode(changes)]


def decode_head(frame: bytes) -> Head:
    """Raises ValueError."""
    try:
        head = _head.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no head of a proxy's message: {error}") from error
    if head.version != VERSION or head.kind not in (Kind.CHANGES, Kind.STATE):
        raise ValueError(
            f"a message of version {head.version}, kind {head.kind}; this proxy speaks {VERSION}"
        )
    return head


def decode_changes(frame: bytes) -> list[Change]:
    """Raises ValueError."""
    try:
        return _changes.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no changes of a proxy: {error}") from error
