"""Engines that answer a request at once, both of a pair, as SGLang's do; every byte is scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.disagg_proxy.harness import Bed, Behaviour, Exchange, bed

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY = b'{"model":"m","stream":false,"top_k":3,"max_tokens":7, "messages":[]}'
STREAM = b'{"model":"m","stream":true,"messages":[]}'
NAMES = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


async def never(exchange: Exchange) -> None:
    await exchange.gone.wait()


async def stream(exchange: Exchange) -> None:
    await exchange.begin_stream()
    for text in ("a", "b"):
        await exchange.event(text)
    await exchange.end_stream()


def status(code: int, body: bytes = b'{"error":"x"}', kind: str = "application/json") -> Behaviour:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(body, code, kind)

    return answer


def saying(value: object) -> Behaviour:
    return status(200, json.dumps(value).encode())


@asynccontextmanager
async def pair(roles: str = "pd", **more: Any) -> AsyncIterator[Bed]:
    """One engine for each letter: p(refill), d(ecode). They have no page: the setting says what they are."""
    names = {"p": "prefill", "d": "decode"}
    more.setdefault("handover", "one_shot")
    async with bed(len(roles), roles=[names[letter] for letter in roles], **more) as b:
        yield b


def rooms_of(exchange: Exchange) -> Any:
    return json.loads(exchange.body)["bootstrap_room"]
