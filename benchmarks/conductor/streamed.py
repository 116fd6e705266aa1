"""A completion of token ids over HTTP, as a stream, for benchmarks with real engines."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.engine.serving import MODEL

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Streamed:
    """first_s: of the first event, by time.perf_counter. said: token ids, where they were asked for."""

    first_s: float
    said: list[int]
    usage: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def cached(self) -> int:
        """Prompt tokens that the engine which answered did not compute, by its own count."""
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def open_session() -> aiohttp.ClientSession:
    """As many connections as there are requests."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    ids: list[int],
    answer_tokens: int,
    headers: Mapping[str, str] | None = None,
    **more: object,
) -> Streamed:
    """more: members of the body. Raises RuntimeError for a request that failed."""
    body = {
        "model": MODEL,
        "prompt": ids,
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    sent = {"Content-Type": "application/json", **(headers or {})}
    async with session.post(f"{url}/v1/completions", data=json.dumps(body), headers=sent) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} from {url}: {await answer.text()}")
        first_s = 0.0
        said: list[int] = []
        usage: dict[str, Any] = {}
        async for line in answer.content:
            if not line.startswith(b"data:") or b"[DONE]" in line:
                continue
            first_s = first_s or time.perf_counter()
            event = json.loads(line[5:])
            if "error" in event:
                raise RuntimeError(f"{url} broke off: {event['error']}")
            for choice in event.get("choices", []):
                said += choice.get("token_ids") or []
            usage = event.get("usage") or usage
        return Streamed(first_s, said, usage, answer.headers)


__all__ = ["Streamed", "complete", "open_session"]
