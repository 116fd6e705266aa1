"""Engines that register over HTTP, and routers that ask, as Mooncake documents it: real sockets."""

from __future__ import annotations

import array
import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool import _native
from moonpool.core.errors import ConfigError
from moonpool.core.service.kv_event_publisher import BlockRemoved, BlockStored
from moonpool.core.store.keys import block_digests
from moonpool.disagg_proxy.conductor.plan import Answer
from moonpool.disagg_proxy.discovery import registry_endpoints
from moonpool.disagg_proxy.discovery.cache_query_api import QUERY_BYTES_MAX, CacheQueryApi
from moonpool.disagg_proxy.discovery.registry import PUBLISHERS_MAX, Registry
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.settings import ProxySettings
from tests.disagg_proxy.discovery.registering import register
from tests.disagg_proxy.events.beds import BLOCK, Engine, chain, stored
from tests.disagg_proxy.harness import Bed, MockEngine, bed, until, with_deadline

HTTP: dict[str, Any] = {"discovery": ("http",), "policy": "conductor", "tokenizer": ("none",)}


async def post(b: Bed, path: str, body: object, head: str = "") -> tuple[int, Any]:
    answer = await b.ask("POST", path, json.dumps(body).encode(), head)
    return answer.status, json.loads(answer.body)


async def mock(b: Bed, name: str) -> MockEngine:
    made = MockEngine(name)
    await made.start()
    b.engines.append(made)
    return made


@pytest.fixture
def publishers() -> Iterator[list[Engine]]:
    made = [Engine(), Engine()]
    yield made
    for each in made:
        each.stop()


@with_deadline
async def test_an_engine_registers_serves_and_leaves() -> None:
    async with bed(0, **HTTP) as b:
        one = await mock(b, "one")
        registration = {"instance_id": "one", "url": one.spec.url, "modelname": "m"}
        said = await post(b, "/register", registration)
        assert said == (200, {"status": "registered successfully", "instance_id": "one", "engine": "there"})
        await until(lambda: b.proxy.engines[0].liveness.healthy)
        assert (await b.ask("POST", "/v1/completions", b'{"model":"m"}')).engine == "one"
        assert (await b.ask("POST", "/v1/completions", b'{"model":"x"}')).status == 404
        place = b.proxy.engines[0].place
        await post(b, "/register", {**registration, "ttl_s": 60})  # again: it is the same engine
        assert [engine.place for engine in b.proxy.engines] == [place]
        assert b.proxy.fleet.leaving == ()
        status, said = await post(b, "/unregister", {"instance_id": "one", "type": "vLLM", "dp_rank": 0})
        assert (status, said["removed_instances"]) == (200, ["one|default|0"])
        assert b.proxy.engines == ()  # at once: it said so itself
        assert (await post(b, "/unregister", {"instance_id": "one"}))[0] == 404


@with_deadline
async def test_an_engine_that_does_not_register_again_leaves_after_its_grace() -> None:
    async with bed(0, discovery_grace_s=0.05, **HTTP) as b:
        one = await mock(b, "one")
        registration = {"instance_id": "one", "url": one.spec.url, "ttl_s": 0.5}
        for _ in range(10):
            await post(b, "/register", registration)
            await asyncio.sleep(0)
        assert len(b.proxy.engines) == 1
        await until(lambda: b.proxy.engines == ())


@with_deadline
async def test_another_url_is_another_engine_under_the_same_name() -> None:
    async with bed(0, **HTTP) as b:
        first, second = await mock(b, "one"), await mock(b, "one")
        await post(b, "/register", {"instance_id": "one", "url": first.spec.url})
        await post(b, "/register", {"instance_id": "one", "url": second.spec.url})
        assert [engine.url for engine in b.proxy.engines] == [second.spec.url]
        await until(lambda: b.proxy.engines[0].liveness.healthy and not b.proxy.fleet.leaving)
        assert (await b.ask("POST", "/v1/completions", b"{}")).status == 200
        assert (len(first.seen), len(second.seen)) == (0, 1)


