"""Names in Redis: one string for each, with an expiry. Plain sockets and RESP2; no client library.

Writing is one script, so that nothing comes between looking and writing. Redis measures expiries by its wall
clock. An expiry that is further away than a lease is one that Redis' clock, set back, has left behind; it
counts as ended.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from typing import BinaryIO, cast

from moonpool.core.errors import ProtocolError, Unavailable
from moonpool.core.printable import printable
from moonpool.core.service.addresses import Address
from moonpool.core.service.dial import dial
from moonpool.core.service.http_get import TimedReader
from moonpool.core.transfer.metadata.backend import (
    ANSWER_BYTES_MAX,
    LEASE_S,
    TIMEOUT_S,
    Metadata,
    asking,
    refused,
    taken,
)
from moonpool.core.transfer.metadata.record import SegmentRecord, decode, key_of, mark_of

# KEYS: the key. ARGV: mark of this engine, mark of the dead one, text, lease in ms.
PUBLISH = b"""
local held = redis.call('GET', KEYS[1])
if held and held:sub(1, #ARGV[1]) ~= ARGV[1] and held:sub(1, #ARGV[2]) ~= ARGV[2] then
  local left = redis.call('PTTL', KEYS[1])
  if left >= 0 and left <= tonumber(ARGV[4]) then return {left, held} end
end
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
return {}
"""
# KEYS: the key. ARGV: mark of this engine.
WITHDRAW = b"""
local held = redis.call('GET', KEYS[1])
if held and held:sub(1, #ARGV[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 0
"""
# KEYS: the key.
RESOLVE = b"""
local held = redis.call('GET', KEYS[1])
if held then return {redis.call('PTTL', KEYS[1]), held} end
return {}
"""
REFUSALS = ("NOAUTH", "WRONGPASS", "NOPERM", "ERR invalid password", "ERR Client sent AUTH", "ERR AUTH")
DEPTH_MAX = 4

Reply = bytes | int | None | list["Reply"]


class RedisError(Exception):
    """What Redis answers instead of a value: its code and a sentence."""


class RedisMetadata(Metadata):
    """address: where Redis listens; user, password: "" for none; database: its number; tls: None: plain."""

    def __init__(
        self,
        address: Address,
        *,
        user: str = "",
        password: str = "",
        database: int = 0,
        tls: ssl.SSLContext | None = None,
        lease_s: float = LEASE_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._before: list[Sequence[bytes]] = []
        if password:
            self._before.append([b"AUTH", *([user.encode()] if user else []), password.encode()])
        if database:
            self._before.append([b"SELECT", str(database).encode()])
        self._tls = tls
        self._timeout_s = timeout_s
        self.lease_s = lease_s
        self.towards = address
        self.shown = f"redis at {address}"

    def publish(self, record: SegmentRecord, *, dead: str = "") -> None:
        """See Metadata."""
        with asking(self.shown, "publish"):
            # a mark that is the beginning of no text stands for no dead one
            marks = mark_of(record.id), mark_of(dead) if dead else b"\0"
            lease_ms = str(round(self.lease_s * 1000)).encode()
            held = self._run("publish", PUBLISH, record.key, *marks, record.encode(), lease_ms)
            if held:
                left_ms, text = _pair(held)
                raise taken(record, text, left_ms / 1000, self.shown)

    def withdraw(self, record: SegmentRecord) -> None:
        """See Metadata."""
        with asking(self.shown, "withdraw"):
            self._run("withdraw", WITHDRAW, record.key, mark_of(record.id))

    def resolve(self, tenant: str, name: str) -> SegmentRecord | None:
        """See Metadata."""
        with asking(self.shown, "resolve"):
            found = self._run("resolve", RESOLVE, key_of(tenant, name))
            if not found:
                return None
            left_ms, text = _pair(found)
            record = decode(text, self.shown)
            return record if left_ms <= record.lease_s * 1000 else None

    def _run(self, operation: str, script: bytes, key: str, *arguments: bytes) -> Reply:
        """The value of a script. All requests go in one piece, on a connection of their own."""
        give_up_s = time.monotonic() + self._timeout_s
        requests = [*self._before, [b"EVAL", script, b"1", key.encode(), *arguments]]
        with dial(*self.towards, self._timeout_s) as plain:
            plain.settimeout(max(give_up_s - time.monotonic(), 0.001))
            with (
                plain
                if self._tls is None
                else self._tls.wrap_socket(plain, server_hostname=self.towards.host) as connection
            ):
                connection.sendall(b"".join(map(_request, requests)))
                reader = cast(BinaryIO, TimedReader(connection, give_up_s).makefile("rb"))
                reply: Reply = None
                try:
                    for _ in requests:
                        reply = _reply(reader, ANSWER_BYTES_MAX)
                except RedisError as error:
                    raise self._error(str(error), operation) from error
                return reply

    def _error(self, said: str, operation: str) -> Exception:
        """Redis names no password in what it says."""
        if said.startswith(REFUSALS):
            return refused(self.shown, operation, said)
        return Unavailable(
            f"{self.shown} answered: {printable(said, characters_max=200)}",
            operation=operation,
            peer=self.shown,
        )


def _request(words: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def _reply(reader: BinaryIO, bytes_max: int, depth: int = 0) -> Reply:
    """One value of RESP2. Raises RedisError for an error, ValueError for what is none or is too long,
    ConnectionError at the end of the connection."""
    line = reader.readline(1024)
    if not line:
        raise ConnectionError("it closed the connection")
    if not line.endswith(b"\r\n"):
        raise ValueError(f"no line of RESP: {line[:40]!r}")
    kind, rest = line[:1], line[1:-2]
    if kind == b"-":
        raise RedisError(rest.decode(errors="replace"))
    if kind == b"+":
        return rest
    if kind not in b":$*":
        raise ValueError(f"no reply of RESP2: {line[:40]!r}")
    number = int(rest)
    if kind == b":":
        return number
    if number < 0:
        return None
    if number > bytes_max:
        raise ValueError(f"the answer has more than {bytes_max} bytes")
    if kind == b"$":
        text = reader.read(number + 2)
        if len(text) < number + 2:
            raise ConnectionError("it closed the connection")
        return text[:-2]
    if depth == DEPTH_MAX or number > 64:
        raise ValueError("a list that no script of ours returns")
    return [_reply(reader, bytes_max, depth + 1) for _ in range(number)]


def _pair(reply: Reply) -> tuple[int, bytes]:
    if isinstance(reply, list) and len(reply) == 2:
        left_ms, text = reply
        if isinstance(left_ms, int) and isinstance(text, bytes):
            return left_ms, text
    raise ProtocolError(f"no reply of our scripts: {reply!r:.80}")
