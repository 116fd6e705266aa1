"""The sessions of benchmarks.agents, and what they see of each answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass

import aiohttp

from benchmarks.engine.fleet import prompt
from benchmarks.engine.serving import BLOCK_TOKENS, MODEL

TIMEOUT_S = 120.0
SYSTEM_TOKENS = 600
TURN_TOKENS, BRANCH_TOKENS, ANSWER_TOKENS = (60, 220), (40, 120), (16, 64)
BRANCH_EACH = 4  # turns
THINKS_S = (0.1, 1.0)


@dataclass(frozen=True)
class Turn:
    """number: in its session, from 0. known: leading tokens, in whole blocks, that earlier prompts and
    answers had. cached: prompt tokens that no engine computed for it."""

    number: int
    ttft_s: float
    known: int
    cached: int


@dataclass(frozen=True)
class _Answer:
    ttft_s: float
    ids: list[int]
    cached: int


async def warm_up(url: str) -> None:
    """First requests of each engine, which are slower; what they say is said in no session."""
    async with _session() as session:
        for number in range(4):
            await _ask(session, url, prompt(300, f"warm up {number}"), 8)


async def talk(url: str, sessions: int, turns: int, seed: int) -> list[Turn]:
    """All turns of all sessions, branches left out of what is returned. Raises RuntimeError for a request
    that failed."""
    done: list[Turn] = []
    system = prompt(SYSTEM_TOKENS, f"{seed}/system")
    async with _session() as session:

        async def agent(number: int) -> None:
            chance = random.Random(f"{seed}/{number}")
            ids = system
            known = SYSTEM_TOKENS if number else 0
            # The first session computes the system prompt.
            await asyncio.sleep(number and 1.0 + chance.uniform(*THINKS_S))
            for turn in range(turns):
                history = ids
                ids = history + prompt(chance.randint(*TURN_TOKENS), f"{seed}/{number}/{turn}")
                asked = [_ask(session, url, ids, chance.randint(*ANSWER_TOKENS))]
                if turn % BRANCH_EACH == BRANCH_EACH - 1:
                    end = prompt(chance.randint(*BRANCH_TOKENS), f"{seed}/{number}/{turn}/branch")
                    asked.append(_ask(session, url, history + end, chance.randint(*ANSWER_TOKENS)))
                answer, *_ = await asyncio.gather(*asked)
                done.append(Turn(turn, answer.ttft_s, known // BLOCK_TOKENS * BLOCK_TOKENS, answer.cached))
                ids = ids + answer.ids
                known = len(ids) - 1  # nothing was computed with the last token
                await asyncio.sleep(chance.uniform(*THINKS_S))

        await asyncio.gather(*map(agent, range(sessions)))
    return done


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def _ask(session: aiohttp.ClientSession, url: str, ids: list[int], answer_tokens: int) -> _Answer:
    body = {
        "model": MODEL,
        "prompt": ids,
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{url}/v1/completions", data=json.dumps(body), headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} from {url}: {await answer.text()}")
        first_s, said, usage = 0.0, [], {}
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
        if len(said) != answer_tokens:
            raise RuntimeError(f"{url} sent {len(said)} of {answer_tokens} tokens")
        details = usage.get("prompt_tokens_details") or {}
        return _Answer(first_s - began_s, said, details.get("cached_tokens") or 0)


__all__ = ["Turn", "talk", "warm_up"]