@with_deadline
async def test_a_router_asks_who_has_how_much(publishers: list[Engine]) -> None:
    """Of an engine behind the proxy, of a rank of it that is only listened to, and of a strange instance."""
    own, rank = publishers
    async with bed(0, **HTTP) as b:
        one = await mock(b, "one")
        common = {"type": "vLLM", "modelname": "m", "block_size": BLOCK}
        registration = {"instance_id": "one", "url": one.spec.url, "dp_rank": 0, **common}
        registration |= {"endpoint": own.endpoint, "replay_endpoint": own.replay}
        assert (await post(b, "/register", registration))[0] == 200
        of_rank = {"instance_id": "far", "endpoint": rank.endpoint, "replay_endpoint": rank.replay, **common}
        assert (await post(b, "/register", {**of_rank, "dp_rank": 3}))[0] == 200
        own.tell(stored(chain(0, 8), 100))
        rank.tell(stored(chain(0, 2), 200))
        query = {"model": "m", "token_ids": [*chain(0, 8), 9, 9], "block_size": BLOCK}

        async def asked(**more: object) -> Any:
            status, said = await post(b, "/query", {**query, **more})
            assert status == 200, said
            return said

        while (said := await asked())["default"].get("one", {}).get("longest_matched") != 8 * BLOCK or (
            said["default"]["far"]["longest_matched"] != 2 * BLOCK
        ):
            await asyncio.sleep(0.002)
        assert said == {
            "default": {
                "one": {"longest_matched": 32, "GPU": 32, "DP": {"0": 32}, "CPU": 0, "DISK": 0},
                "far": {"longest_matched": 8, "GPU": 8, "DP": {"3": 8}, "CPU": 0, "DISK": 0},
            }
        }
        assert list((await asked(instance_id="far"))["default"]) == ["far"]
        assert (await asked(tenant_id="other")) == {"other": {}}
        assert (await asked(model="another"))["default"].keys() <= {"one"}
        assert (await asked(block_size=64))["default"]["one"]["longest_matched"] == 0
        assert (await asked(cache_salt="s"))["default"]["one"]["longest_matched"] == 0
        own.tell(BlockRemoved([104], medium="GPU"))
        while (await asked())["default"]["one"]["GPU"] != 4 * BLOCK:
            await asyncio.sleep(0.002)
        hashes = by_hash(chain(0, 8))
        by = {"model": "m", "block_size": BLOCK, "instance_id": "one"}
        for members in ({"seq_hashes": hashes}, {"block_hash": hashes}):
            status, said = await post(b, "/query_by_hash", {**by, **members})
            assert (status, said["default"]["one"]["longest_matched"]) == (200, 4 * BLOCK)
        assert (await post(b, "/query_by_hash", by))[0] == 400
        await post(b, "/unregister", {"instance_id": "far"})
        assert list((await asked())["default"]) == ["one"]
        _, explained = await ask_with_decision(b, chain(0, 8))
        assert explained["own_tokens"] == 4 * BLOCK


@with_deadline
async def test_a_query_holds_up_nothing_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_endpoints, "QUERIES_MAX", 2)
    goon = threading.Event()

    async with bed(1, **HTTP) as b:
        answer = CacheQueryApi.by_tokens

        def waits(self: CacheQueryApi, body: bytes, salt: str) -> Answer:
            assert goon.wait(20)
            return answer(self, body, salt)

        monkeypatch.setattr(CacheQueryApi, "by_tokens", waits)
        query = {"model": "m", "token_ids": [1, 2, 3, 4], "block_size": BLOCK}
        asked = [asyncio.ensure_future(post(b, "/query", query)) for _ in range(3)]
        over, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        (status, said) = over.pop().result()
        assert (status, "queries wait already" in said["error"]["message"]) == (503, True)
        assert (await b.ask("GET", "/health")).status == 200
        assert (await b.ask("POST", "/v1/completions", b"{}")).status == 200
        goon.set()
        assert [(await each)[0] for each in waiting] == [200, 200]
        assert (await post(b, "/query", query))[0] == 200
        monkeypatch.setattr(CacheQueryApi, "by_tokens", lambda self, body: 1 / 0)
        assert (await post(b, "/query", query))[0] == 500


