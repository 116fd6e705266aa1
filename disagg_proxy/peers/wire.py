"""Messages between proxies: a head, and changes or a whole state.

    frames: Head (msgpack array), list of changes (msgpack arrays with a tag)

A state has all requests that the sender has in flight and replaces what was known of it. Engines are named by
the operator, or by HOST:PORT, since each proxy numbers its engines differently.
The site tells whether two engines of one name are one engine (host_identity.py); an older proxy sends none.

Messages go to all proxies at once, so a proxy sends the highest version that all of them read
(``version_for``); each says in its heads which it reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import msgspec

from moonpool.core.version_range import VersionRange

VERSIONS = VersionRange(1, 1)  # that this proxy reads and writes
WHAT = "the messages between proxies"
CHANGES_MAX = 1024  # changes in one message


class Kind(IntEnum):
    """Kind of a message. CHANGES with an empty list is a heartbeat."""

    CHANGES = 0
    STATE = 1


class Head(msgspec.Struct, array_like=True, frozen=True):
    """Head of a message. sender: random id of one run of a proxy. sequence: grows by one with each
    message. sent_at: seconds since 1970 by the sender's clock; 0.0: an older proxy, which does not say.
    version: of this message. lowest, highest: versions that the sender reads; 0: an older proxy, which reads
    ``version``."""

    version: int
    sender: str
    sequence: int
    kind: int
    sent_at: float = 0.0
    lowest: int = 0
    highest: int = 0

    @property
    def reads(self) -> VersionRange:
        """The versions that the sender reads."""
        return VersionRange.said(self.version, self.lowest, self.highest)


class Sent(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """A request was sent: engine ``computes`` prefills it, engine ``decode`` answers.

    silent:                 no message will report the end of its prefill.
    age_s:                  seconds since it was sent; above 0 in states only.
    computed, decoding:     its progress; in states only.
    computes_at, decode_at: sites of the engines; "": unknown.
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
    """The prefill of a request is done."""

    request: int


class Begun(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """The first token was sent. computed: the prefill is done, too."""

    request: int
    computed: bool


class Gone(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """The request is over."""

    request: int


class BlocksExpected(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Blocks of a prompt that was sent to an engine, which will hold them. keys: 16 bytes each."""

    engine: str
    block_tokens: int
    keys: bytes
    at: str = ""


Change = Sent | Prefilled | Begun | Gone | BlocksExpected

_encoder = msgspec.msgpack.Encoder()
_head = msgspec.msgpack.Decoder(Head)
_changes = msgspec.msgpack.Decoder(list[Change])


class OtherVersion(ValueError):
    """A message of a version that this proxy does not read. reads: versions that its sender reads."""

    def __init__(self, text: str, reads: VersionRange) -> None:
        super().__init__(text)
        self.reads = reads

    @property
    def is_lasting(self) -> bool:
        """No version is in common. Else the sender takes one that this proxy reads once it has heard it."""
        return VERSIONS.common(self.reads) is None


def encode(head: Head, changes: list[Change]) -> list[bytes]:
    """The two frames of a message."""
    return [_encoder.encode(head), _encoder.encode(changes)]


def decode_head(frame: bytes) -> Head:
    """Raises ValueError; OtherVersion, where the message is of a version that this proxy does not read."""
    try:
        head = _head.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no head of a proxy's message: {error}") from error
    if head.version not in VERSIONS:
        if VERSIONS.common(head.reads) is not None:
            text = f"it sent version {head.version}, which this proxy does not read, and has yet to hear it"
        else:
            text = VERSIONS.none_in_common("this proxy", head.reads, "that one", WHAT)
        raise OtherVersion(text, head.reads)
    if head.kind not in (Kind.CHANGES, Kind.STATE):
        raise ValueError(f"a message of kind {head.kind}")
    return head


def version_for(readers: Iterable[VersionRange | None], own: VersionRange = VERSIONS) -> int:
    """The version of ``own`` to send. Of those that most of the ``readers`` read, which are all of them among
    adjacent releases, it is the highest. None: a proxy that was not heard, and may be of the release before;
    while there is one it is the lowest of those. A reader that reads none of ``own`` tells its operator."""
    all_readers = list(readers)
    heard = [reader for reader in all_readers if reader is not None and own.common(reader) is not None]
    read_by = dict.fromkeys(range(own.lowest, own.highest + 1), 0)
    for version in read_by:
        read_by[version] = sum(version in reader for reader in heard)
    most = max(read_by.values())
    suitable = [version for version, count in read_by.items() if count == most]
    return min(suitable) if None in all_readers else max(suitable)


def decode_changes(frame: bytes) -> list[Change]:
    """Raises ValueError."""
    try:
        return _changes.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no changes of a proxy: {error}") from error
