"""SGLang engines: their self-description, and the fields by which a prefill and a decode engine connect.

``GET /server_info`` has the disaggregation mode, so that roles need not be configured, and the port of a
prefill engine's bootstrap server. Both engines get the same request, with the bootstrap address and room:

    "bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 4611686018427387904

A room is the number of one prompt's hand-over. For a batch of prompts all three fields are lists.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

MODES: Mapping[str, str] = {"prefill": "prefill", "decode": "decode"}  # the role; any other mode: both
PAGE = "/server_info"
# Clients must not send these: disagg_proxy/csrc/relay/reserved_members.cpp.
MEMBERS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
HEALTH_S = 21.0  # SGLang's /health waits up to 20 s for its scheduler before it says 503
FIRST_ROOMS = 1 << 62  # so that rooms never reach 2^63
PROMPTS_MAX = 4096  # of one request: each gets a room


class ServerInfo(msgspec.Struct):
    """The members that are used; an answer without the first is not SGLang's."""

    disaggregation_mode: str
    disaggregation_bootstrap_port: int | None = None


_info = msgspec.json.Decoder(ServerInfo)


def read_server_info(body: bytes) -> ServerInfo | None:
    """Parses /server_info; None: it is not SGLang's."""
    try:
        info = _info.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # no JSON, no text, nested without end
        return None
    port = info.disaggregation_bootstrap_port
    return info if port is None or 0 < port < 65536 else None


def room_ids() -> Iterator[int]:
    """Unique bootstrap rooms: consecutive numbers from a random start, so that they practically never collide
    with another proxy's. Consecutive, because SGLang may choose the data-parallel rank by the room. Thread
    safe."""
    return itertools.count(secrets.randbelow(FIRST_ROOMS))


@dataclass(frozen=True, slots=True)
class BootstrapAddress:
    """The address of a prefill engine's bootstrap server, as sent to decode engines."""

    host: str
    port: int

    def members(self, rooms: Iterator[int], prompts: int | None) -> tuple[tuple[bytes, bytes], ...]:
        """The members of the request for both engines, as JSON. prompts: their number; None: not a list."""
        host = b'"%b"' % (f"[{self.host}]" if ":" in self.host else self.host).encode()
        if prompts is None:
            values = (host, b"%d" % self.port, b"%d" % next(rooms))
        else:
            values = (
                _array([host] * prompts),
                _array([b"%d" % self.port] * prompts),
                _array([b"%d" % next(rooms) for _ in range(prompts)]),
            )
        return tuple(zip(_NAMES, values, strict=True))


_NAMES = tuple(name.encode() for name in MEMBERS)


def _array(values: list[bytes]) -> bytes:
    return b"[" + b",".join(values) + b"]"
