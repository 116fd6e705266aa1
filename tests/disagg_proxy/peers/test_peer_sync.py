"""Two proxies whose engines have the same names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

import pytest

from moonpool.disagg_proxy.peers.settings import PeerSettings
from tests.disagg_proxy.harness import Bed, Client, Exchange, MockEngine, bed, until, with_deadline

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[],"prompt":[1,2],"stream":true}'


@with_deadline
async def test_engines_of_one_name_at_two_places_are_two(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first engine of each has a name of its own list, the second is one for both."""
    caplog.set_level(logging.WARNING)
    folder = os.path.relpath(tmp_path)  # socket paths are short
    where = [f"ipc://{min(folder, str(tmp_path), key=len)}/{each}" for each in "ab"]
    common = MockEngine("common")
    goon = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event("first")
        await goon.wait()
        await exchange.end_stream()

    def prepare(mocks: list[MockEngine]) -> None:
        mocks[0].behave = mocks[1].behave = answer
        if common.port:
            mocks[1].port = common.port
        else:
            common.port = mocks[1].port

    async with contextlib.AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(
                bed(
                    2,
                    policy="load_balancing",
                    tokenizer=("none",),
                    prepare=prepare,
                    peers=PeerSettings((where[number],), (where[1 - number],)),
                )
            )
            for number in range(2)
        ]
        clients = [await begun(one) for _ in range(6)]
        held = [engine.in_flight for engine in one.counters.engines]
        assert min(held) > 0
        await until(lambda: requests(two) == [0, held[1]])
        said = [each.getMessage() for each in caplog.records if "is at" in each.getMessage()]
        assert len(said) == 1
        for each, bed_ in ((one, "another"), (two, "here")):
            assert f"127.0.0.1:{each.engines[0].port}@" in said[0], bed_
        goon.set()
        for client in clients:
            await client.ended()


async def begun(at: Bed) -> Client:
    client = await at.client()
    await client.request("POST", CHAT, BODY, head="Connection: close\r\n")
    await client.head()
    return client


def requests(at: Bed) -> list[int]:
    """In the books of each engine."""
    return [each.load.requests for each in at.proxy._dispatcher.scheduler.inflight.workers]
