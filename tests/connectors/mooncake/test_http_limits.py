"""The metadata server and the REST service beside clients that only take: connections, heads, bodies, time.

Each limit is met while the others are far away; what is waited for ends by that limit alone.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from mooncake import _http
from mooncake._http import BoundedHttp, HttpLimits
from mooncake.http_metadata_server import KVBootstrapServer, KVPoll, MetadataServer
from mooncake.mooncake_store_service import MooncakeStoreService

HOST = "127.0.0.1"
LONG_S = 3600.0
DEADLINE_S = 60.0
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Bed:
    """A server whose PUT says how many bytes it got, once ``go`` is set, and its clients."""

    def __init__(self, limits: HttpLimits) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.asked = 0
        self.cancelled = 0
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_put("/body", self._body)
        self.http = BoundedHttp(app, limits)
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def _health(self, _request: web.Request) -> web.Response:
        self.asked += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return web.Response(text="OK")

    async def _body(self, request: web.Request) -> web.Response:
        body = await self.http.body(request)
        await self.go.wait()
        return web.Response(text=str(len(body)))

    async def connect(self, data: bytes = b"") -> Client:
        reader, writer = await asyncio.open_connection(HOST, self.port)
        self._writers.append(writer)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def ask(self, data: bytes) -> bytes:
        return await rest(await self.connect(data))

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def serving(limits: HttpLimits) -> AsyncIterator[Bed]:
    bed = Bed(limits)
    _, bed.port = await bed.http.start(HOST, 0)
    try:
        yield bed
    finally:
        bed.go.set()
        bed.close()
        await bed.http.close()


def put(length: int, path: str = "/body") -> bytes:
    return f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


async def rest(client: Client) -> bytes:
    """All that the server says before it ends the connection; it does within the deadline."""
    got = b""
    try:
        while part := await asyncio.wait_for(client[0].read(1 << 16), DEADLINE_S):
            got += part
    except ConnectionError:
        pass
    return got


async def until(condition: Callable[[], Any]) -> None:
    async def look() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(look(), DEADLINE_S)


def run(act: Coroutine[Any, Any, None]) -> None:
    asyncio.run(act)


LIMITS = HttpLimits(100_000, 8, LONG_S, lingering_s=0.0)


def test_the_oldest_connections_make_room() -> None:
    async def act() -> None:
        async with serving(LIMITS) as bed:
            crowd = [await bed.connect(b"GET /he"[: i % 8]) for i in range(40)]
            assert b"200 OK" in await bed.ask(GET)
            for client in crowd[: 40 - 7]:
                assert await rest(client) == b""
            assert len(bed.http.open) <= 8
            crowd[-1][1].write(GET[len(b"GET /he"[: 39 % 8]) :])  # the newest are still served
            assert b"200 OK" in await rest(crowd[-1])

    run(act())


def test_a_handler_ends_with_its_connection() -> None:
    """Else those of connections that made room would be as many as come."""

    async def act() -> None:
        async with serving(LIMITS) as bed:
            bed.go.clear()
            for i in range(20):
                await bed.connect(GET)
                await until(lambda i=i: bed.asked == i + 1)
            await until(lambda: bed.cancelled == 12)
            assert len(bed.http.open) == len(bed.http.by_protocol) == 8

    run(act())


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\nHost", put(10), put(10) + b"12345"])
def test_a_connection_has_its_time(data: bytes) -> None:
    async def act() -> None:
        async with serving(replace(LIMITS, timeout_s=0.05)) as bed:
            assert await bed.ask(data) == b""
            await until(lambda: not bed.http.open and not bed.http.by_protocol)
            assert bed.http.body_bytes == 0

    run(act())


def test_bytes_that_move_give_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = _http._Connection._start_timer

    def start_and_count(connection: Any) -> None:
        started.append(connection)
        start(connection)

    monkeypatch.setattr(_http._Connection, "_start_timer", start_and_count)

    async def act() -> None:
        async with serving(replace(LIMITS, body_bytes_max=10 * _http.PROGRESS_BYTES)) as bed:
            assert (await bed.ask(put(5) + b"12345")).endswith(b"5")
            assert len(started) == 1
            length = 3 * _http.PROGRESS_BYTES
            assert (await bed.ask(put(length) + bytes(length))).endswith(b"3145728")
            assert len(started) == 1 + 1 + 3

    run(act())


@pytest.mark.parametrize("line", [b"Name: ", b"Name: value\r\n"])
def test_a_head_is_bounded(line: bytes) -> None:
    """Whether its end has come or not, and nothing else sees it."""

    async def act() -> None:
        assert LIMITS.head_bytes_max == 32 << 10
        async with serving(replace(LIMITS, head_bytes_max=400)) as bed:
            data = GET.removesuffix(b"\r\n") + line * 80
            assert len(data) > 400
            assert await bed.ask(data) == b""
            assert await bed.ask(data + b"\r\n\r\n") == b""
            assert bed.asked == 0
            assert b"200 OK" in await bed.ask(GET.removesuffix(b"\r\n") + b"Name: value\r\n" * 20 + b"\r\n")

    run(act())


def test_heads_in_pieces() -> None:
    """Also where the end of one is cut."""

    async def act() -> None:
        async with serving(LIMITS) as bed:
            for data in (GET, put(0)):
                for left in range(len(data)):
                    reader, writer = await bed.connect(data[:left])
                    await until(lambda: bed.http.open)
                    (connection,) = bed.http.open
                    await until(lambda one=connection, left=left: one._head is None or len(one._head) == left)
                    writer.write(data[left:])
                    assert b"200 OK" in await rest((reader, writer))
                    await until(lambda: not bed.http.open)

    run(act())


def test_one_request_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests behind it are not even parsed: they would wait in memory, however many there are."""
    parsed: list[bytes] = []
    receive = RequestHandler.data_received

    def receive_and_note(handler: Any, data: bytes) -> None:
        parsed.append(data)
        receive(handler, data)

    monkeypatch.setattr(RequestHandler, "data_received", receive_and_note)

    async def act() -> None:
        async with serving(LIMITS) as bed:
            for data, end in ((GET, b"OK"), (put(5) + b"12345", b"5"), (put(0), b"0")):
                parsed.clear()
                got = await bed.ask(data + GET * 10)
                assert b"".join(parsed) == data
                assert got.count(b"HTTP/1.1 200 OK") == got.count(b"Connection: close") == 1
                assert got.endswith(b"\r\n" + end)
            missing = await bed.ask(GET.replace(b"health", b"nothing"))
            assert b"404" in missing
            assert b"Connection: close" in missing

    run(act())


