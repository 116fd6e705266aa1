"""A stream whose engine makes each event only when the one before has arrived."""

from __future__ import annotations

import asyncio

from tests.disagg_proxy.harness import Bed, Client, Exchange


async def check_event_by_event(b: Bed, path: str) -> Client:
    """Asks the bed's first engine for three events; the client may ask again."""
    step = asyncio.Event()

    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for number in range(3):
            await exchange.event(str(number))
            await step.wait()
            step.clear()
        await exchange.end_stream()

    b.engines[0].behave = stream
    client = await b.client()
    await client.request("POST", path, b'{"prompt":"x","stream":true}')
    assert (await client.head()).status == 200
    for number in range(3):  # each is there before the next is made
        assert await client.chunk() == b"data: %d\n\n" % number
        step.set()
    assert await client.chunk() == b""
    return client