@with_deadline
async def test_the_pool_is_everybodys_host_memory_and_disk(publishers: list[Engine]) -> None:
    """One node has the beginning in memory and another what follows; the end is on a disk. An engine that has
    dropped what it told of still says what its hashes mean."""
    nodes = [Engine(), Engine()]
    sources = [EventSource(f"n{each}", node.endpoint, node.replay, True) for each, node in enumerate(nodes)]
    own, bare = publishers
    tokens = chain(0, 8)
    digests = block_digests(tokens, BLOCK)
    async with bed(0, events=tuple(sources), **HTTP) as b:
        for name, engine in (("own", own), ("bare", bare)):
            body = {"instance_id": name, "endpoint": engine.endpoint, "replay_endpoint": engine.replay}
            assert (await post(b, "/register", {**body, "block_size": BLOCK}))[0] == 200
        own.tell(stored(tokens, 100))
        bare.tell(stored(chain(1000, 1), 100))
        nodes[0].tell(BlockStored(digests[:3], medium="CPU"))
        nodes[1].tell(BlockStored(digests[3:5], medium="CPU"), BlockStored(digests[5:6], medium="DISK"))
        common = {"model": "m", "block_size": BLOCK}
        asked = [
            ("/query", {**common, "token_ids": tokens}),
            ("/query_by_hash", {**common, "seq_hashes": by_hash(tokens)}),
        ]
        of_own = {"longest_matched": 32, "GPU": 32, "DP": {"0": 32}, "CPU": 0, "DISK": 0}
        of_bare = {"longest_matched": 24, "GPU": 0, "DP": {"0": 0}, "CPU": 20, "DISK": 24}
        for path, query in asked:
            while await post(b, path, query) != (200, {"default": {"own": of_own, "bare": of_bare}}):
                await asyncio.sleep(0.002)
        own.tell(BlockRemoved(list(range(102, 108)), medium="GPU"))
        of_own = {"longest_matched": 24, "GPU": 8, "DP": {"0": 8}, "CPU": 20, "DISK": 24}
        for path, query in asked:
            while await post(b, path, query) != (200, {"default": {"own": of_own, "bare": of_bare}}):
                await asyncio.sleep(0.002)
        status, said = await post(b, "/query", {**asked[0][1], "cache_salt": "s"})
        assert (status, said["default"]["bare"]["longest_matched"]) == (200, 0)
        status, said = await post(b, "/query", {**asked[0][1], "token_ids": []})
        assert (status, said["default"]["own"]["longest_matched"]) == (200, 0)
    for node in nodes:
        node.stop()


def by_hash(tokens: list[int]) -> list[int]:
    hashes: list[int] = _native.sequence_hashes(array.array("I", tokens), BLOCK)
    return hashes


async def ask_with_decision(b: Bed, tokens: list[int]) -> tuple[str, dict[str, Any]]:
    await until(lambda: b.proxy.engines[0].liveness.healthy)
    body = json.dumps({"model": "m", "prompt": tokens}).encode()
    answer = await b.ask("POST", "/v1/completions", body, "X-Moonpool-Decision: 1\r\n")
    assert answer.status == 200
    return answer.engine, json.loads(answer.headers["x-moonpool-decision"])