def test_a_body_is_bounded() -> None:
    async def act() -> None:
        async with serving(LIMITS) as bed:
            assert (await bed.ask(put(100_000) + bytes(100_000))).endswith(b"100000")
            assert b" 413 " in await bed.ask(put(100_001))
            assert b" 413 " in await bed.ask(put(10**17))
            chunked = b"PUT /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n"
            assert b" 411 " in await bed.ask(chunked)
            assert bed.http.body_bytes == 0

    run(act())


def test_all_bodies_together_are_bounded() -> None:
    async def act() -> None:
        async with serving(LIMITS) as bed:
            most = _http.BODIES_MAX
            clients = [await bed.connect(put(100_000) + bytes(99_999)) for _ in range(most)]
            await until(lambda: bed.http.body_bytes == most * 99_999)
            refused = await bed.ask(put(100_000) + bytes(most + 1))
            assert b" 503 " in refused
            assert b"Retry-After: 1" in refused
            assert (await bed.ask(put(most) + bytes(most))).endswith(b"\r\n%d" % most)
            clients[0][1].close()
            await until(lambda: bed.http.body_bytes == (most - 1) * 99_999)
            bed.go.clear()
            waiting = await bed.connect(put(100_000) + bytes(100_000))  # held until its answer is given
            await until(lambda: bed.http.body_bytes == (most - 1) * 99_999 + 100_000)
            bed.go.set()
            assert (await rest(waiting)).endswith(b"100000")
            for client in clients[1:]:
                client[1].write(b"1")
                assert (await rest(client)).endswith(b"100000")
            assert bed.http.body_bytes == 0

    run(act())


