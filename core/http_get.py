"""The smallest HTTP client: one GET of a small page of a process of ours, within a deadline."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from typing import Any
from urllib.parse import urlsplit

import msgspec

from moonpool.core.errors import Unavailable
from moonpool.core.tls import own_child_context

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


def get_json(url: str, *, timeout_s: float = 2.0, tls: ssl.SSLContext | None = None) -> Any:
    """The JSON value of GET ``url``. Raises Unavailable when there is none within ``timeout_s`` seconds.

    tls: what to trust where ``url`` is https.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection = (
        http.client.HTTPSConnection(host, parts.port or 443, timeout=timeout_s, context=tls)
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, parts.port or 80, timeout=timeout_s)
    )
    try:
        connection.request("GET", parts.path or "/")
        response = connection.getresponse()
        body = response.read(ANSWER_BYTES_MAX)
        if response.status != 200:
            raise Unavailable(f"GET {url} answered {response.status}", operation="get", peer=url)
        return msgspec.json.decode(body)
    except (TimeoutError, OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        raise Unavailable(f"GET {url} failed: {error}", operation="get", peer=url, cause=error) from error
    finally:
        connection.close()