@with_deadline
async def test_what_is_wrong_with_a_registration_is_said() -> None:
    async with bed(0, **HTTP) as b:
        for body, sentence in (
            ({}, "instance_id"),
            ({"instance_id": "a"}, "has an endpoint (of KV events), a url (of an engine), or both"),
            ({"instance_id": "a", "url": "ftp://x"}, "looks like http://host:port"),
            ({"instance_id": "a b", "url": "http://x:1"}, "an engine's name has"),
            ({"instance_id": "a", "endpoint": "ipc:///tmp/x"}, "tcp://host:port"),
            ({"instance_id": "a", "endpoint": "tcp://h:1", "type": "Mooncake"}, "cannot be read"),
            ({"instance_id": "a", "url": "http://x:1", "dp_rank": -1}, "dp_rank"),
            ({"instance_id": "a" * 300, "url": "http://x:1"}, "256"),
            ([1], "Expected `object`"),
        ):
            status, said = await post(b, "/register", body)
            assert (status, sentence in said["error"]["message"]) == (400, True), said
        assert (await b.ask("POST", "/register", b"x" * 70_000)).status == 413
        assert (await b.ask("POST", "/query", b"x" * (QUERY_BYTES_MAX + 1))).status == 413
        assert (await b.ask("GET", "/register")).status == 405
        for query, sentence in (
            ({"model": "m", "token_ids": [-1], "block_size": 4}, ">= 0"),
            ({"model": "m", "token_ids": [1 << 32], "block_size": 4}, "<"),
            ({"model": "m", "token_ids": [[1, 2]], "block_size": 4}, "token_ids: "),
            ({"model": "m", "token_ids": [1, "2"], "block_size": 4}, "token_ids: "),
            ({"model": "m", "token_ids": [1], "block_size": 0}, ">= 1"),
            ({"model": "m", "token_ids": [1]}, "block_size"),
            ({"model": "m", "token_ids": [1], "block_size": 4, "lora_id": 1}, "lora_name"),
        ):
            status, said = await post(b, "/query", query)
            assert (status, sentence in said["error"]["message"]) == (400, True), said


@with_deadline
async def test_the_paths_are_off_unless_asked_for() -> None:
    async with bed(1) as b:
        assert (await post(b, "/register", {"instance_id": "a", "url": "http://x:1"}))[0] == 404
        assert (await post(b, "/query", {}))[0] == 404


@with_deadline
async def test_only_who_has_a_key_registers(tmp_path: Path) -> None:
    clients, registrars = tmp_path / "clients", tmp_path / "registrars"
    clients.write_text("of-a-client\n")
    registrars.write_text("of-an-engine\n")
    more = {"api_keys_file": str(clients), "discovery_keys_file": str(registrars)}
    async with bed(0, **HTTP, **more) as b:
        body = {"instance_id": "a", "url": "http://127.0.0.1:9"}
        query = {"model": "m", "token_ids": [1], "block_size": 4}
        for head, may_register, may_ask in (
            ("", 401, 401),
            ("Authorization: Bearer of-a-client\r\n", 401, 200),
            ("Authorization: Bearer of-an-engine\r\n", 200, 401),
            ("Authorization: Basic of-an-engine\r\n", 401, 401),
        ):
            assert (await post(b, "/register", body, head))[0] == may_register
            assert (await post(b, "/query", query, head))[0] == may_ask


@with_deadline
async def test_no_web_page_registers_or_asks() -> None:
    """A form of any page may be posted to loopback; the page's name may even be made to mean this host."""
    async with bed(0, **HTTP) as b:
        body = {"instance_id": "a", "url": "http://127.0.0.1:9"}
        for head in (
            "Origin: https://page.example\r\nContent-Type: text/plain\r\n",
            "Origin: null\r\n",
            "Sec-Fetch-Site: cross-site\r\n",
            "Sec-Fetch-Site: same-origin\r\n",
        ):
            for path in ("/register", "/unregister", "/query", "/query_by_hash"):
                assert (await post(b, path, body, head))[0] == 403, (path, head)
        assert b.proxy.engines == ()
        assert (await post(b, "/register", body, "Sec-Fetch-Site: none\r\n"))[0] == 200


def test_an_open_address_needs_keys() -> None:
    with pytest.raises(ConfigError, match="--discovery-keys-file"):
        ProxySettings(host="0.0.0.0", discovery=("http",))
    with pytest.raises(ConfigError, match="--discovery http alone"):
        ProxySettings(discovery=("file:x",), discovery_keys_file="keys")
    with pytest.raises(ConfigError, match="--discovery http alone"):
        ProxySettings(discovery=("file:x",), discovery_registry_file="registered")


