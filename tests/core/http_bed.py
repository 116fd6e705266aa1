"""A node's admin HTTP server over a stand-in for the node."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from moonpool.core.config import config
from moonpool.core.config.config import Config
from moonpool.core.service.listen_addresses import NodeAddresses
from moonpool.core.service.metrics import Histogram
from moonpool.core.service.node import Node

DEADLINE_S = 30


class StandIn:
    """Binds the socket as the native server does, and counts nothing."""

    def __init__(self, _config: Config, path: Path, token: bytes, _reach: NodeAddresses) -> None:
        self.path = path
        self.token = token
        self._listener = socket.socket(socket.AF_UNIX)
        self._silence, self._far_end = socket.socketpair()

    def tell_event_endpoints(self, events: str, replay: str) -> None:
        assert (events, replay) == ("", "")  # it listens on loopback alone

    def start(self) -> None:
        self._listener.bind(str(self.path))
        self._listener.listen()

    def stop(self) -> None:
        self._listener.close()

    @property
    def addresses(self) -> list[str]:
        return ["127.0.0.1:4711"]

    alive = True
    state: tuple[bool, int, str, float] | None = None
    reserved = 1 << 20
    asked = 0

    def is_alive(self, timeout_s: float) -> bool:
        self.asked += 1
        return self.alive

    def memory(self) -> tuple[int, int, bool]:
        return self.reserved, 1 << 20, False

    def membership(self) -> tuple[bool, int, str, float] | None:
        return self.state

    @property
    def notes_fd(self) -> int:
        return self._silence.fileno()

    def take_notes(self) -> list[tuple[int, str, str, str, int]]:
        return []

    def metrics(self) -> Mapping[str, int]:
        return {"objects": 3, "stored_total": 4, 'arena_bytes{tenant="a"}': 5, 'arena_bytes{tenant="b"}': 6}

    def histograms(self) -> Mapping[str, Histogram]:
        return {"lookup_seconds": ([0.001, 0.01], [2, 3, 1], 0.5)}


def settings(**arguments: object) -> Config:
    given: dict[str, object] = {
        "node.http": "127.0.0.1:0",
        "node.listen": "127.0.0.1:0",
        "node.dram": 1 << 20,
    }
    return config.load(
        env={}, arguments=given | {key.replace("__", "."): value for key, value in arguments.items()}
    )


def serving(body: Callable[[Node], Awaitable[None]], made: Config | None = None) -> None:
    async def run() -> None:
        node = Node(made or settings(), make_server=StandIn)
        async with asyncio.timeout(DEADLINE_S):
            await node.start()
            try:
                await body(node)
            finally:
                await node.stop()

    asyncio.run(run())


async def connect(node: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = (node.http_url or "").removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def exchange(node: Node, request: bytes) -> bytes:
    """All that the node answers to ``request`` until it closes the connection."""
    reader, writer = await connect(node)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def get(node: Node, path: str, more: str = "") -> tuple[int, bytes]:
    answer = await exchange(node, f"GET {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body
