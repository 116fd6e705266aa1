"""Engines in a real etcd; a small server over real HTTP where etcd has to misbehave."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.discovery.etcd_source import EtcdSource, parse
from tests.disagg_proxy.discovery.heard import heard
from tests.disagg_proxy.harness import MockEngine, bed, until, with_deadline
from tests.ports import held_ports

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="needs etcd (apt-get install etcd-server)"
)


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


class Etcd:
    """An etcd in a process of its own; its data and port stay when it is started again."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self._folder = folder
        self._ports = ports
        self.url = f"http://127.0.0.1:{self._ports[0]}"
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        peer = f"http://127.0.0.1:{self._ports[1]}"
        self._process = await asyncio.create_subprocess_exec(
            *("etcd", "--data-dir", str(self._folder / "etcd"), "--unsafe-no-fsync"),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        self._session = aiohttp.ClientSession(self.url)
        while True:
            try:
                await self.ask("/v3/kv/range", {"key": b64("x")})
                return
            except (OSError, aiohttp.ClientError):
                assert self._process.returncode is None
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def ask(self, path: str, body: dict[str, Any]) -> Any:
        assert self._session is not None
        async with self._session.post(path, json=body) as answer:
            said = await answer.json(content_type=None)
            if answer.status != 200:
                raise aiohttp.ClientError(said)
            return said

    async def put(self, key: str, value: str | dict[str, Any], lease: str = "0") -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        await self.ask("/v3/kv/put", {"key": b64(key), "value": b64(text), "lease": lease})

    async def drop(self, key: str) -> None:
        await self.ask("/v3/kv/deleterange", {"key": b64(key)})


@asynccontextmanager
async def etcd(folder: Path) -> AsyncIterator[Etcd]:
    with held_ports(2) as ports:
        made = Etcd(folder, ports)
        try:
            await made.start()
            yield made
        finally:
            await made.stop()


@needs_etcd
@with_deadline
async def test_what_is_put_changed_and_deleted_is_told(tmp_path: Path) -> None:
    async with etcd(tmp_path) as e:
        await e.put("/engines/a", "http://10.0.0.1:8000")
        await e.put("/engine", "http://not.below:1")
        await e.put("/engines0", "http://not.below:2")
        async with heard(EtcdSource(f"{e.url}/engines/")) as h:
            await until(lambda: h.sets == [["a"]])
            row = {"url": "http://10.0.0.2:8000", "role": "prefill", "events": "tcp://10.0.0.2:5557"}
            await e.put("/engines/b/c", row)
            await until(lambda: h.sets[-1] == ["a", "b-c"])
            assert (h.last[1].spec.role, h.last[1].events is not None) == ("prefill", True)
            await e.put("/engines/a", {"url": "http://10.0.0.9:8000", "name": "z"})
            await until(lambda: h.sets[-1] == ["z", "b-c"])
            for odd in (
                "{",
                '{"url": 3}',
                "ftp://x",
                '{"url": "http://x:1", "rle": "both"}',
                "http://x:99999",
            ):
                await e.put("/engines/odd", odd)
            await e.put("/engines/d", "http://10.0.0.4:8000")
            await until(lambda: h.sets[-1] == ["z", "b-c", "d"])
            await e.drop("/engines/a")
            await until(lambda: h.sets[-1] == ["b-c", "d"])
            assert not any(h.ended)
            assert not h.failures


@needs_etcd
@with_deadline
async def test_an_engine_whose_lease_ends_is_missing(tmp_path: Path) -> None:
    async with etcd(tmp_path) as e:
        lease = (await e.ask("/v3/lease/grant", {"TTL": "60"}))["ID"]
        await e.put("e/a", "http://10.0.0.1:1", lease)
        await e.put("e/b", "http://10.0.0.2:1")
        async with heard(EtcdSource("e/", {"ETCDCTL_ENDPOINTS": e.url})) as h:
            await until(lambda: h.sets == [["a", "b"]])
            await e.ask("/v3/lease/revoke", {"ID": lease})
            await until(lambda: h.sets[-1] == ["b"])


@needs_etcd
@with_deadline
async def test_many_engines_come_in_pages(tmp_path: Path) -> None:
    async with etcd(tmp_path) as e:
        puts = [
            {"request_put": {"key": b64(f"e/{number:04d}"), "value": b64(f"http://h{number}:1")}}
            for number in range(2100)
        ]
        for begin in range(0, len(puts), 100):
            await e.ask("/v3/kv/txn", {"success": puts[begin : begin + 100]})
        async with (
            heard(EtcdSource(f"{e.url},{e.url}/x")) as nothing,
            heard(EtcdSource("e/", {"ETCDCTL_ENDPOINTS": e.url})) as h,
        ):
            await until(lambda: bool(h.sets and nothing.sets))
            assert h.sets == [[f"{number:04d}" for number in range(2100)]]
            assert nothing.sets == [[]]


@needs_etcd
@functools.partial(with_deadline, deadline_s=60.0)  # etcd starts twice, and is asked again after up to 8 s
async def test_a_proxy_outlives_its_etcd(tmp_path: Path) -> None:
    """It goes on with what it knew, and follows again when etcd is back."""
    one, two = MockEngine("one"), MockEngine("two")
    await one.start()
    await two.start()
    async with etcd(tmp_path) as e:
        await e.put("/engines/one", one.spec.url)
        async with bed(0, discovery=(f"etcd:{e.url}/engines/",), discovery_grace_s=0.1) as b:
            assert (await b.ask("POST", "/v1/completions", b"{}")).engine == "one"
            await e.stop()
            while json.loads((await b.ask("GET", "/health")).body)["discovery"][0]["state"] != "lost":
                await asyncio.sleep(0)
            assert (await b.ask("POST", "/v1/completions", b"{}")).engine == "one"
            await e.start()
            await e.put("/engines/two", two.spec.url)
            await e.drop("/engines/one")
            await until(lambda: [engine.name for engine in b.proxy.engines] == ["two"])
            await until(lambda: b.proxy.engines[0].liveness.healthy)
            assert (await b.ask("POST", "/v1/completions", b"{}")).engine == "two"
    await one.stop()
    await two.stop()


class Odd:
    """Answers like etcd, as far as the test says."""

    def __init__(self) -> None:
        self.reads = 0
        self.watches: list[dict[str, Any]] = []
        self.lines: list[bytes] = []
        self.status = 200
        self.token = ""
        self.ending = asyncio.Event()

    async def range(self, request: web.Request) -> web.Response:
        if self.token and request.headers.get("Authorization") != self.token:
            return web.json_response({"error": "no"}, status=401)
        self.reads += 1
        kv = {"key": b64(f"/e/{self.reads}"), "value": b64("http://h:1")}
        return web.json_response({"header": {"revision": "7"}, "kvs": [kv]}, status=self.status)

    async def watch(self, request: web.Request) -> web.StreamResponse:
        self.watches.append(await request.json())
        answer = web.StreamResponse()
        await answer.prepare(request)
        for line in self.lines:
            await answer.write(line)
        if self.lines:
            return answer
        await self.ending.wait()
        return answer

    async def authenticate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        return web.json_response({"token": self.token} if asked == {"name": "n", "password": "p:w"} else {})


@asynccontextmanager
async def odd() -> AsyncIterator[tuple[Odd, str]]:
    made, app = Odd(), web.Application()
    app.router.add_post("/v3/kv/range", made.range)
    app.router.add_post("/v3/watch", made.watch)
    app.router.add_post("/v3/auth/authenticate", made.authenticate)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield made, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        made.ending.set()
        await runner.cleanup()


@pytest.mark.parametrize(
    "lines",
    [
        [b'{"result":{"canceled":true,"compact_revision":"9"}}\n'],
        [b'{"error":{"code":14,"message":"no leader"}}\n'],
        [b"garbage\n"],
        [b'{"result":{"events":[{"kv":{}}]}}\n'],
        [b'{"result":{"created":true}}\n'],  # and the end
    ],
)
@with_deadline
async def test_a_watch_that_ends_begins_anew_with_all(lines: list[bytes]) -> None:
    async with odd() as (server, url):
        server.lines = lines
        async with heard(EtcdSource(f"{url}/e/", {}, retry_s=0.001)) as h:
            await until(lambda: len(h.sets) >= 3)
            assert h.failures
            assert server.watches[0]["create_request"]["start_revision"] == "8"
            assert h.sets[:3] == [["1"], ["2"], ["3"]]


@with_deadline
async def test_a_silent_watch_is_not_trusted_for_ever() -> None:
    async with odd() as (server, url), heard(EtcdSource(f"{url}/e/", {}, silent_s=0.5)) as h:
        await until(lambda: server.reads >= 3)
        assert len(h.failures) < 2  # silence is none; one watch may have begun late
        h.failures.clear()
        server.status = 503
        await until(lambda: bool(h.failures))
        assert "/v3/kv/range was answered with 503" in h.failures[-1]


@with_deadline
async def test_a_user_gets_a_token_and_another_member_is_asked() -> None:
    async with odd() as (server, url):
        server.token = "t"
        dead = "http://127.0.0.1:1"
        source = EtcdSource(f"{dead},{url}/e/", {"ETCDCTL_USER": "n:p:w"}, retry_s=0.001)
        async with heard(source) as h:
            await until(lambda: bool(h.sets))
            assert dead in h.failures[0]


def test_names_of_sources_are_checked() -> None:
    assert parse("http://a:1,https://b:2/a/b", {}) == (["http://a:1", "https://b:2"], b"/a/b")
    assert parse("p/", {"ETCDCTL_ENDPOINTS": "a:1,https://b:2"}) == (["http://a:1", "https://b:2"], b"p/")
    assert parse("p/", {}) == (["http://127.0.0.1:2379"], b"p/")
    for text in ("http://a:1", "http://a:1/", "ftp://a:1/p", "http:///p"):
        with pytest.raises(ConfigError, match="etcd:http://host:2379/PREFIX"):
            parse(text, {})
    with pytest.raises(ConfigError, match="ETCDCTL_CACERT"):
        EtcdSource("https://a:1/p", {"ETCDCTL_CACERT": "/nowhere"})
