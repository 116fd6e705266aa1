"""What the proxy's tests share: an engine whose every byte is scripted, a raw client, a running proxy, a
deadline.

Nothing here sleeps: tests wait for events, and each has a deadline that fails it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import re
import ssl
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import uvloop

import moonpool
from moonpool._native import ProxyRequest, Relay
from moonpool.core.config.proxy_section import BreakerLimits, Deadlines, HealthChecks, Limits
from moonpool.disagg_proxy.conductor.plan import Decision
from moonpool.disagg_proxy.data_plane.counters import Counters, EngineCounters
from moonpool.disagg_proxy.server import Proxy
from moonpool.disagg_proxy.settings import EngineSpec, Internals, ProxySettings

NEVER_S = 1e6
# One check at the start, however slow this machine is; then none: the test tells what happens.
QUIET = HealthChecks(interval_s=NEVER_S, timeout_s=10.0)


def with_deadline(test: Callable[..., Awaitable[None]], deadline_s: float = 20.0) -> Callable[..., None]:
    """Run an async test on uvloop; fail it when it takes longer than deadline_s."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*args, **kwargs), deadline_s)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(bounded())

    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run


class FakeClock:
    """Lets the proxy's time pass at once: ``clock.now += seconds``. (Its own seconds pass besides.)"""

    def __init__(self) -> None:
        self.relay: Relay | None = None
        self._now = 1000.0

    @property
    def now(self) -> float:
        return self._now

    @now.setter
    def now(self, value: float) -> None:
        assert self.relay is not None
        passed, self._now = value - self._now, value
        self.relay.advance_clock_for_test(passed)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds (the test's deadline ends it otherwise)."""
    while not condition():
        await asyncio.sleep(0)


def broke_two_engines(answer: Answer) -> bool:
    """Two engines broke under the request: the proxy offers it to no third one, its client may."""
    return answer.status == 502 and b"as another engine did" in answer.body


@dataclass
class Exchange:
    """One request that arrived at a mock engine, and the way to answer it byte by byte."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    gone: asyncio.Event  # the proxy closed the connection

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes, status: int = 200, content_type: str = "application/json") -> None:
        head = f"HTTP/1.1 {status} Whatever\r\nContent-Type: {content_type}\r\n"
        await self.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def begin_stream(self) -> None:
        await self.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    async def event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    def cut(self) -> None:
        """What a crash of the engine looks like."""
        self.writer.transport.abort()


Behaviour = Callable[[Exchange], Awaitable[None]]


class MockEngine:
    """Answers GET /health by ``healthy`` and everything else by ``behave``.

    models: what its /v1/models says to the proxy's own checks (None: 404); pages: what its other pages say;
    page_status: of those that it has.
    seen: every request that arrived, those of the proxy's checks aside.
    connections: how many were accepted for those.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.healthy = True
        self.models: bytes | None = None
        self.pages: dict[str, bytes] = {}
        self.page_status = 200
        self.behave: Behaviour = self.say_name
        self.seen: list[Exchange] = []
        self.health_checks = 0
        self.connections = 0
        self.port = 0
        self.tls: ssl.SSLContext | None = None  # it is at https://, from its start on
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def spec(self) -> EngineSpec:
        scheme = "http" if self.tls is None else "https"
        return EngineSpec(self.name, f"{scheme}://127.0.0.1:{self.port}")

    async def say_name(self, exchange: Exchange) -> None:
        await exchange.answer(b'{"engine":"%b"}' % self.name.encode())

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, limit=1 << 20, ssl=self.tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and cut every connection, as a killed process does."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        gone = asyncio.Event()
        counted = False
        try:
            while (exchange := await self._read(reader, writer, gone)) is not None:
                if exchange.target == "/health":
                    self.health_checks += 1
                    await exchange.answer(b"", 200 if self.healthy else 503)
                    continue
                if exchange.headers.get("user-agent") == "moonpool-proxy":
                    page = self.pages.get(exchange.target, self.models)
                    await exchange.answer(page or b"", 404 if page is None else self.page_status)
                    continue
                self.connections += not counted
                counted = True
                self.seen.append(exchange)
                behaving = asyncio.ensure_future(self.behave(exchange))
                watching = asyncio.ensure_future(reader.read(1))  # the proxy never pipelines: only EOF comes
                try:
                    await asyncio.wait({behaving, watching}, return_when=asyncio.FIRST_COMPLETED)
                    if watching.done():
                        gone.set()
                        await behaving
                        return
                finally:
                    watching.cancel()
                    with contextlib.suppress(asyncio.CancelledError, OSError):
                        await watching
                    if not behaving.done():
                        behaving.cancel()
                behaving.result()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            gone.set()
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gone: asyncio.Event
    ) -> Exchange | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            line, *rest = head.decode("latin-1").split("\r\n")
            method, target, _ = line.split(" ")
            headers = {k.lower(): v for k, _, v in (row.partition(": ") for row in rest if row)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
        except (asyncio.IncompleteReadError, OSError):
            return None
        return Exchange(method, target, headers, body, writer, gone)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def engine(self) -> str:
        return self.headers.get("x-moonpool-engine", "")


class Client:
    """A client that writes and reads raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def request(self, method: str, target: str, body: bytes | None = None, head: str = "") -> None:
        await self.send(request_bytes(method, target, body, head))

    async def ask(self, method: str, target: str, body: bytes | None = None, head: str = "") -> Answer:
        await self.request(method, target, body, head)
        return await self.answer(head_only=method == "HEAD")

    async def head(self) -> Answer:
        text = await self.reader.readuntil(b"\r\n\r\n")
        line, *rest = text.decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, _, v in (row.partition(": ") for row in rest if row)}
        return Answer(int(line.split(" ")[1]), headers, b"")

    async def chunk(self) -> bytes:
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def answer(self, *, head_only: bool = False) -> Answer:
        answer = await self.head()
        if head_only:
            return answer
        if answer.headers.get("transfer-encoding") == "chunked":
            pieces = []
            while piece := await self.chunk():
                pieces.append(piece)
            answer.body = b"".join(pieces)
        elif "content-length" in answer.headers:
            answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
        else:
            answer.body = await self.reader.read()
        return answer

    async def ended(self) -> bytes:
        """Everything up to the end of the connection, however it ends."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := await self.reader.read(1 << 16):
                data += piece
        return data

    def leave(self) -> None:
        self.writer.transport.abort()


def request_bytes(method: str, target: str, body: bytes | None = None, head: str = "") -> bytes:
    length = "" if body is None else f"Content-Length: {len(body)}\r\n"
    return f"{method} {target} HTTP/1.1\r\nHost: test\r\n{head}{length}\r\n".encode() + (body or b"")


def filler(size: int) -> bytes:
    """A JSON object of so many bytes."""
    return b'{"a":"' + b"x" * (size - 8) + b'"}'


@dataclass
class ProxyProcess:
    """A proxy in a process of its own."""

    process: asyncio.subprocess.Process
    port: int

    async def client(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))


