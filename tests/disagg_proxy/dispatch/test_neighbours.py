"""Which engine a request is told of whose own cache has more of its prompt: by KV events, for equal models
and salts alone, and never by what a client says."""

from __future__ import annotations

import array
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from moonpool.core.service.kv_event_publisher import Batch, BlockStored
from moonpool.disagg_proxy.engines.bootstrap import Bootstrap, Rank, read_page
from moonpool.disagg_proxy.settings import parse_engines
from tests.disagg_proxy.harness import Bed, Exchange, MockEngine, bed, with_deadline

COMPLETIONS = "/v1/completions"
IDS = list(range(640))
BLOCK_TOKENS = 32
PAGE = "http://127.0.0.1:8998"
POLICY = "tests.disagg_proxy.dispatch.by_session:BySession"
NEIGHBOUR = {"remote_engine_id": "id-0", "remote_bootstrap_addr": PAGE}


@asynccontextmanager
async def neighbours(*models: str, tokens: int = 512, cached: bool = True, **more: Any) -> AsyncIterator[Bed]:
    """Engines of these models. The first has so many tokens of the prompt IDS in its own cache, as its events
    have told, and a page; cached: which says that it gives blocks."""

    def prepare(engines: list[MockEngine]) -> None:
        for engine, model in zip(engines, models, strict=True):
            engine.models = json.dumps({"data": [{"id": model, "owned_by": "vllm"}]}).encode()

    switches = {"switch_headers": ["load", "store"], "tokenizer": ("none",)}
    async with bed(len(models), policy=POLICY, prepare=prepare, **(switches | more)) as b:
        indexes, locator = b.proxy._indexes, b.proxy._locator
        index = indexes.obtain(BLOCK_TOKENS)
        assert index is not None
        event = BlockStored(
            list(range(tokens // BLOCK_TOKENS)), None, IDS[:tokens], BLOCK_TOKENS, medium="GPU"
        )
        for engine in b.proxy.engines:
            locator.hears(engine.place, index)
            page = Bootstrap(engine.name, ("127.0.0.1", 8998 + engine.place), expected=False, retry_s=1e6)
            page.answered((Rank(f"id-{engine.place}", PAGE, cached=cached),), 0.0)
            engine.bootstrap = page
        index.ingest(0, msgspec.msgpack.encode(Batch(time.time(), [event])))
        yield b


async def told(b: Bed, engine: int = 1, head: str = "", **more: Any) -> Any:
    """What the engine is told of a request, which goes there."""
    body = json.dumps({"prompt": IDS, **more}).encode()
    answer = await b.ask("POST", COMPLETIONS, body, f"X-Moonpool-Session: {engine}\r\n{head}")
    assert answer.status == 200, answer.body
    return json.loads(b.engines[engine].seen[-1].body).get("kv_transfer_params")


@with_deadline
async def test_an_engine_is_told_of_one_that_has_more() -> None:
    async with neighbours("m", "m") as b:
        assert await told(b) == {"moonpool": {"cached_at": NEIGHBOUR}}
        assert b.proxy._dispatcher.neighbours.named == 1
    async with neighbours("m", "m") as b:
        head = "X-Moonpool-Session: 1\r\nX-Moonpool-Decision: 1\r\nX-Moonpool-Store: off\r\n"
        answer = await b.ask("POST", COMPLETIONS, json.dumps({"prompt": IDS}).encode(), head)
        sent = json.loads(b.engines[1].seen[-1].body)["kv_transfer_params"]
        assert sent == {"moonpool": {"store": False, "cached_at": NEIGHBOUR}}
        why = answer.headers["x-moonpool-decision"]
        assert (json.loads(why)["neighbour"], json.loads(why)["switches"]) == ("engine-0", {"store": False})
        assert "8998" not in why  # an address of the operator's network


@with_deadline
async def test_no_engine_is_named_that_does_not_have_more_of_the_same() -> None:
    async with neighbours("m", "m") as b:
        assert await told(b, engine=0) is None  # which has it itself
        assert await told(b, cache_salt="another tenant") is None
        assert await told(b, prompt=[1, *IDS]) is None
        assert await told(b, head="X-Moonpool-Load: off\r\n") == {"moonpool": {"load": False}}
    async with neighbours("m", "m", tokens=224) as b:
        assert await told(b) is None  # less than neighbour_tokens_min
    async with neighbours("m", "m", neighbour_tokens_min=0) as b:
        assert await told(b) is None
    async with neighbours("m", "other") as b:
        assert await told(b, model="other") is None


@with_deadline
async def test_no_engine_is_named_that_does_not_give_blocks_or_is_not_heard() -> None:
    async with neighbours("m", "m", cached=False) as b:
        assert await told(b) is None
    async with neighbours("m", "m") as b:
        b.proxy._locator.hears(0, None)
        assert await told(b) is None
    for place in (0, 1):
        async with neighbours("m", "m") as b:
            b.proxy.engines[place].bootstrap = None
            assert await told(b) is None


@with_deadline
async def test_what_the_pool_has_is_not_taken_from_a_neighbour() -> None:
    async with neighbours("m", "m") as b:
        index = b.proxy._indexes.obtain(BLOCK_TOKENS)
        assert index is not None
        index.apply(40, 1, index.keys(array.array("I", IDS[:384])))  # a node of the pool
        assert await told(b) is None


@with_deadline
async def test_what_comes_from_a_neighbour_teaches_nothing() -> None:
    """The engine reports more cached tokens than it and the pool have: that is no pool that is not heard."""
    usage = {"prompt_tokens": 640, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 608}}

    async def answer(exchange: Exchange) -> None:
        await exchange.answer(json.dumps({"choices": [], "usage": usage}).encode())

    for tokens_min in (256, 0):
        async with neighbours("m", "m", neighbour_tokens_min=tokens_min) as b:
            b.engines[1].behave = answer
            tracker = b.proxy._dispatcher.scheduler.inflight
            for _ in range(12):
                await told(b)
                b.proxy._indexes.all[0].forget(1)  # that it will have what was sent to it
            b.proxy._dispatcher.learn()
            assert tracker.hidden_pool.seen is not bool(tokens_min)


@with_deadline
async def test_clients_cannot_name_a_neighbour() -> None:
    forged = {"moonpool": {"cached_at": {**NEIGHBOUR, "remote_bootstrap_addr": "http://10.0.0.1:80"}}}
    async with neighbours("m", "m") as b:
        assert await told(b, engine=0, kv_transfer_params=forged) is None
        assert await told(b, kv_transfer_params=forged) == {"moonpool": {"cached_at": NEIGHBOUR}}


@with_deadline
async def test_the_next_engine_that_is_tried_is_not_told_of_itself() -> None:
    async with neighbours("m", "m") as b:
        b.engines[1].behave = fails
        body = json.dumps({"prompt": IDS}).encode()
        answer = await b.ask("POST", COMPLETIONS, body, "X-Moonpool-Session: 1\r\n")
        assert answer.body == b'{"engine":"engine-0"}'
        assert b"id-0" in b.engines[1].seen[-1].body
        assert b"id-0" not in b.engines[0].seen[-1].body


async def fails(exchange: Exchange) -> None:
    exchange.cut()


@pytest.mark.parametrize(
    ("page", "cached"),
    [
        (b'{"0":{"engine_id":"a","cached":true,"worker_addr":{}}}', True),
        (b'{"0":{"engine_id":"a","worker_addr":{}}}', False),
        (b'{"0":{"engine_id":"a_dp0","cached":true},"1":{"engine_id":"a_dp1","cached":true}}', False),
    ],
)
def test_which_pages_name_an_engine_that_gives_blocks(page: bytes, cached: bool) -> None:
    bootstrap = Bootstrap("e", ("h", 1), expected=False, retry_s=1.0)
    bootstrap.answered(read_page(page, PAGE), 0.0)
    assert (bootstrap.cache is not None) is cached


def test_an_engine_of_both_roles_has_a_page_where_one_is_given() -> None:
    assert parse_engines(["http://a:1#bootstrap=2"])[0].bootstrap_address == ("a", 2)
    assert parse_engines(["http://a:1"])[0].bootstrap_address is None