def test_no_more_than_half_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, wanted, most in (
        (resource.RLIM_INFINITY, None, 1024),
        (resource.RLIM_INFINITY, 5000, 5000),
        (65536, None, 1024),
        (1024, None, 512),
        (1024, 5000, 512),
        (1024, 20, 20),
        (1, None, 1),
        (1024, -5, 1),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
        assert _http.connections_that_fit(wanted) == most


def test_a_crowd_beside_the_metadata_server() -> None:
    """With 64 files, 200 connections of a stranger: the server goes on, without a traceback."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    code = f"{limit}; from mooncake.http_metadata_server import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]

        async def act() -> None:
            port = int(url.rpartition(":")[2].partition("/")[0])
            crowd = [await asyncio.open_connection(HOST, port) for _ in range(200)]
            client = await asyncio.open_connection(HOST, port)
            client[1].write(put(5, "/metadata?key=k") + b"value")
            assert b" 200 " in await rest(client)
            for reader, writer in [*crowd, client]:
                del reader
                writer.close()

        try:
            run(act())
        finally:
            server.terminate()
            _, errors = server.communicate(timeout=DEADLINE_S)
        assert "Traceback" not in errors
        assert server.returncode == 0


def test_the_metadata_server_has_these_limits() -> None:
    async def act() -> None:
        server = MetadataServer(port=0, connections_max=3)
        await server.start()
        try:
            assert server.http.limits == HttpLimits(1 << 20, 3)
            port = int(server.url.rpartition(":")[2].partition("/")[0])
            crowd = [await asyncio.open_connection(HOST, port) for _ in range(9)]
            for length, sent, status in ((1 << 20, 1 << 20, b" 200 "), ((1 << 20) + 1, 0, b" 413 ")):
                client = await asyncio.open_connection(HOST, port)
                client[1].write(put(length, "/metadata?key=k") + bytes(sent))
                assert status in await rest(client)
                client[1].close()
            for client in crowd[:6]:
                assert await rest(client) == b""
            for client in crowd:
                client[1].close()
        finally:
            await server.close()

    run(act())
    inside = KVBootstrapServer(0, connections_max=7)
    inside.run()
    try:
        assert inside.poll() is KVPoll.Success
        assert inside.connections_max == 7
    finally:
        inside.close()


def test_the_rest_service_has_these_limits(store: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large value is sent piece by piece, out of the pool's memory."""
    names = ("local_hostname", "metadata_server", "master_server_address")
    service = MooncakeStoreService(cli_config=dict.fromkeys(names, "x"))
    monkeypatch.setattr(service, "store", store)
    value = bytes(range(256)) * (10 << 10)  # 2.5 MiB
    assert store.put(key, value) == 0

    async def ask(data: bytes) -> bytes:
        client = await asyncio.open_connection(HOST, int(service.url.rpartition(":")[2]))
        client[1].write(data)
        try:
            return await rest(client)
        finally:
            client[1].close()

    async def act() -> None:
        await service.start_http_service(0, connections_max=3)
        assert service.http is not None
        try:
            assert service.http.limits == HttpLimits(64 << 20, 3)
            port = int(service.url.rpartition(":")[2])
            crowd = [await asyncio.open_connection(HOST, port) for _ in range(9)]
            for client in crowd[:6]:
                assert await rest(client) == b""
            for client in crowd:
                client[1].close()
            path = f"/api/get/{key} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            head, _, body = (await ask(b"GET " + path)).partition(b"\r\n\r\n")
            assert b" 200 " in head
            assert body == value
            head, _, body = (await ask(b"HEAD " + path)).partition(b"\r\n\r\n")
            assert b"Content-Length: %d" % len(value) in head
            assert body == b""
            assert b" 413 " in await ask(put((64 << 20) + 1, "/api/put"))
            for text, status in (
                (json.dumps({"key": f"{key}-2", "value": "x"}), b" 200 "),
                ("[" * 100_000, b" 400 "),
                ("5", b" 400 "),
                ("\udcff", b" 400 "),
            ):
                data = text.encode(errors="surrogateescape")
                assert status in await ask(put(len(data), "/api/put") + data)
            assert service.http.body_bytes == 0
        finally:
            await service.http.close()

    run(act())
    assert store.get(f"{key}-2") == b"x"