PROGRAM = """
import json, sys
from moonpool.core.config.proxy_section import Deadlines
from moonpool.disagg_proxy.process import run
from moonpool.disagg_proxy.settings import ProxySettings, parse_engines
more = json.loads(sys.argv[1])
more["deadlines"] = Deadlines(**more.get("deadlines", {}))
sys.exit(run(ProxySettings(engines=parse_engines(sys.argv[2:]), **more)))
"""


@contextlib.asynccontextmanager
async def proxy_process(
    *engines: MockEngine, port: int = 0, output: IO[bytes] | None = None, **more: Any
) -> AsyncIterator[ProxyProcess]:
    """Start one and wait until it serves; kill it if it still runs in the end. output: a file for all that it
    says, in place of a pipe."""
    assert moonpool.__file__ is not None
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        json.dumps({"port": port, **more}),
        *(engine.spec.url for engine in engines),
        stdout=output or asyncio.subprocess.PIPE,
        stderr=output,
        env=os.environ | {"PYTHONPATH": str(Path(moonpool.__file__).parent.parent)},
    )
    try:
        if output is None:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
        else:
            said = Path(output.name)
            await until(lambda: re.search(r"^moonpool proxy: .*\n", said.read_text(), re.M) is not None)
            line = next(row for row in said.read_text().splitlines() if row.startswith("moonpool proxy: "))
        assert line.startswith("moonpool proxy: serving on http://127.0.0.1:")
        yield ProxyProcess(process, int(line.split(" ")[4].rsplit(":", 1)[1]))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@dataclass
