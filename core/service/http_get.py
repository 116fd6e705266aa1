"""The smallest HTTP client: one request for a small page, within a deadline."""

from __future__ import annotations

import asyncio
import http.client
import io
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from moonpool.core.errors import Unavailable
from moonpool.core.service.dial import dial
from moonpool.core.service.http_tls import own_child_context

ANSWER_BYTES_MAX = 4 << 20


async def answers_ok(url: str, *, timeout_s: float = 2.0) -> bool:
    """Whether GET ``url``, of a process that we started, answers 200 within ``timeout_s`` seconds."""
    parts = urlsplit(url)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            tls = own_child_context() if parts.scheme == "https" else None
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
            head = f"GET {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            line = await reader.readline()
            return line.split(b" ", 2)[1:2] == [b"200"]
    except (TimeoutError, OSError, ValueError):
        return False
    finally:
        if writer is not None:
            writer.close()


async def accepts(url: str, *, timeout_s: float = 2.0) -> bool:
    """Whether the address of ``url`` takes a connection within ``timeout_s`` seconds."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (TimeoutError, OSError):
        return False
    writer.close()
    return True


class TimedReader(io.RawIOBase):
    """Reads a socket until a deadline: a peer that sends a byte now and then does not extend it."""

    def __init__(self, inner: socket.socket, give_up_s: float) -> None:
        """give_up_s: on time.monotonic()."""
        super().__init__()
        self._inner = inner
        self._give_up_s = give_up_s

    def readable(self) -> bool:
        """True, as io.RawIOBase demands of a reader."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises TimeoutError from ``give_up_s`` on."""
        left_s = self._give_up_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._inner.settimeout(left_s)
        return self._inner.recv_into(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:
        """As of a socket."""
        return io.BufferedReader(self)


def get_json(
    url: str, *, timeout_s: float = 2.0, tls: ssl.SSLContext | None = None, token: bytes = b""
) -> Any:
    """The JSON value of GET ``url``. Raises Unavailable when there is none within ``timeout_s`` seconds,
    whichever process answers, and however slowly.

    tls: the trusted authorities where ``url`` is https. token: sent as Authorization: Bearer, unless empty.
    """
    try:
        return msgspec.json.decode(_get(url, time.monotonic() + timeout_s, timeout_s, tls, token))
    except Unavailable:
        raise
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise Unavailable(f"GET {url} failed: {error}", operation="get", peer=url, cause=error) from error


def _get(
    url: str, give_up_s: float, timeout_s: float, tls: ssl.SSLContext | None, token: bytes = b""
) -> bytes:
    """Raises Unavailable for another answer than 200, OSError, HTTPException and ValueError."""
    headers = {"Authorization": f"Bearer {token.decode('ascii')}"} if token else {}
    left_s = min(timeout_s, give_up_s - time.monotonic())
    answer = exchange("GET", url, headers=headers, timeout_s=left_s, tls=tls)
    if answer.status != 200:
        raise Unavailable(f"GET {url} answered {answer.status}", operation="get", peer=url)
    return answer.body


class Answer(NamedTuple):
    """What an HTTP server answered."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


def exchange(
    method: str,
    url: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 2.0,
    tls: ssl.SSLContext | None = None,
    answer_bytes_max: int = ANSWER_BYTES_MAX,
) -> Answer:
    """One request on a connection of its own, within ``timeout_s`` seconds altogether. Raises OSError
    (TimeoutError at the deadline), HTTPException, and ValueError for an answer of more than
    ``answer_bytes_max`` bytes.

    tls: the trusted authorities where ``url`` is https; None: the system's.
    """
    give_up_s = time.monotonic() + timeout_s
    parts = urlsplit(url)
    is_https = parts.scheme == "https"
    host = parts.hostname or ""
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    given = {"Host": parts.netloc.rpartition("@")[2], "Connection": "close", **(headers or {})}
    if body or method in ("PUT", "POST"):
        given["Content-Length"] = str(len(body))
    head = f"{method} {target} HTTP/1.1\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in given.items()
    )
    with ExitStack() as stack:
        connected = stack.enter_context(dial(host, parts.port or (443 if is_https else 80), timeout_s))
        if is_https:
            connected.settimeout(max(give_up_s - time.monotonic(), 0.001))
            context = tls or ssl.create_default_context()
            connected = stack.enter_context(context.wrap_socket(connected, server_hostname=host))
        connected.settimeout(max(give_up_s - time.monotonic(), 0.001))
        connected.sendall(head.encode("ascii") + b"\r\n" + body)
        response = http.client.HTTPResponse(
            cast(socket.socket, TimedReader(connected, give_up_s)), method=method
        )
        response.begin()
        found = response.read(answer_bytes_max + 1)
        if len(found) > answer_bytes_max:
            raise ValueError(f"the answer has more than {answer_bytes_max} bytes")
        return Answer(response.status, response.headers, found)