class NoStreams:
    def follow(self, name: str, source: EventSource) -> int | None:
        return None

    def drop(self, name: str, holder: int) -> None:
        raise AssertionError(name)


class Streams:
    """How many there may be; those that are followed, by name."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))
        self.followed: dict[str, tuple[int, EventSource]] = {}

    def follow(self, name: str, source: EventSource) -> int | None:
        if not self.free:
            return None
        assert name == source.name
        assert name not in self.followed
        self.followed[name] = self.free.pop(), source
        return self.followed[name][0]

    def drop(self, name: str, holder: int) -> None:
        assert self.followed.pop(name)[0] == holder
        self.free.append(holder)


def registration(rank: int, **more: object) -> bytes:
    told = {"instance_id": "p0", "url": "http://h:1", "endpoint": f"tcp://h:{5000 + rank}", "dp_rank": rank}
    return json.dumps({**told, **more}).encode()


def test_a_further_rank_has_a_stream_of_its_own_name_and_stands_in_for_the_first() -> None:
    streams = Streams(2)
    registry = Registry(streams, clock=lambda: 0.0)
    for rank in range(3):
        assert register(registry, registration(rank)).status == 200
    assert {name: source.endpoint for name, (_, source) in streams.followed.items()} == {
        "p0|default|1": "tcp://h:5001",
        "p0|default|2": "tcp://h:5002",
    }
    assert registry.unregister(b'{"instance_id": "p0", "dp_rank": 0}').status == 200
    (engine,) = registry._engines()
    assert (engine.name, engine.events) == ("p0", EventSource("p0", "tcp://h:5001"))
    assert list(streams.followed) == ["p0|default|2"]
    assert register(registry, registration(1, url="")).status == 200  # a stream alone: the engine is rank 2's
    (engine,) = registry._engines()
    assert engine.events == EventSource("p0", "tcp://h:5002")
    assert registry.unregister(b'{"instance_id": "p0"}').status == 200
    assert (registry._engines(), streams.followed) == ([], {})


def test_a_rank_at_another_url_is_told_to_take_another_id() -> None:
    registry = Registry(Streams(2), clock=lambda: 0.0)
    assert register(registry, registration(0)).status == 200
    assert register(registry, registration(1, url="http://h:2")).status == 409
    assert register(registry, registration(0, url="http://h:2")).status == 200  # its own, elsewhere
    for wrong in ({"instance_id": "a|b"}, {"tenant_id": "a|b"}):
        assert register(registry, registration(3, url="", **wrong)).status == 400


def test_a_registration_that_finds_no_room_changes_nothing() -> None:
    registry = Registry(Streams(0), clock=lambda: 0.0)
    assert register(registry, registration(0)).status == 200
    before = registry._engines()
    assert register(registry, registration(0, url="")).status == 503
    assert registry._engines() == before


def test_an_engine_is_waiting_when_another_has_its_name() -> None:
    registry = Registry(Streams(0), clock=lambda: 0.0, is_there=lambda spec: spec.address == ("other", 1))
    said = register(registry, registration(0)).body
    assert json.loads(said)["engine"] == "waiting"


def test_registrations_are_bounded() -> None:
    registry = Registry(NoStreams(), clock=lambda: 0.0)
    for number in range(PUBLISHERS_MAX):
        body = json.dumps({"instance_id": f"e{number}", "url": f"http://h{number}:1"}).encode()
        assert register(registry, body).status == 200
    assert register(registry, b'{"instance_id": "more", "url": "http://m:1"}').status == 503
    assert register(registry, b'{"instance_id": "e0", "url": "http://h0:2"}').status == 200
    assert registry.unregister(b'{"instance_id": "e1"}').status == 200
    assert register(registry, b'{"instance_id": "more", "endpoint": "tcp://h:1"}').status == 503