class Bed:
    """A proxy with its mock engines, all on the test's loop."""

    proxy: Proxy
    engines: list[MockEngine]
    host: str
    port: int
    clients: list[Client] = field(default_factory=list)
    tls: ssl.SSLContext | None = None  # of clients

    async def client(self, tls: ssl.SSLContext | None = None) -> Client:
        """tls: in place of that of all clients."""
        context = tls or self.tls
        name = None if context is None else self.host
        client = Client(
            *await asyncio.open_connection(
                self.host, self.port, limit=1 << 22, ssl=context, server_hostname=name
            )
        )
        self.clients.append(client)
        return client

    @property
    def counters(self) -> Counters:
        return self.proxy.counters()

    def engine(self, place: int) -> EngineCounters:
        return self.counters.engines[place]

    @property
    def client_count(self) -> int:
        return self.counters.client_connections

    def connection(self) -> dict[str, int]:
        """What the proxy's side of the only client's connection is doing; all 0 when there is none."""
        rows = self.proxy.relay.clients()
        return rows[0] if len(rows) == 1 else defaultdict(int)

    async def ask(self, method: str, target: str, body: bytes | None = None, head: str = "") -> Answer:
        """On a connection of its own."""
        client = await self.client()
        answer = await client.ask(method, target, body, head)
        client.leave()
        return answer

    async def probe(self, path: str, status: int) -> Answer:
        """The first answer with that status: on a machine that stands still for a second one is late, and
        503."""
        while (answer := await self.ask("GET", path)).status != status or b"undecided" in answer.body:
            assert answer.status == 503
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample; 0 when it is not there."""
        from prometheus_client import CollectorRegistry

        from moonpool.disagg_proxy.endpoints.relay_metrics import Collected, proxy_families

        registry = CollectorRegistry()
        registry.register(Collected(list(proxy_families(self.proxy.counters()))))
        return registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def bed(
    engines: int = 1,
    *,
    limits: Limits | None = None,
    deadlines: Deadlines | None = None,
    health: HealthChecks = QUIET,
    clock: FakeClock | None = None,
    breaker: BreakerLimits | None = None,
    prepare: Callable[[list[MockEngine]], None] = lambda engines: None,
    roles: Sequence[str] = (),
    decide: Callable[[ProxyRequest], Decision] | None = None,
    tls: ssl.SSLContext | None = None,
    engine_tls: ssl.SSLContext | None = None,
    **more: Any,
) -> AsyncIterator[Bed]:
    """Start mock engines and a proxy in front of them; take both down and check their integrity. tls,
    engine_tls: of clients, and of engines; None: in plain."""
    mocks = [MockEngine(f"engine-{place}") for place in range(engines)]
    for mock in mocks:
        mock.tls = engine_tls
        await mock.start()
    prepare(mocks)
    settings = ProxySettings(
        port=0,
        engines=tuple(
            replace(mock.spec, role=roles[place] if roles else "both") for place, mock in enumerate(mocks)
        ),
        limits=limits or Limits(),
        deadlines=deadlines or Deadlines(),
        health=health,
        breaker=breaker or BreakerLimits(),
        **{"handover": "two_step", "internals": Internals(sweep_s=0.01), **more},
    )
    proxy = Proxy(settings, decide)
    if clock is not None:
        clock.relay = proxy.relay
    try:
        url = await proxy.open()
        running = Bed(proxy, mocks, "127.0.0.1", int(url.rsplit(":", 1)[1]), tls=tls)
        yield running
        proxy.check_integrity()
        for client in running.clients:
            client.leave()
        await until(lambda: running.client_count == 0)
        proxy.check_integrity()
        assert running.counters.held_body_bytes == 0
        assert all(engine.in_flight == 0 for engine in running.counters.engines)
    finally:
        await proxy.close()
        for mock in mocks:
            await mock.stop()
