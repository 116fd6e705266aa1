"""A relay between engines that hand over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.disagg_proxy.harness import (
    Bed,
    Exchange,
    bed,
)

CHAT = "/v1/chat/completions"
BODY = (
    b'{"model":"m","stream":true,"max_tokens":7,"stream_options":{"include_usage":true},"min_tokens":2,'
    b'"messages":[]}'
)
GIVEN = (
    b'{"remote_engine_id":"p","remote_block_ids":[1,2],"remote_host":"h","remote_port":1, "odd":"\\u00e9\\""}'
)


async def prefill(exchange: Exchange) -> None:
    await exchange.answer(b'{"id":"x","kv_transfer_params":%b,"choices":[]}' % GIVEN)


async def stream(exchange: Exchange) -> None:
    await exchange.begin_stream()
    for text in ("a", "b"):
        await exchange.event(text)
    await exchange.end_stream()


@asynccontextmanager
async def pd_bed(roles: str = "pd", **more: object) -> AsyncIterator[Bed]:
    """One engine for each letter: p(refill), d(ecode), b(oth)."""
    names = {"p": "prefill", "d": "decode", "b": "both"}
    async with bed(len(roles), roles=[names[letter] for letter in roles], **more) as b:  # type: ignore[arg-type]
        for engine, letter in zip(b.engines, roles, strict=True):
            engine.behave = prefill if letter == "p" else stream
        yield b
